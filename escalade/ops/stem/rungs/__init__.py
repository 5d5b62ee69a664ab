"""The rungs of stem, one module per family; sources in kernels/ have the same names."""
