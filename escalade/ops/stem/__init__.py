"""First layer of a network: a convolution of few channels with fused normalization, bias, ReLU and max-pooling."""

from escalade.ops.stem.operation import STEM, Stem
from escalade.ops.stem.problem import StemProblem

__all__ = ["STEM", "Stem", "StemProblem"]
