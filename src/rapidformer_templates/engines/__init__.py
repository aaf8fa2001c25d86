"""Engines: each owns the optimizer step of one way to run a model."""
