"""A DeepSpeed file of the user's own, read into a plan."""
