"""torch.compile: the blocks compiled, and a report of what the compiler did."""
