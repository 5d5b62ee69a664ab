"""The rungs of few_channels, one module per family; sources in kernels/ have the same names."""
