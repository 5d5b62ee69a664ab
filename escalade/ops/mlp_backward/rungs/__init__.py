"""The rungs of mlp_backward, one module per family."""
