"""The rungs of mlp, one module per family."""
