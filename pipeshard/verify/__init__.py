"""Verify: compares the split model with the unsplit model on the user's own samples."""
