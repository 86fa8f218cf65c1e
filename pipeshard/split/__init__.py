"""Split: the division of a model into stages, based on its trace."""
