"""From a PyTorch module to a graph, without touching the module."""
