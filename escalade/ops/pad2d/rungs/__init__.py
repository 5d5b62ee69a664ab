"""The rungs of pad2d, a module a family."""
