"""Turns flags into a plan, or into every reason why there is none. Does not import torch."""
