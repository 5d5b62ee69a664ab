"""A campaign on a GPU: units of several kinds are measured, stored with their sources, and then current."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from escalade_bench.campaign.networks import setting_of
from escalade_bench.campaign.units import Session
from escalade_bench.measure import ceilings
from escalade_bench.measure import records as store
from escalade_bench.measure.currency import Made
from escalade_bench.networks import plans
from tests.commands.support import run

CPU = torch.device("cpu")
pytestmark = pytest.mark.gpu
UNITS = (
    "ladder/softmax/1000_b32/fp16",
    "layers/weight_gradient/conv2d_weight_gradient/512to512_7_k3s1_b256/fp16",
    "network/spectral_autoencoder/batches/b64/fp16",
)


def test_units_are_measured_and_then_current(
    cuda: torch.device, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "measure", partial(ceilings.measure, seconds_each=0.002))
    asked = ("measure", *UNITS, "--results", str(tmp_path))
    assert run(*asked, "--check").exit_code == 1
    ran = run(*asked, "--budget", "5m")
    assert ran.exit_code == 0, ran.output
    ((_, found),) = store.load_folder(tmp_path).items()
    log = {record.problem: record for record in found if record.workload == "campaign"}
    assert set(log) == set(UNITS) and not any(record.failure for record in log.values())
    ours = [
        record for record in found if not record.is_peer and record.workload not in ("campaign", "ceilings")
    ]
    assert all(record.median_us and record.code and record.plan for record in ours)
    assert any(name.startswith("mlp/") for record in ours for name in record.code)
    assert {record.workload for record in found if record.is_peer and record.median_us} >= {
        "softmax", "layers_weight_gradient", "spectral_autoencoder",
    }  # fmt: skip
    assert run(*asked, "--check").exit_code == 0

    rows = [record for record in found if record.workload == "spectral_autoencoder"]
    (own,) = [record for record in rows if not record.is_peer]
    store.file_away(tmp_path, [replace(own, plan="another", checked="", date="long ago")])
    ran = run(*asked)
    assert ran.exit_code == 0 and "verifying escalade" in ran.output and "verifying torch" not in ran.output
    ((_, again),) = store.load_folder(tmp_path).items()
    later = [record for record in again if record.workload == "spectral_autoencoder"]
    (newest,) = [record for record in later if not record.is_peer]
    peers = [record for record in later if record.is_peer]
    assert newest.plan == own.plan and newest.date != "long ago"
    assert {record.date for record in peers} == {record.date for record in rows if record.is_peer}


@pytest.mark.parametrize("name", ["resnet18", "lenet", "spectral_autoencoder"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_plan_without_a_gpu_is_the_gpus_own(cuda: torch.device, name: str, dtype: str) -> None:
    """Otherwise `measure --check` on another machine would compare with a plan that never ran."""
    setting, elsewhere = setting_of(Session(cuda), name), setting_of(Session(CPU), name)
    x = plans.empty(32, tuple(setting.workload.inputs(1).shape[1:]), dtype, setting.workload.layout, cuda)
    here = Made.of_plan(setting.engine(dtype).plan(x))
    assert Made.together([here]) == plans.of_batches(elsewhere, (32,), dtype)
