"""The rungs of add, a module a family."""
