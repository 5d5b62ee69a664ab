"""docs/plans.md: what was predicted beside what was measured."""

from __future__ import annotations

from dataclasses import replace

from escalade.measure.records import Record
from escalade.report.plans import autoencoder, lenet, rounds
from escalade.report.plans.page import SECTIONS, plans_page

RECORD = Record(
    "few_channels", "1to4_86_k7_b10000", "fp16", "nhwc", 10_000, "escalade", "", timing="graph",
    gpu="NVIDIA H200", commit="abc", date="2026-01-03T03:04:05+00:00", command="escalade bench lenet",
)  # fmt: skip


def test_three_cumulative_steps_and_what_fusion_could_save() -> None:
    times = {"matrix_unroll": 20e3, "tensor_cores": 10e3, "fusion": 12.5e3, "half": 8e3}
    own = [
        replace(RECORD, rung=rung, median_us=us / share, problem=problem)
        for rung, us in times.items()
        for problem, share in (("1to4_86_k7_b10000", 1), ("4to16_40_k7_b10000", 2))
    ]
    copy = replace(RECORD, workload="ceilings", problem="copy_2048MiB", dtype="fp32", gbps=4000.0)
    text = lenet.SECTION.text([*own, copy])
    assert "| + fusion + tensor cores | `fusion` | 12.500 ms | 6.250 ms | 18.750 ms | 1.60× |" in text
    assert "| `half` | 8.000 ms | 4.000 ms | 12.000 ms | 2.50× |" in text
    # 6,400 pixels of 49 values of 2 bytes and 4 sums of 4 bytes, for 10,000 images, both written and read.
    gigabytes = 2 * 10_000 * 6_400 * (49 * 2 + 4 * 4) / 1e9
    assert f"| 1 | 4 | 10.000 ms | 12.500 ms | 0.80× | {gigabytes:.1f} GB | {gigabytes / 4:.3f} ms |" in text


def test_ideas_beside_what_was_predicted_of_them() -> None:
    idea = autoencoder.IDEAS[0]
    own = replace(RECORD, workload=idea.workload, problem=idea.problem, dtype="fp32", median_us=30.0)
    slow, fast = (
        replace(own, rung=idea.over, layout="nchw"),
        replace(own, rung=idea.rungs[0], median_us=10.0),
    )
    worse = replace(slow, layout="nhwc", median_us=90.0)
    step = replace(RECORD, workload="autoencoder_training_step", problem="32_b64", peak_bytes=60)
    text = autoencoder.SECTION.text(
        [slow, worse, fast, step, replace(step, system="torch-graph", peak_bytes=120)]
    )
    assert f"| {idea.what} | 1.5–2× | 3.00× | more |" in text
    assert "| memory that is used again | 1.1–1.2× | 50% of PyTorch's memory |" in text
    assert f"| {autoencoder.IDEAS[1].what} | 2–3× | not yet |" in text


def test_rounds_of_one_kernel_by_batch() -> None:
    name = next(name for name, batch in rounds.PROBLEMS.items() if batch == 512)
    fused = replace(
        RECORD, workload="mlp", problem=name, dtype="fp32", layout="flat", rung="fused", median_us=20.0,
        predicted_gain=4.0, gain=5.0,
    )  # fmt: skip
    peer = replace(fused, system="torch-flat", rung="", median_us=60.0, predicted_gain=None, gain=None)
    text = rounds.SECTION.text([fused, peer])
    assert "| round | batch 512 | predicted | gain |" in text
    assert "| PyTorch's operators | 60.00 |  |  |\n| `fused` | 20.00 | 4.00× | 5.00× |" in text
    assert "| **PyTorch over the fastest** | **3.00×** |" in text


def test_without_records_the_page_says_so() -> None:
    text = plans_page([])
    assert text.count("It has not been measured yet.") == len(SECTIONS)
