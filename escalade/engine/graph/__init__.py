"""A network as data: nodes over named values, how values lie in memory, and PyTorch's operators by name."""
