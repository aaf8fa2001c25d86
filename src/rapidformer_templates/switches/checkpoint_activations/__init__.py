"""Recomputes activations in the backward."""
