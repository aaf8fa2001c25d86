"""Tensor, sequence and pipeline parallelism: one model over several workers."""
