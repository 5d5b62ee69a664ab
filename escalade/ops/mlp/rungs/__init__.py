"""The rungs of mlp, a module a family."""
