"""The rungs of group_norm, a module a family."""
