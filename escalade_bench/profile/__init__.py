"""Profiles: targets yield launches, ncu, CUPTI or the twin count them, and a table with a diagnosis shows them."""
