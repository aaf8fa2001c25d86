"""Engines. Each one implements the optimizer step for one way to run a model."""
