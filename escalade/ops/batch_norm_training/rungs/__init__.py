"""The rungs of batch_norm_training, a module a family."""
