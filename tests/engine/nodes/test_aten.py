"""PyTorch's own operators in 16 bits: as in PyTorch, or in fp32 where it has no 16-bit version."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from escalade.engine import compile
from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Reference
from escalade.engine.nodes import aten
from escalade.engine.nodes.aten import results_of

ARGUMENTS = {"self": Reference("x"), "dim": 1}


class Wide:
    """PyTorch's softmax on a device that supports it in fp32 only, and over one dimension only."""

    _schema = torch.ops.aten._softmax.default._schema
    namespace, tags = "aten", torch.ops.aten._softmax.default.tags

    def __init__(self) -> None:
        self.asked: list[torch.dtype] = []

    def __call__(self, x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
        self.asked.append(x.dtype)
        if x.dtype != torch.float32:
            raise NotImplementedError(f"not implemented for {x.dtype}")
        if dim != 1:
            raise RuntimeError("the dimension is 1")
        return x.softmax(dim)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Wide:
    operator = Wide()
    monkeypatch.setattr(aten, "resolve_operator", lambda target: operator)
    return operator


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_operators_without_16_bit_kernels_run_in_fp32(wide: Wide, dtype: torch.dtype) -> None:
    x = torch.randn(2, 5).to(dtype)
    (result,) = results_of("aten::_softmax", ARGUMENTS, {"x": x})
    assert wide.asked == [dtype, torch.float32]
    assert result.dtype == dtype
    assert torch.equal(result, x.float().softmax(1).to(dtype))


@pytest.mark.parametrize(
    ("x", "dim", "sentence"),
    (
        (torch.zeros(2, 5).half(), 0, "aten::_softmax on these tensors: not implemented for torch.float16"),
        (torch.zeros(2, 5), 0, "the dimension is 1"),
        (torch.zeros(2, 5).double(), 1, "not implemented for torch.float64"),
    ),
)
def test_unsupported_dtypes_report_the_first_error(
    wide: Wide, x: torch.Tensor, dim: int, sentence: str
) -> None:
    arguments: dict[str, Any] = {**ARGUMENTS, "dim": dim}
    with pytest.raises(OperatorError, match=sentence):
        results_of("aten::_softmax", arguments, {"x": x})


def test_volumes_without_a_batch_are_no_images() -> None:
    torch.manual_seed(4)
    model, x = torch.nn.Conv3d(2, 3, 2), torch.randn(2, 3, 4, 4)
    found, expected = compile(model, x, dtype="fp16")(x), model(x).detach()
    assert found.shape == expected.shape and (found - expected).norm() <= 5e-3 * expected.norm()
