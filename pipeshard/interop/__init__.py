"""Interop: the stages of a model in other runtimes."""
