"""The rungs of max_pool2d, a module a family."""
