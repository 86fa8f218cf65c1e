"""Distributed: ranks, what they tell each other, and what ends them; knows no model."""
