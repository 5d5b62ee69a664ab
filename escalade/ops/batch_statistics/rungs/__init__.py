"""The rungs of batch_statistics, a module a family."""
