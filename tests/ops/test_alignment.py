"""Kernels use 16-byte loads: for any tensors of an operator, its kernels get aligned memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from escalade import ops
from escalade.device.recipe import Recipe
from escalade.ops.calling import executables as call
from escalade.ops.mlp.problem import MlpProblem, parse_layers
from escalade.ops.optimizer_step import no_progress, sgd


def shifted(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A view into another tensor, from its second element on."""
    elements = torch.Size(sizes).numel()
    tensor = torch.ones(elements + 1, dtype=dtype)[1:].view(sizes)
    assert tensor.data_ptr() % 16
    return tensor


LAYERS = "8-4br_4-8b"
PARAMETERS = [torch.Size(size) for size in MlpProblem(2, parse_layers(LAYERS)).sizes.values()]

CALLS: dict[str, Callable[[torch.dtype], Any]] = {
    "attention": lambda t: ops.attention(
        shifted(2, 2, 9, 16, dtype=t), shifted(2, 2, 9, 16, dtype=t), shifted(2, 2, 9, 16, dtype=t),
        shifted(2, 9, 9, dtype=t),
    ),
    "avg_pool2d": lambda t: ops.avg_pool2d(shifted(2, 8, 6, 6, dtype=t), 2),
    "avg_pool2d_backward": lambda t: ops.avg_pool2d_backward(shifted(2, 8, 3, 3, dtype=t), 6, 2),
    "adaptive_avg_pool2d": lambda t: ops.adaptive_avg_pool2d(shifted(2, 8, 6, 6, dtype=t), 2),
    "add": lambda t: ops.add(shifted(2, 8, 6, 6, dtype=t), shifted(2, 8, 6, 6, dtype=t)),
    "batch_norm": lambda t: ops.batch_norm(
        shifted(2, 8, 6, 6, dtype=t), shifted(8), shifted(8), shifted(8), shifted(8),
        residual=shifted(2, 8, 6, 6, dtype=t),
    ),
    "batch_norm_backward": lambda t: ops.batch_norm_backward(
        shifted(2, 8, 6, 6, dtype=t), shifted(2, 8, 6, 6, dtype=t), shifted(8), shifted(8), shifted(8), shifted(8),
        output=shifted(2, 8, 6, 6, dtype=t),
    ),
    "batch_norm_training": lambda t: ops.batch_norm_training(
        shifted(2, 8, 6, 6, dtype=t), shifted(8), shifted(8), shifted(8), shifted(8),
        residual=shifted(2, 8, 6, 6, dtype=t),
    ),
    "batch_statistics": lambda t: ops.batch_statistics(shifted(2, 8, 6, 6, dtype=t)),
    "conv2d": lambda t: ops.conv2d(
        shifted(2, 8, 6, 6, dtype=t), shifted(16, 8, 3, 3, dtype=t), shifted(16, dtype=t),
        shifted(2, 16, 4, 4, dtype=t),
    ),
    "conv2d_input_gradient": lambda t: ops.conv2d_input_gradient(
        shifted(2, 16, 4, 4, dtype=t), shifted(16, 8, 3, 3, dtype=t), (6, 6), shifted(2, 8, 6, 6, dtype=t)
    ),
    "conv2d_weight_gradient": lambda t: ops.conv2d_weight_gradient(
        shifted(2, 8, 6, 6, dtype=t), shifted(2, 16, 4, 4, dtype=t), 3, bias=True
    ),
    "cross_entropy": lambda t: ops.cross_entropy(
        shifted(2, 8, dtype=t), shifted(2, dtype=torch.int64)
    ),
    "cross_entropy_with_gradient": lambda t: ops.cross_entropy_with_gradient(
        shifted(2, 8, dtype=t), shifted(2, dtype=torch.int64), torch.ones(1)
    ),
    "ctc_loss": lambda t: ops.ctc_loss(
        shifted(5, 2, 8), shifted(2, 2, dtype=torch.int64), shifted(2, dtype=torch.int64),
        shifted(2, dtype=torch.int64),
    ),
    "few_channels": lambda t: ops.few_channels(
        shifted(2, 1, 8, 8, dtype=t), shifted(8, 1, 3, 3, dtype=t), shifted(8, dtype=t)
    ),
    "linear": lambda t: ops.linear(shifted(2, 8, dtype=t), shifted(4, 8, dtype=t), shifted(4, dtype=t)),
    "max_pool2d": lambda t: ops.max_pool2d(shifted(2, 8, 6, 6, dtype=t), 2),
    "max_pool2d_with_places": lambda t: ops.max_pool2d_with_places(shifted(2, 8, 6, 6, dtype=t), 2),
    "max_pool2d_backward": lambda t: ops.max_pool2d_backward(
        shifted(2, 8, 3, 3, dtype=t), 2, x=shifted(2, 8, 6, 6, dtype=t)
    ),
    "mlp": lambda t: ops.mlp(shifted(2, 8, dtype=t), [shifted(*s, dtype=t) for s in PARAMETERS], LAYERS),
    "mlp_backward": lambda t: ops.mlp_backward(
        shifted(2, 8, dtype=t), shifted(2, 8, dtype=t), [shifted(*s, dtype=t) for s in PARAMETERS], LAYERS,
        input_gradient=True,
    ),
    "mse_loss": lambda t: ops.mse_loss(shifted(2, 8, dtype=t), shifted(2, 8, dtype=t)),
    "optimizer_step": lambda t: ops.optimizer_step(
        sgd(), [shifted(8)], [shifted(8, dtype=t)], {}, shifted(1), no_progress()
    ),
    "pointwise": lambda t: ops.pointwise("x * a", x=shifted(2, 8, dtype=t), a=shifted(8, dtype=t)),
    "pointwise_loss": lambda t: ops.pointwise_loss(
        shifted(2, 8, dtype=t), shifted(2, 8, dtype=t), "abs(x - target), sign(x - target)"
    ),
    "pointwise_loss_with_gradient": lambda t: ops.pointwise_loss_with_gradient(
        shifted(2, 8, dtype=t), shifted(2, 8, dtype=t), torch.ones(1), "abs(x - target), sign(x - target)"
    ),
    "quantise": lambda t: ops.quantise(shifted(2, 8, dtype=t), torch.ones(1)),
    "relu": lambda t: ops.relu(shifted(2, 8, dtype=t)),
    "relu_": lambda t: ops.relu_(shifted(2, 8, dtype=t)),
    "group_norm": lambda t: ops.group_norm(shifted(2, 8, 6, 6, dtype=t), 2, shifted(8, dtype=t)),
    "reduce": lambda t: ops.reduce(shifted(2, 8, dtype=t), "sum"),
    "squeeze_excite": lambda t: ops.squeeze_excite(
        shifted(2, 8, 6, 6, dtype=t), shifted(4, 8, dtype=t), shifted(4, dtype=t), shifted(8, 4, dtype=t), None
    ),
    "layer_norm": lambda t: ops.layer_norm(shifted(2, 8, dtype=t), shifted(8, dtype=t)),
    "upsample2d": lambda t: ops.upsample2d(shifted(2, 8, 6, 6, dtype=t), 9),
    "upsample2d_backward": lambda t: ops.upsample2d_backward(shifted(2, 8, 9, 9, dtype=t), 6),
    "pad2d": lambda t: ops.pad2d(shifted(2, 8, 6, 6, dtype=t), (0, 1, 2, 0)),
    "pixel_shuffle": lambda t: ops.pixel_shuffle(shifted(2, 8, 6, 6, dtype=t), 2),
    "softmax": lambda t: ops.softmax(shifted(2, 8, dtype=t)),
    "top_k": lambda t: ops.top_k(shifted(2, 8, dtype=t), 2),
}  # fmt: skip

