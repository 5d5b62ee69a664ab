"""The pages: their contents come from records, every figure is shown, and missing ones are reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from escalade_bench import layers as study
from escalade_bench.measure.records import Record
from escalade_bench.networks.op_times import FORMS
from escalade_bench.report.document import markdown
from escalade_bench.report.pages import (
    coverage,
    goals,
    ladders,
    layers,
    networks,
    readme,
    records,
    training,
)

RECORD = Record(
    "conv2d", ladders.CLIMB[1], "fp32", "nchw", 256, "escalade", "direct", config={"threads": 256}, timing="graph",
    median_us=60000.0, p20_us=59000.0, p80_us=61000.0, tflops=1.0, gbps=7.0, floor_us=1200.0, error=1.5e-7,
    tolerance=3e-7, registers=40, occupancy=0.75, gpu="NVIDIA H200", driver="580.1", commit="abc",
    date="2026-01-02T03:04:05+00:00", command="escalade ladder conv2d", versions={"torch": "2.11"},
)  # fmt: skip
NETWORK = replace(
    RECORD, workload="resnet18", problem="224_b32", dtype="fp16", batch=32, rung="", median_us=200.0, wall_us=240.0,
    images_per_s=160e3, floor_us=40.0, peak_bytes=32 << 20, config={},
)  # fmt: skip
OLD: dict[str, Any] = {"commit": "old", "date": "2026-01-01T00:00:00+00:00"}


def row(page: str, begin: str) -> list[str]:
    """Return the cells of the first row that starts with this text."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {begin}"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def ladder() -> list[Record]:
    tiled = replace(RECORD, rung="input_tile", median_us=30000.0, tflops=2.0, predicted_gain=1.5)
    blocked = replace(tiled, rung="register_blocking", median_us=3000.0, **OLD, older="direct.cu changed")
    core = replace(RECORD, rung="tensor_core", dtype="fp16", layout="nhwc", median_us=300.0, tflops=200.0)
    peer = replace(RECORD, system="torch-nhwc", rung="", median_us=2000.0, tflops=20.0, config={}, **OLD)
    failed = replace(RECORD, rung="restrict", median_us=None, tflops=None, failure="its error is 3\nand more")
    ceiling = replace(RECORD, workload="ceilings", problem="matmul", rung="", tflops=50.0)
    return [RECORD, tiled, blocked, core, peer, failed, ceiling]


def test_the_climb_starts_at_the_foot_and_names_the_rung_below() -> None:
    page = markdown(ladders.overview({"h200": ladder()}))
    assert row(page, "direct |")[4:7] == ["60,000", "1,000", "2.0"], "% of the ceiling from its record"
    # Nothing between input_tile and register_blocking was measured, and a later commit hides nothing.
    assert row(page, "register_blocking |")[-4:] == ["10.00×", "1.50×", "input_tile", "old 01-01 older code"]
    assert row(page, "tensor_core |")[-4:-1] == ["", "", ""], "neither implicit_gemm nor what it stands on"
    assert row(page, "PyTorch's operator |")[-1] == "old 01-01"
    best = row(page, f"`{RECORD.problem}` | fp32")
    assert best[2] == "register_blocking" and best[-4:-1] == ["2,000", "PyTorch's operator", "0.67×"]
    assert "](images/climb.svg)" in page and "(ladders/conv2d.md)" in page
    (page,) = (markdown(items) for items in ladders.operation_pages({"h200": ladder()}).values())
    assert "failed: its error is 3 |" in page and "and more" not in page and "threads=256" in page
    assert "(1,000 GFLOP/s) is limited" in page, "what was learned has its figures from records"
    assert "[[" not in page and "Reuse in registers is the largest step: 10.00× (predicted 1.50×)." in page
    assert "Multicast" not in page, "without a record there is no line"
    assert ladders.operation_pages({}) == {} and "not been measured" in markdown(ladders.overview({}))


