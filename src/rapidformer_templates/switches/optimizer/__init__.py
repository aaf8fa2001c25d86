"""Optimizers that torch lacks, and those of other packages in a form that checkpoints can store."""
