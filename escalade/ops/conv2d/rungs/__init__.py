"""The rungs of conv2d, one module per family; their kernels are in kernels/conv2d/."""
