"""Fully sharded data parallelism by torch."""
