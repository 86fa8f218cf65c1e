"""Data: the order of samples, and the share of it that a replica reads."""
