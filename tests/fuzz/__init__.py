"""Fuzzing: untrusted input is either read, or refused with an error of pipeshard; nothing else ever happens."""
