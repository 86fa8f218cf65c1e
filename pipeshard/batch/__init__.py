"""Batch: the inputs of a model, and their split into microbatches.

A batch takes four steps from the dataloader to the model:

1. `tree.flatten` turns nested dicts, lists and dataclasses into leaves with readable paths.
2. `batch.Batch.of` finds the number of samples, and the dimension of each leaf that counts them.
3. `read.read_batch` assigns images, patches and sounds to samples; the result of steps 1 to 3 is a `Batch`.
4. `read.RowDims` compares each leaf with earlier batches, and resolves or reports ambiguous leaves.

The engine then casts the batch to the precision of the model and calls `Batch.split`. `criterion` computes a loss from
a batch and the model's output.
"""
