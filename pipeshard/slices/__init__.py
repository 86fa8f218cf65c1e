"""Slices: microbatches split along the sequence, and the cache through which a slice reads earlier slices."""
