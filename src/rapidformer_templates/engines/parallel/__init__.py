"""Data parallelism over replicas of a model that is itself sharded over workers."""
