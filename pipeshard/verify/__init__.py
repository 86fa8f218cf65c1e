"""Verify: the split model compared with the unsplit one, on the user's own samples."""
