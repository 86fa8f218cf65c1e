"""Batch: the inputs of a model, and how they are split into microbatches.

A batch takes four steps from the dataloader to the model:

1. `tree.flatten`: nested dicts, lists and dataclasses become leaves with readable paths.
2. `batch.Batch.of`: the number of samples, and which dimension of each leaf counts them.
3. `read.read_batch`: which images, patches and sounds belong to which sample; steps 1 to 3 make a `Batch`.
4. `read.RowDims`: the role of each leaf in earlier batches, which resolves or reports ambiguous leaves.

The engine then casts the batch to the precision of the model and calls `Batch.split`. `read.find_sample` returns the
batch for the trace before the first step; `criterion` computes a loss from a batch and the model's output.
"""
