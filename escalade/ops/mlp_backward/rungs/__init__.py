"""The rungs of mlp_backward, a module a family."""
