"""The rungs of quantise, a module a family."""
