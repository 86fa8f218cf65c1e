"""Slices: microbatches cut along the sequence, and the cache through which one slice reads the ones before it."""
