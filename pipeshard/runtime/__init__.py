"""What runs during a step: stages, messages, losses and gradients."""
