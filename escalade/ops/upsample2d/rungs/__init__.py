"""The rungs of upsample2d, a module a family."""
