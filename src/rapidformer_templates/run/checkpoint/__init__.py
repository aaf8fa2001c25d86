"""Checkpoints: written whole, checked, read into any layout."""
