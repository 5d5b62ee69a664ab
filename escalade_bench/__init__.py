"""Benchmarks: results are verified before timing, in one process, next to the card's measured ceilings."""
