"""One run from plan to summary."""
