"""Checkpoints: weights, adapters, optimizers and training states, saved and loaded by any number of stages."""
