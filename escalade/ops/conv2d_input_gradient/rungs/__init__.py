"""The rungs of conv2d_input_gradient, one module per family; their kernels are in kernels/conv2d_input_gradient/."""
