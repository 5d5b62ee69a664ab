"""The rungs: one module a family, whose sources in kernels/ have its name, and what families share."""
