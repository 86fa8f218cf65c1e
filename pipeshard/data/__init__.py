"""Data: the order of samples, and each replica's share of that order."""
