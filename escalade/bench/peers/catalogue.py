"""Who we are measured against: every peer with what it does at its best, where it takes part, and what it needs.

How each is made is in the modules beside this one (`registry` has them by name). One that is asked for where it cannot
run leaves a record with the reason.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A package that need not be installed, and how it is brought."""

    name: str
    install: str

    @property
    def missing(self) -> bool:
        return importlib.util.find_spec(self.name) is None


@dataclass(frozen=True)
class Peer:
    """Another system that does what we do."""

    title: str
    systems: tuple[str, ...]
    """What its records call it; several where layouts are told apart."""
    what: str
    """What it does, at its best."""
    takes_part: str
    needs: tuple[Package, ...] = ()
    slow: bool = False
    """Whether it takes up to two minutes and more to make, so that it takes part only when it is named."""

    @property
    def refusal(self) -> str:
        """Why it cannot run here; empty if nothing is missing but perhaps a GPU."""
        lacking = next((package for package in self.needs if package.missing), None)
        if lacking is not None:
            return f"needs the package {lacking.name}, which is not installed: {lacking.install}"
        return ""


JAX = Package("jax", "pip install 'jax[cuda13]'")
CUDNN_FRONTEND = Package("cudnn", "pip install nvidia-cudnn-frontend")
TRITON = Package("triton", "it comes with PyTorch for GPUs")
ONNX = (Package("onnx", "pip install onnx"), Package("onnxscript", "pip install onnxscript"))
"""What PyTorch's exporter needs."""
PEERS = (
    Peer(
        "PyTorch's operator",
        ("torch-nchw", "torch-nhwc", "torch-flat", "torch"),
        "cuDNN chosen by measurement, in NCHW and in channels_last, in a CUDA graph",
        "ladders, layers, calls",
    ),
    Peer(
        "cuDNN's fused call",
        ("cudnn-fused-nchw", "cudnn-fused-nhwc"),
        "convolution, bias, residual and ReLU in one call of PyTorch's",
        "ladders, layers",
    ),
    Peer(
        "cuDNN's graph API",
        ("cudnn-graph",),
        "a convolution with its epilogue, or a gradient, by the fastest plan of all that are offered",
        "layers in three directions",
        (CUDNN_FRONTEND,),
    ),
    Peer("PyTorch eager", ("torch-eager",), "the model as it is, channels_last", "networks, training"),
    Peer(
        "PyTorch, CUDA graph",
        ("torch-graph",),
        "BatchNorm folded, one CUDA graph, the faster of NCHW and channels_last",
        "networks, coverage, training",
    ),
    Peer(
        "torch.compile, default mode",
        ("torch-compile-default",),
        "weights frozen, captured into one CUDA graph",
        "networks, coverage, training",
        (TRITON,),
        slow=True,
    ),
    Peer(
        "torch.compile max-autotune",
        ("torch-compile",),
        "the same with Triton's and cuDNN's kernels searched for the fastest",
        "ladders, layers, networks, training",
        (TRITON,),
        slow=True,
    ),
    Peer("JAX", ("jax",), "BatchNorm folded, NHWC, jitted by XLA", "ResNets, by the clock", (JAX,)),
    Peer(
        "Triton",
        ("triton",),
        "a kernel in its language, an implicit GEMM with bias, residual and ReLU, its tile found by its autotuner",
        "layers, forward",
        (TRITON,),
        slow=True,
    ),
    Peer(
        "ONNX Runtime",
        ("onnxruntime",),
        "BatchNorm folded, its CUDA provider with cuDNN searched, one CUDA graph, the faster of both layouts",
        "networks",
        (Package("onnxruntime", "pip install onnxruntime-gpu"), *ONNX),
        slow=True,
    ),
    Peer(
        "TensorRT",
        ("tensorrt",),
        "BatchNorm folded, an engine by its most thorough search, one CUDA graph",
        "networks",
        (Package("tensorrt", "pip install tensorrt"), *ONNX),
        slow=True,
    ),
)
TITLES = {system: peer.title for peer in PEERS for system in peer.systems}
"""How tables call each system."""
SLOW = tuple(system for peer in PEERS if peer.slow for system in peer.systems)
"""The systems that take part only when they are named."""


def peer_of(system: str) -> Peer:
    """The peer whose records have this name."""
    return next(peer for peer in PEERS if system in peer.systems)
