"""The rungs of top_k, a module a family."""
