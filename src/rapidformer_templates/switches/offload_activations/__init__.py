"""Keeps activations in host memory between their forward and their backward."""
