"""The rungs of convert, a module a family."""
