"""The first layer of a network: convolution of an image with few channels, bias, ReLU and max-pooling in one."""

from escalade.ops.stem.operation import STEM, Stem
from escalade.ops.stem.problem import StemProblem

__all__ = ["STEM", "Stem", "StemProblem"]
