"""The rungs of batch_norm, a module a family."""
