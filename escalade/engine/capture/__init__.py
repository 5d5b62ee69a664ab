"""Makes a graph of a PyTorch module, without touching the module."""
