"""Remedies: scripts that follow the advice of errors and of the documentation."""
