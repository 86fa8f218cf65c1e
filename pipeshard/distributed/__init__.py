"""Distributed: ranks, the data they exchange, and how failures end them; knows no model."""
