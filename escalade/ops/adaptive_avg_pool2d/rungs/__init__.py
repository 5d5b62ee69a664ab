"""The rungs of adaptive_avg_pool2d, a module a family."""