ANYWHERE = {"optimizer_step": {"p-0", "g-0", "y", "scalars"}}
"""Tensors whose address a kernel checks itself, or that it reads element by element."""


class Recording:
    """Replaces the executor of kernels: it checks its arguments, and runs nothing."""

    given: dict[str, int]
    supports_pointer_updates = False

    def __init__(self, recipe: Recipe, device: torch.device, *_: Any) -> None:
        self.recipe, self.device = recipe, device

    def bind(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        Recording.given |= {name: t.data_ptr() for name, t in tensors.items() if t is not None}

    def release(self) -> None: ...
    def __call__(self) -> None: ...


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_are_given_aligned_memory(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "Executable", Recording)
    monkeypatch.setattr(call.per_thread, "prepared", {})
    monkeypatch.setattr(call.per_thread, "calls", {})
    monkeypatch.setattr(call.per_thread, "guarded", {})
    monkeypatch.setattr(Recording, "given", {}, raising=False)
    CALLS[name](dtype)
    assert Recording.given
    unaligned = {tensor for tensor, address in Recording.given.items() if address % 16}
    assert unaligned == ANYWHERE.get(name, set())


def test_every_operator_is_here() -> None:
    functions = {name for name in ops.__all__ if name[0].islower() and name != "operation"}
    assert functions == set(CALLS)
