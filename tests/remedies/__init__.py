"""Remedies: what errors and the pages tell a user to do, done."""
