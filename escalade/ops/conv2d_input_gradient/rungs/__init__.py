"""The rungs of conv2d_input_gradient, one module per family; sources in kernels/ have the same names."""
