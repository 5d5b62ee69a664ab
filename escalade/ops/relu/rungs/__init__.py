"""The rungs of relu, a module a family."""
