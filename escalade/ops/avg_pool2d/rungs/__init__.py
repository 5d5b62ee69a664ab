"""The rungs of avg_pool2d, a module a family."""
