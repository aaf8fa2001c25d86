"""From raw text to tokens."""
