"""Checkpoints: weights, adapters, optimizers and training states, which any number of stages reads and writes."""