def test_networks_stand_beside_all_peers_by_both_clocks_whatever_their_commit() -> None:
    graph = replace(
        NETWORK, system="torch-graph", median_us=400.0, peak_bytes=128 << 20, wall_us=230.0, **OLD
    )
    jax = replace(NETWORK, system="jax", timing="calls", median_us=350.0, peak_bytes=None, wall_us=360.0)
    accuracy = replace(
        NETWORK, workload="resnet18_accuracy", note="the same top-1 on 54 of 54", median_us=None
    )
    older = replace(NETWORK, problem="224_b1", batch=1, median_us=90.0, wall_us=None, **OLD)
    alone = replace(NETWORK, workload="resnet18_stream", rung="compute alone", median_us=100.0)
    copies, streamed = (
        replace(alone, rung="copies alone", median_us=60.0),
        replace(alone, rung="stream", median_us=125.0),
    )
    page = markdown(networks.page({"h200": [NETWORK, graph, jax, accuracy, older, alone, copies, streamed]}))
    assert row(page, "resnet18 |")[1:7] == ["1", "0", "0", "1", "0", "1.75×"], "lost by the wall clock alone"
    device, call = page.split("in µs per call by the wall clock")
    assert row(device, "fp16 | 32")[2:6] == ["**200.0**", "400.0", "JAX", "1.75×"]
    note, measured = row(device, "fp16 | 32")[-2:]
    assert note.startswith("no torch.compile; at most: jax") and measured == "abc 01-02"
    assert row(device, "fp16 | 1 ")[2] == "**90.00**", "an older row stays"
    assert row(call, "fp16 | 32")[2:7] == ["**240.0**", "230.0", "360.0", "PyTorch, CUDA graph", "0.96×"]
    assert "| fp16 | 32 | 32.0 | 128.0 | 25% | abc 01-02 |" in page and "54 of 54" in page
    assert row(page, "fp16 | stream")[-3:-1] == ["80%", "48%"]


def test_each_layout_of_ours_has_a_row_beside_the_same_peers() -> None:
    other = replace(NETWORK, layout="nhwc", median_us=800.0)
    graph = replace(NETWORK, system="torch-graph", median_us=400.0)
    page = markdown(networks.page({"h200": [NETWORK, other, graph]}))
    assert row(page, "fp16 | nchw | 32")[3:7] == ["**200.0**", "400.0", "PyTorch, CUDA graph", "2.00×"]
    assert row(page, "fp16 | nhwc | 32")[3:7] == ["**800.0**", "400.0", "PyTorch, CUDA graph", "0.50×"]


def test_op_times_are_sums_of_the_faster_layouts_in_the_ladders_order() -> None:
    first, second = (name.format(batch=10_000) for name in FORMS[""])

    def conv(problem: str, who: str, us: float, layout: str = "nchw", dtype: str = "fp32") -> Record:
        system = (who, "") if who.startswith("torch") else ("escalade", who)
        return replace(
            RECORD, workload="few_channels", problem=problem, dtype=dtype, layout=layout, batch=10_000,
            system=system[0], rung=system[1], median_us=us,
        )  # fmt: skip

    own = [
        conv(first, "torch-nchw", 7000.0), conv(second, "torch-nchw", 5600.0), conv(first, "rows", 400.0),
        conv(first, "rows", 500.0, "nhwc"), conv(second, "rows", 1300.0), conv(second, "rows", 1250.0, "nhwc"),
        conv(first, "matrix_unroll", 9000.0), conv(second, "matrix_unroll", 30000.0),
        conv(first, "tensor_cores", 3000.0, dtype="tf32"), conv(second, "tensor_cores", 4000.0, dtype="tf32"),
        conv(first, "fusion", 3600.0, dtype="tf32"), conv(second, "fusion", 2000.0, dtype="tf32"),
        conv(first, "half", 1000.0, dtype="fp16"),
    ]  # fmt: skip
    (found,) = networks.op_times(own)
    assert (found.storage, found.batch) == ("fp32", 10_000), "fp16 lacks the second convolution"
    assert [variant.name for variant in found.variants] == [
        "PyTorch (cuDNN), NCHW", "matrix_unroll", "tensor_cores (TF32)", "fusion (TF32)", "rows",
    ]  # fmt: skip
    assert "| rows | 0.400 ms | 1.250 ms | 1.650 ms |" in found.table.markdown()
    copy = replace(RECORD, workload="ceilings", problem="copy_2048MiB", gbps=4000.0)
    page = markdown(goals.blocks([*own, copy])["lenet"])
    # 6,400 pixels of 49 values of 4 bytes and 4 sums of 4 bytes, for 10,000 images, both written and read.
    moved = 2 * 10_000 * 6_400 * (49 * 4 + 4 * 4) / 1e9
    assert f"| 1 | 4 | 3.000 ms | 3.600 ms | 0.83× | {moved:.1f} GB | {moved / 4:.3f} ms |" in page


