"""The rungs of squeeze_excite, a module a family."""
