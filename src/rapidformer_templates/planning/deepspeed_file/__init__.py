"""Reads a user's DeepSpeed file into a plan."""
