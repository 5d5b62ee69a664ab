"""A plain ResNet in JAX: BatchNorm folded, NHWC, jitted, the weights its arguments."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from escalade.bench.peers.catalogue import JAX
from escalade.bench.peers.network import NetworkPeer, Task, Unavailable
from escalade.models.resnet import BasicBlock, Bottleneck, ResNet

_STORAGE = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def jitted(task: Task) -> list[NetworkPeer]:
    # JAX would otherwise take three quarters of the card for itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        raise Unavailable(f"jax is not here ({error}); {JAX.install} brings it") from error
    wanted = "gpu" if task.device.type == "cuda" else "cpu"
    if jax.default_backend() != wanted:
        raise Unavailable(
            f"jax runs on {jax.default_backend()} here, and the comparison is made on {wanted}; "
            f"{JAX.install} brings JAX for GPUs"
        )
    if not isinstance(task.model, ResNet):
        raise Unavailable(f"a {type(task.model).__name__} in JAX is not written; there are ResNets")
    dtype = jnp.dtype(_STORAGE[task.dtype])
    network = _Network(task.model, task.dtype)
    weights = jax.tree.map(lambda array: jnp.asarray(array, dtype), network.weights)
    x = jnp.asarray(task.x.permute(0, 2, 3, 1).cpu().numpy(), dtype)
    run = jax.jit(network.forward)
    last: list[Any] = [run(weights, x)]

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
    """The weights as a tree of NumPy arrays, and the function over such a tree."""

    def __init__(self, model: ResNet, dtype: str) -> None:
        from jax import lax

        self._precision = lax.Precision.HIGHEST if dtype == "fp32" else lax.Precision.DEFAULT
        exact = copy.deepcopy(model).double()  # so that folding adds no rounding of its own
        self._strides: dict[str, int] = {}
        self.weights: dict[str, Any] = {"conv1": self._folded("conv1", exact.conv1, exact.bn1)}
        self._blocks: list[str] = []
        self._basic = True
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            for number, block in enumerate(getattr(exact, stage)):
                self._add_block(f"{stage}.{number}", block)
        fc = exact.fc
        self.weights["fc"] = (_array(fc.weight.T), _array(fc.bias))

    def _add_block(self, name: str, block: BasicBlock | Bottleneck) -> None:
        self._basic = isinstance(block, BasicBlock)
        for number in (1, 2) if self._basic else (1, 2, 3):
            part = f"{name}.conv{number}"
            layers = getattr(block, f"conv{number}"), getattr(block, f"bn{number}")
            self.weights[part] = self._folded(part, *layers)
        if block.downsample is not None:
            self.weights[f"{name}.downsample"] = self._folded(f"{name}.downsample", *block.downsample)
        self._blocks.append(name)

    def _folded(self, name: str, convolution: nn.Module, norm: nn.Module) -> tuple[Any, Any]:
        assert isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        folded = fuse_conv_bn_eval(convolution, norm)
        self._strides[name] = folded.stride[0]
        assert folded.bias is not None
        return _array(folded.weight.permute(2, 3, 1, 0)), _array(folded.bias)

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
        x = lax.reduce_window(
            x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
        )
        for name in self._blocks:
            around = convolve(f"{name}.downsample", x) if f"{name}.downsample" in weights else x
            parts = (1, 2) if self._basic else (1, 2, 3)
            for number in parts[:-1]:
                x = jax.nn.relu(convolve(f"{name}.conv{number}", x))
            x = jax.nn.relu(convolve(f"{name}.conv{parts[-1]}", x) + around)
        weight, bias = weights["fc"]
        pooled = x.mean((1, 2), dtype=jnp.float32).astype(x.dtype)
        return jnp.matmul(pooled, weight, precision=self._precision) + bias


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy()
