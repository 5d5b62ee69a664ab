"""The rungs of max_pool2d_backward, a module a family."""
