"""Batches by length under a budget of tokens."""
