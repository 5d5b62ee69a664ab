"""The twin: CUDA sources compiled by g++ and run on the CPU, thread by thread."""

from escalade.device.twin.counting import Counts, Requests
from escalade.device.twin.launch import Order, TwinKernel, Unwritten, build
from escalade.errors import TwinError

__all__ = ["Counts", "Order", "Requests", "TwinError", "TwinKernel", "Unwritten", "build"]
