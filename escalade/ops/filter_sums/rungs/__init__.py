"""The rungs of filter_sums, a module a family."""
