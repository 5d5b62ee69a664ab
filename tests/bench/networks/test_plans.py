"""Steps left to PyTorch in plans of small networks of every class: the table is exact, and counts may only fall.

A failing test prints the network's new line. Put it into the table if it has fewer steps than the old one.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.models import settle
from escalade.ops.base.accuracy import relative_error
from escalade_bench.networks.judging import MOST
from escalade_bench.networks.plans import by_operator, planned, spelled
from tests.bench.coverage.networks import NETWORKS

IN_PYTORCH = {
    "mobilenet_v2": "",
    "mobilenet_v3": "",
    "efficientnet": "",
    "convnext": "",
    "densenet": "",
    "shufflenet": "",
    "inception": "",
    "squeezenet": "",
    "unet": "",
    "unet_upsampled": "",
    "segmentation": "",
    "regnet": "",
    "group_norm": "",
    "vgg": "",
    "alexnet": "",
    "vit": "permute 4, select 3, attention 1",
    "upscaling": "",
}
"""Steps by operator, the most frequent first, in fp16 plans."""
IN_TF32: dict[str, str] = {}
"""Networks whose tf32 plans have other steps."""


@pytest.mark.share(7)
@pytest.mark.parametrize("name", NETWORKS)
def test_pytorch_does_no_more_of_a_network_than_is_written_down(name: str) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS[name](), torch.randn(4, 3, 32, 32)
    settle(model, x)
    model.eval()
    with torch.no_grad():
        expected = pytree.tree_leaves(model(x))
    graph = capture(model, (x,))
    tables = {"fp16": IN_PYTORCH, "tf32": {**IN_PYTORCH, **IN_TF32}}
    for dtype, table in tables.items():
        assert name in table, f"{name} has no line yet"
        with torch.device("meta"):  # a constant created anew has no values: only the model's constants do
            engine = Engine(graph, dtype, "cpu")
            plan = planned(engine, x)
        found = spelled(by_operator(plan))
        assert found == table[name], _sentence(name, dtype, table[name], found)
        results = zip(pytree.tree_leaves(engine(x)), expected, strict=True)
        errors = [relative_error(result, wanted) for result, wanted in results]
        assert all(error < MOST[dtype] for error in errors), f"in {dtype} its results are wrong: {errors}"


def _sentence(name: str, dtype: str, written: str, found: str) -> str:
    table = "IN_TF32" if dtype == "tf32" else "IN_PYTORCH"
    before, now = _total(written), _total(found)
    if now > before:
        return f"PyTorch does {now} steps of {name} in {dtype}, {before} are written down: {found}"
    return f'PyTorch does other steps of {name} in {dtype}, and no more. In {table}: "{name}": "{found}",'


def _total(line: str) -> int:
    return sum(int(entry.rpartition(" ")[2]) for entry in line.split(", ") if entry)
