"""Policies of the families that need more than the trace knows; `pipeshard.register_policy` adds one."""
