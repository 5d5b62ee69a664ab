"""A network for one batch size: which kernels run over which bytes, and the program that runs them."""
