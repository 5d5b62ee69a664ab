"""A convolution of few channels with ReLU and pooling: `few_channels` is the operator, `FewChannels` the operation."""

from escalade.ops.few_channels.op import few_channels
from escalade.ops.few_channels.operation import FEW_CHANNELS, FewChannels
from escalade.ops.few_channels.problem import FewChannelsProblem

__all__ = ["FEW_CHANNELS", "FewChannels", "FewChannelsProblem", "few_channels"]
