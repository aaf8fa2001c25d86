"""The planner: which layouts of workers and batches fit into memory, and which of them is fastest."""
