"""Blocks cut into stages."""
