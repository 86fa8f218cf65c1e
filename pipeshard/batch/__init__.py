"""Batch: the inputs of a model, and their split into microbatches.

A batch goes through four steps after the dataloader:

1. `tree.flatten` turns nested dicts, lists and dataclasses into leaves with readable paths.
2. `batch.Batch.of` finds the number of samples, and for each leaf the dimension that counts the samples.
3. `read.read_batch` assigns images, patches and audio clips to samples. The result of steps 1 to 3 is a `Batch`.
4. `read.RowDims` compares each leaf with the same leaf in earlier batches, and resolves or reports ambiguous leaves.

The engine then casts the batch to the precision of the model, and splits it into microbatches with `Batch.split`.
`criterion` computes a loss from the model's output and a batch.
"""
