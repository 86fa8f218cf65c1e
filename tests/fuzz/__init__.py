"""Fuzzing: what strangers may have written is read, or refused by name; nothing else ever happens."""
