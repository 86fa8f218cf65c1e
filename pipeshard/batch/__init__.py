"""Batch: the inputs of a model, and how they are cut into microbatches.

A batch takes four steps from the dataloader to the model:

1. `tree.flatten`: nested dicts, lists and dataclasses become leaves with readable paths.
2. `batch.Batch.of`: the number of samples, and which dimension of each leaf counts them.
3. `read.read_batch`: which images, patches and sounds belong to which sample; steps 1 to 3 make a `Batch`.
4. `read.RowDims`: what earlier batches have shown of each leaf, and what is ambiguous.

The engine then casts it to the precision of the model and calls `Batch.split`. `read.find_sample` gives the batch that
a model is traced with before the first step; `criterion` computes a loss from a batch and the model's output.
"""
