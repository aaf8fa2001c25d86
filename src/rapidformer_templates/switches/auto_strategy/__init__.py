"""The planner: which layouts of workers and batches fit into memory, and which is the fastest."""
