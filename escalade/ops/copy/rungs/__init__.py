"""The rungs of copy, a module a family."""
