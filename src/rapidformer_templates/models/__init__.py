"""Building, loading and describing models."""
