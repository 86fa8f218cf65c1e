"""Split: the division of a model into stages, from its trace."""
