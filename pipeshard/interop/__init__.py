"""Interop: the stages of a model as modules for other runtimes."""
