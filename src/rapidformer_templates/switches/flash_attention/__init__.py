"""Attention kernels: the kernel that a model calls, packed rows without a mask, and a receipt of what ran."""
