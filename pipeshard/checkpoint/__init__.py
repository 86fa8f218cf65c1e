"""Checkpoints in the Hugging Face layout."""
