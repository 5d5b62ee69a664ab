"""Channels as pixels and back: `pixel_shuffle` is the operator, `PixelShuffle` the operation with its ladder."""

from escalade.ops.pixel_shuffle.op import pixel_shuffle
from escalade.ops.pixel_shuffle.operation import PIXEL_SHUFFLE, PixelShuffle
from escalade.ops.pixel_shuffle.problem import PixelShuffleProblem

__all__ = ["PIXEL_SHUFFLE", "PixelShuffle", "PixelShuffleProblem", "pixel_shuffle"]
