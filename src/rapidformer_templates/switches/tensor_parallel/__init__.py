"""Tensor and sequence parallelism: one model over several workers."""
