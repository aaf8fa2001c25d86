"""Building, reading and describing models."""
