"""Activations computed again in the backward."""
