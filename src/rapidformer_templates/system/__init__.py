"""Processes, signals, files, memory and random numbers."""