def test_layers_are_shown_by_set_with_ratios_below_one() -> None:
    first, second, third = (layer.problem.name for layer in study.named("resnet18", 32, "fp16")[:3])

    def layer(problem: str, us: float | None, system: str = "escalade", **rest: object) -> Record:
        made = replace(
            NETWORK, workload="layers", problem=problem, system=system, median_us=us, floor_us=us and us / 4,
            rung="window" if system == "escalade" else "",
        )  # fmt: skip
        return replace(made, **rest)  # type: ignore[arg-type]

    alone = "8to16_9_k3s1_b2_bias+relu"
    own = [
        layer(first, 10.0), layer(first, 20.0, "cudnn-graph"), layer(second, 8.0, **OLD), layer(alone, 5.0),
        layer(second, 4.0, "torch-nhwc"), layer(third, None, failure="its error is 3\nand more"),
    ]  # fmt: skip
    page = markdown(layers.page({"h200": own}))
    assert "#### resnet18, forward, fp16, batch 32" in page and "#### others, forward, fp16" in page
    assert row(page, f"`{first}`")[3:] == [
        "10.00", "1", "25.0", "20.00", "cuDNN's graph API", "2.00×", "no torch.compile", "abc 01-02",
    ]  # fmt: skip
    assert row(page, f"`{second}`")[-3:] == ["0.50×", "no fused peer", "old 01-01"]
    assert "failed: its error is 3" in page and "and more" not in page
    assert (
        "2 layers: 1.000× the fastest peer's speed in the geometric mean; 1 slower than it, worst 0.500×"
        in page
    )
    assert "not been measured" in markdown(layers.page({}))


def test_coverage_counts_right_and_slower_networks() -> None:
    def covered(network: str, us: float | None, system: str = "escalade", **rest: object) -> Record:
        made = replace(
            NETWORK,
            workload="coverage_torchvision",
            problem=f"{network}_224_b32",
            median_us=us,
            system=system,
        )
        made = replace(made, config={"launches": 18, "pytorch": {}} if system == "escalade" else {})
        return replace(made, **rest)  # type: ignore[arg-type]

    own = [
        covered("resnet18", 250.0), covered("resnet18", 500.0, "torch-graph"), covered("vgg", 1000.0, **OLD),
        covered("resnet18", 400.0, "torch-compile-default"), covered("vgg", 400.0, "torch-graph"),
        covered("vit", None, failure="no\nway", error=None, config={}),
    ]  # fmt: skip
    own[2] = replace(own[2], config={"launches": 5, "pytorch": {"permute": 3, "gelu": 1}})
    page = markdown(coverage.page({"h200": own}))
    cells = row(page, "resnet18")
    assert cells[4:9] == ["**250.0**", "500.0", "400.0", "torch.compile, default mode", "1.60×"]
    assert "4 (permute 3, gelu 1)" in row(page, "vgg") and row(page, "vgg")[-1] == "old 01-01"
    assert "0.40×" in row(page, "vgg"), "one peer is enough for a ratio"
    assert "2 of 3 networks planned; 2 right; 1 without a step in PyTorch; on the device 1 of 2" in page
    assert "0.80× as fast in the geometric mean, 0.40× at worst (vgg)" in page
    assert "; 1 without a peer that matters." in page and "failed: no |" in page
    (line, *_) = coverage.lines(own[:4:3])
    assert line.startswith(
        "resnet18 fp16 b32: 1.5e-07 of 3.0e-07; in PyTorch 0, 18 launches; escalade 250.0 µs"
    )


def test_training_steps_that_lose_are_shown() -> None:
    ours = replace(NETWORK, workload="autoencoder_training_step", problem="32_b64", batch=64)
    eager = replace(ours, system="torch-eager", timing="calls", median_us=100.0, wall_us=120.0)
    page = markdown(training.steps([ours, eager, replace(ours, system="torch-graph", median_us=150.0)]))
    assert (
        "### autoencoder, 32² images, on an NVIDIA H200" in page
        and "| 0.75× |" not in page
        and "| 0.50× |" in page
    )
    assert "torch-eager is timed by the clock" in page and "not been measured yet" in markdown(
        training.steps([])
    )


def test_steps_are_of_the_newest_run() -> None:
    plan = replace(
        NETWORK, workload="resnet18_steps", problem="b1_plan", batch=1, config={"steps": 1, "launches": 1}
    )
    said = {"source": "conv1", "operation": "stem", "problem": "p", "kernels": ["stem.cu"], "why": "estimate"}
    step = replace(
        plan,
        problem="b1_step0",
        median_us=4.0,
        floor_us=0.5,
        config={"number": 1, "rung": "streamed", **said},
    )
    left = replace(step, problem="b1_step1", config={**step.config, "number": 2}, **OLD)
    page = markdown(training.step_page({"h200": [plan, step, left]}))
    assert (
        "| 1 | conv1 | stem | `p` | streamed | stem.cu | estimate | 4.00 | 0.50 | 8.00 | abc 01-02 |" in page
    )
    assert "1 step, 1 launch" in page and "| 2 | conv1 |" not in page and "| stem | streamed |" in page
    assert "not been measured" in markdown(training.step_page({}))


