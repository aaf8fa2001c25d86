"""Megatron-LM's indexed data sets."""
