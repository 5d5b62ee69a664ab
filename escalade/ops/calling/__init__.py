"""Eager calls of operations: registration with PyTorch, and prepared calls cached per kind of arguments."""
