"""The rungs of conv2d_weight_gradient, one module per family; sources in kernels/ have the same names."""