def test_goals_compare_rungs_that_differ_by_the_idea_alone() -> None:
    idea = goals.IDEAS[0]
    own = replace(RECORD, workload=idea.workload, problem=idea.problem, median_us=30.0, rung=idea.over)
    fast, worse = (
        replace(own, rung=idea.rungs[0], median_us=10.0),
        replace(own, layout="nhwc", median_us=90.0),
    )
    step = replace(
        NETWORK, workload="autoencoder_training_step", problem="32_b64", dtype="fp32", peak_bytes=60
    )
    theirs = replace(step, system="torch-graph", peak_bytes=120)
    tf32 = [replace(r, dtype="tf32", peak_bytes=(r.peak_bytes or 0) ** 2) for r in (step, theirs)]
    page = markdown(goals.blocks([*tf32, own, worse, fast, step, theirs])["ideas"])
    assert row(page, idea.what)[1:4] == ["1.5–2×", "3.00×", "more"]
    assert row(page, "memory that is used again")[2] == "2.00×", "of fp32, not of another dtype"
    assert row(page, goals.IDEAS[1].what)[2] == "not yet"
    for idea in goals.IDEAS:
        assert not set(idea.rungs) & {"wgmma_split", "window_split"}, "tensor cores are another idea"


def test_records_list_failed_runs_and_gaps() -> None:
    run = replace(NETWORK, workload=records.GPU_TEST, problem="tests", system="pytest", failure="2 are wrong")
    counted = {"calls": 4342, "device": [135.9, 139.9], "seconds": 165}
    soak = replace(NETWORK, workload=records.SOAK, problem="6 threads, noon", config=counted, median_us=None)
    more = {"calls": 658, "device": [130.0, 137.0], "seconds": 35}
    later = replace(soak, problem="6 threads, night", config=more, date="2027")
    other = replace(soak, problem="2 threads, noon")
    service = replace(
        NETWORK, workload=records.SERVICE, problem="2 threads", rung="8 sets", images_per_s=17649.0
    )
    page = markdown(
        records.page([replace(run, config={"passed": 7, "failed": 2}), later, other, soak, service, NETWORK])
    )
    assert "| tests | pytest | 7 | 2 | failed: 2 are wrong | abc 01-02 |" in page
    assert "4,342" in page and "135.9 to 139.9" in page and "17,649" in page
    assert row(page, "6 threads, 2 runs")[1:3] == ["200", "5,000"] and "130 to 139.9" in page
    assert "2 threads, noon" in page and "2 threads, 1 runs" not in page
    assert "- **resnet18**: no peer (1 of 1)." in page
    assert (
        "**Networks** without a record: resnet34, resnet50, autoencoder, lenet, spectral_autoencoder." in page
    )


def test_the_readme_names_the_best_peer_of_each_row() -> None:
    graph = replace(NETWORK, system="torch-graph", median_us=400.0, wall_us=230.0)
    mobile = replace(
        NETWORK, workload="coverage_torchvision", problem="mobilenet_v2_224_b32", median_us=300.0
    )
    losing = replace(mobile, system="torch-compile-default", median_us=150.0)
    in_fp32 = [replace(r, dtype="fp32") for r in (NETWORK, graph)]
    page = markdown(readme.block([NETWORK, graph, mobile, losing, *in_fp32]))
    assert "tested on an NVIDIA H200 with driver 580.1 and PyTorch 2.11" in page and "2026-01-02" in page
    assert row(page, "ResNet-18")[1:6] == ["fp16", "32", "**200.0**", "400.0", "PyTorch, CUDA graph"]
    assert row(page, "MobileNetV2")[4:7] == ["150.0", "torch.compile, default mode", "0.50×"]
    assert "](images/speedups.svg)" in page and "climb" not in page and readme.block([]) == []
    many = [
        replace(NETWORK, workload=problems[0][0], problem=problems[0][1], batch=n)
        for n, (_, problems) in enumerate(readme.WANTED)
    ]
    assert len(readme.rows(many)) == readme.MOST_ROWS < len(many)
