"""The twin: the same CUDA source, compiled by g++ and run on the CPU, thread by thread."""

from escalade.device.twin.launch import AccessStatistics, Order, TwinKernel, Unwritten, build
from escalade.errors import TwinError

__all__ = ["AccessStatistics", "Order", "TwinError", "TwinKernel", "Unwritten", "build"]
