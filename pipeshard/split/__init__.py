"""Split: a model becomes stages, by its graph."""
