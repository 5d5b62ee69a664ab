"""Escalade: convolutional-network kernels for NVIDIA GPUs, as ladders."""

__version__ = "0.1.0"
