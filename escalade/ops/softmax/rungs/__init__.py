"""The rungs of softmax, a module a family."""
