"""The rungs of cross_entropy, a module a family."""
