"""What a model is made of, and what a stage keeps of it."""
