"""Context parallelism: each sequence is divided over workers."""
