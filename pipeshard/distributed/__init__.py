"""Distributed: ranks, the data that they exchange, and the handling of failures; independent of models."""
