"""The rungs of squeeze_excite, one module per family."""
