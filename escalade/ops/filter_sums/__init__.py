"""Filters of convolutions whose pixels are repeated, summed up: `FilterSums` is the operation with its ladder."""

from escalade.ops.filter_sums.operation import FILTER_SUMS, FilterSums
from escalade.ops.filter_sums.problem import FilterSumsProblem
from escalade.ops.filter_sums.reference import summed

__all__ = ["FILTER_SUMS", "FilterSums", "FilterSumsProblem", "summed"]
