"""A plain ResNet in JAX: BatchNorm folded, NHWC, jitted, the weights its arguments."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from escalade.device.timing import on_gpu
from escalade.models.resnet import BasicBlock, ResNet
from escalade_bench.peers.network import NetworkPeer, Task, Unavailable

INSTALL = "pip install 'jax[cuda13]'"
_STORAGE = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def jitted(task: Task) -> list[NetworkPeer]:
    """Make a ResNet as one jitted function."""
    # JAX preallocates three quarters of the GPU's memory by default.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        raise Unavailable(f"jax cannot be imported ({error}); {INSTALL} installs it") from error
    wanted = "gpu" if task.device.type == "cuda" else "cpu"
    if jax.default_backend() != wanted:
        raise Unavailable(
            f"jax runs on {jax.default_backend()} here, and the comparison on {wanted}; {INSTALL} installs JAX for GPUs"
        )
    if not isinstance(task.model, ResNet):
        raise Unavailable(f"a {type(task.model).__name__} has no JAX version; ResNets have")
    dtype = jnp.dtype(_STORAGE[task.dtype])
    network = _Network(task.model, task.dtype)
    weights = jax.tree.map(lambda array: jnp.asarray(array, dtype), network.weights)
    x = jnp.asarray(task.x.permute(0, 2, 3, 1).cpu().numpy(), dtype)
    run = jax.jit(network.forward)
    with on_gpu():  # XLA chooses by timing
        last: list[Any] = [run(weights, x)]
        last[0].block_until_ready()

    def call() -> Any:
        last[0] = run(weights, x)
        return last[0]

    def wait() -> None:
        last[0].block_until_ready()
        if task.device.type == "cuda":
            torch.cuda.synchronize(task.device)

    return [NetworkPeer("jax", "nhwc", call, _tensor, wait)]


def _tensor(result: Any) -> tuple[torch.Tensor]:
    return (torch.from_numpy(np.asarray(result).astype(np.float64)),)


class _Network:
    """Folded weights as a tree of NumPy arrays, and the forward function over that tree."""

    def __init__(self, model: ResNet, dtype: str) -> None:
        from jax import lax

        self._precision = lax.Precision.HIGHEST if dtype == "fp32" else lax.Precision.DEFAULT
        exact = copy.deepcopy(model).double()  # float64, so that folding adds no rounding
        self._strides: dict[str, int] = {}
        self.weights: dict[str, Any] = {"fc": (_array(exact.fc.weight.T), _array(exact.fc.bias))}
        self._fold("conv1", exact.conv1, exact.bn1)
        self._blocks: dict[str, int] = {}
        """Number of convolutions per block."""
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            for number, block in enumerate(getattr(exact, stage)):
                name, size = f"{stage}.{number}", 2 if isinstance(block, BasicBlock) else 3
                self._blocks[name] = size
                for one in range(1, size + 1):
                    self._fold(f"{name}.conv{one}", getattr(block, f"conv{one}"), getattr(block, f"bn{one}"))
                if block.downsample is not None:
                    self._fold(f"{name}.downsample", *block.downsample)

    def _fold(self, name: str, convolution: nn.Module, norm: nn.Module) -> None:
        assert isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        folded = fuse_conv_bn_eval(convolution, norm)
        assert folded.bias is not None
        self._strides[name] = folded.stride[0]
        self.weights[name] = _array(folded.weight.permute(2, 3, 1, 0)), _array(folded.bias)

    def forward(self, weights: dict[str, Any], x: Any) -> Any:
        import jax
        import jax.numpy as jnp
        from jax import lax

        def convolve(name: str, x: Any) -> Any:
            weight, bias = weights[name]
            pad = (weight.shape[0] // 2,) * 2
            return bias + lax.conv_general_dilated(
                x, weight, (self._strides[name],) * 2, (pad, pad),
                dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=self._precision,
            )  # fmt: skip

        x = jax.nn.relu(convolve("conv1", x))
        window, stride, pad = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
        x = lax.reduce_window(x, -jnp.inf, lax.max, window, stride, pad)
        for name, size in self._blocks.items():
            shortcut = convolve(f"{name}.downsample", x) if f"{name}.downsample" in weights else x
            for number in range(1, size):
                x = jax.nn.relu(convolve(f"{name}.conv{number}", x))
            x = jax.nn.relu(convolve(f"{name}.conv{size}", x) + shortcut)
        weight, bias = weights["fc"]
        mean = x.mean((1, 2), dtype=jnp.float32).astype(x.dtype)
        return jnp.matmul(mean, weight, precision=self._precision) + bias


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy()
