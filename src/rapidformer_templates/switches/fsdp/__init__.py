"""Fully sharded data parallelism with torch."""
