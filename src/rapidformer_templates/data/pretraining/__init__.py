"""Samples and objectives of pretraining."""
