"""Samples that are read and tokenized while the run trains on them."""
