"""Engine: runs a step on one rank: stages, messages, losses and gradients."""
