"""torch.compile: compiles the blocks and reports what the compiler did."""
