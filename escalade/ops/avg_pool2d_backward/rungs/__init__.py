"""The rungs of avg_pool2d_backward, a module a family."""
