"""Tests of the recipes in ``examples/recipes``."""
