"""The rungs of linear, a module a family."""
