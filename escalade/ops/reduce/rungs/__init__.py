"""The rungs of reduce, a module a family."""
