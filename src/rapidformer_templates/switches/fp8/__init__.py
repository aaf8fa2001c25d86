"""fp8: matrix products of the blocks in 8-bit floating point, with torchao's scaling and kernels."""
