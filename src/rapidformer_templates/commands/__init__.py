"""What `rapidformer X` does."""
