"""Parity: every architecture of transformers, tiny and random, trained split and unsplit and compared."""
