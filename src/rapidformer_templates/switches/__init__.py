"""Accelerations. Each has one folder or file here, so ``ls`` lists them all. Declarations do not import torch."""
