"""The rungs of pixel_shuffle, a module a family."""
