"""The rungs of linear, one module per family."""
