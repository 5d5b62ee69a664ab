"""Direct rules of fake tensors against PyTorch's decompositions."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from escalade.engine.capture import step_fake_tensor
from escalade.engine.capture.step_fake_tensor import step_fake_tensor_mode

_CASES = (
    ((4, 3, 5, 7), torch.float16, torch.channels_last, True),
    ((4, 1, 5, 7), torch.float32, torch.channels_last, False),
    ((4, 3, 5, 7), torch.float32, torch.contiguous_format, True),
    ((4, 3), torch.bfloat16, torch.contiguous_format, True),
)  # fmt: skip


def _forms(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_forms, value)) if isinstance(value, tuple) else value


def _run(mode: FakeTensorMode, function: Any, x: torch.Tensor, *, affine: bool) -> Any:
    FakeTensorMode.cache_clear()
    with mode:
        fake = mode.from_tensor(x)
        c = [torch.empty(x.shape[1]) for _ in range(6)]
        weight, bias = (c[0], c[1]) if affine else (None, None)
        if function is torch.ops.aten.native_batch_norm_backward.default:
            gradient = torch.empty_like(fake, memory_format=torch.contiguous_format)
            mask = [True, affine, affine]
            return function(gradient, fake, weight, *c[2:], True, 1e-5, mask)
        return function(fake, weight, bias, *c[2:4], True, 0.1, 1e-5)


def test_batch_norms_have_the_forms_of_pytorchs_rules() -> None:
    for function, (size, dtype, layout, affine) in itertools.product(step_fake_tensor._RULES, _CASES):
        x = torch.empty(size, dtype=dtype).contiguous(memory_format=layout)
        found, expected = (
            _run(mode, function, x, affine=affine) for mode in (step_fake_tensor_mode(), FakeTensorMode())
        )
        assert _forms(found) == _forms(expected), (function, size, dtype, layout)
