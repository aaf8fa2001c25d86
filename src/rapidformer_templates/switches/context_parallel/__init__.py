"""Context parallelism: each sequence divided over workers."""
