"""The rungs of batch_norm_backward, a module a family."""
