"""The rungs of pointwise_loss, a module a family."""
