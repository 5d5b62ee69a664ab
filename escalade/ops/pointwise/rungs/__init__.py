"""The rungs of pointwise, a module a family."""
