"""Problems that a plan leaves to PyTorch, by measurements and by estimates."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from escalade.ops import OPERATIONS
from escalade.ops.base.card import H200
from escalade.ops.choose import pytorch
from escalade.ops.choose.choice import Choice, choose
from escalade.ops.choose.pytorch import PYTORCH, reason_for_pytorch, verdict, verdict_key
from escalade.ops.choose.table import Table, add
from escalade.ops.conv2d import Conv2dProblem

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONV2D = OPERATIONS["conv2d"]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """The tables of a fake GPU."""
    found: list[Table] = []
    monkeypatch.setattr(pytorch, "tables_for", lambda device: found)
    return found


def by(rung: str, name: str, dtype: str = "fp16") -> Choice:
    return choose(CONV2D, Conv2dProblem.parse(name, dtype, "nhwc"), CPU, rung)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "tf32"])
def test_what_only_the_foot_takes_is_cudnns(dtype: str, tables: list[Table]) -> None:
    choice = by("direct", "20to40_28_k3s1g4_b32", dtype)
    others = frozenset(f"conv2d/{rung.name}" for rung in CONV2D.ladder if not rung.last_resort)
    reason = reason_for_pytorch(CONV2D, choice, CUDA, others)
    assert reason is not None
    assert f"direct is the only rung of conv2d for 20to40_28_k3s1g4_b32 in {dtype}" in reason
    assert reason_for_pytorch(CONV2D, choice, CPU) is None, "the twin runs kernels"


def test_rungs_that_are_no_last_resort_do_what_they_take(tables: list[Table]) -> None:
    choice = by("fused_epilogue", "64to64_28_k3s1_b32")
    assert reason_for_pytorch(CONV2D, choice, CUDA) is None
    last = [rung.name for rung in CONV2D.ladder if rung.last_resort]
    assert last == ["direct"]


def test_the_foot_may_be_the_quickest_of_several(tables: list[Table]) -> None:
    """Then the other rungs, which are about as fast, show that PyTorch is not better."""
    choice = by("direct", "192to192_28_k3s2g192_b1")
    own = choice.rung.estimate(choice.problem, choice.config)
    assert own is not None and own > CONV2D.pytorch_us(choice.problem, choice.rung.card)
    assert reason_for_pytorch(CONV2D, choice, CUDA) is None


def test_the_foot_does_what_is_over_before_pytorch_has_launched_it(
    tables: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = by("direct", "1to1_4_k1s1_b1", "fp32")
    monkeypatch.setattr(type(CONV2D), "pytorch_us", lambda self, problem, card: 1e3)
    assert reason_for_pytorch(CONV2D, choice, CUDA) is None


def test_pytorchs_estimate_is_its_launches_and_its_work() -> None:
    small, large = (
        Conv2dProblem.parse(name, "fp16", "nhwc") for name in ("8to8_8_k3s1_b1", "512to512_56_k3s1_b64")
    )
    assert 2 * H200.rates.launch_us <= CONV2D.pytorch_us(small, H200) < 3 * H200.rates.launch_us
    peak = large.flops / H200.tensor_core_rate("fp16")
    assert peak < CONV2D.pytorch_us(large, H200) < 20 * peak
    assert H200.tensor_core_rate("fp16") == 2 * H200.tensor_core_rate("tf32")


def test_a_measurement_beside_the_rung_decides(tables: list[Table], tmp_path: pathlib.Path) -> None:
    choice = by("fused_epilogue", "64to64_28_k3s1_b32")
    key, path = verdict_key(CONV2D, choice.problem), tmp_path / "table.json"
    tables.append(add(path, key, verdict(choice, 12.0, 7.5)))
    reason = reason_for_pytorch(CONV2D, choice, CUDA)
    assert reason == "fastest when measured (your table, 7.5 µs); fused_epilogue took 12 µs"
    other = by("tuned", "64to64_28_k3s1_b32")
    assert reason_for_pytorch(CONV2D, other, CUDA) is None, "beside which nothing was measured"
    near = by("fused_epilogue", "64to64_28_k3s1_b40")
    assert "at batch 32" in str(reason_for_pytorch(CONV2D, near, CUDA))
    tables[0] = add(path, key, verdict(choice, 7.0, 7.5))
    assert reason_for_pytorch(CONV2D, choice, CUDA) is None
    assert json.loads(path.read_text())[key]["rung"] == "fused_epilogue"


def test_the_foot_stays_where_it_was_measured_to_be_faster(tables: list[Table]) -> None:
    choice = by("direct", "20to40_28_k3s1g4_b32")
    entry = verdict(choice, 3.0, 4.0)
    tables.append(Table("your table", {verdict_key(CONV2D, choice.problem): entry}))
    assert entry.rung != PYTORCH and reason_for_pytorch(CONV2D, choice, CUDA) is None
