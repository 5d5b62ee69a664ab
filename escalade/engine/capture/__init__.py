"""Capture of PyTorch modules as graphs, without changing the modules."""
