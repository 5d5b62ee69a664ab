"""The rungs of conv2d, one module per family; sources in kernels/ have the same names."""
