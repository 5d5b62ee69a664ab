"""The rungs of layer_norm, a module a family."""
