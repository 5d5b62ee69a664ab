"""Code that several operations share: rows of a matrix, pointwise kernels, windows over images."""
