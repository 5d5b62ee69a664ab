"""The rungs of upsample2d_backward, a module a family."""
