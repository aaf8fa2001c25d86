"""Checkpoints: written atomically, verified, and loadable in any layout."""
