"""Graph: which unit calls a model makes, and what each of them depends on."""
