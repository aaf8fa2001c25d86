"""Attention kernels: which one a model calls, packed rows without a mask, and a receipt of what ran."""
