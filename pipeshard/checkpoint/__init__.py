"""Checkpoints: weights, adapters, optimizers and whole runs, as files that any number of stages reads and writes."""
