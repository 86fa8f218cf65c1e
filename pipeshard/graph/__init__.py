"""Graph: the unit calls of a model's forward, and the dependencies of each call."""
