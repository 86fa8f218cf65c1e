"""Batch: what a model is called with, and how it is cut into microbatches."""
