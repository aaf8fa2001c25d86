"""Batches by length under a token budget."""
