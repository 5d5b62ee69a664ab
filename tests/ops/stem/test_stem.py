"""The stem: problems, refusals, tiles of every form, and non-finite values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS
from escalade.ops.base.card import TWIN
from escalade.ops.base.dtypes import STORAGE
from escalade.ops.base.rung import Config
from escalade.ops.stem import StemOperation, StemProblem
from escalade.ops.stem.rungs import StreamedConfig, WarpConfig, WarpgroupConfig
from tests import formulas
from tests.support import TINY, check

CPU = torch.device("cpu")
STEM = StemOperation()
RESNET = StemProblem(1, 3, 224, 224, 64, 7, 7, (2, 2), (3, 3), pool=(3, 2, 1))


def wide(width: int, pool: Any, **rest: Any) -> StemProblem:
    """A few rows, wider than a tile or exactly as wide."""
    return StemProblem(1, 3, 15, width, 64, 7, 7, (2, 2), (3, 3), pool=pool, **rest)


def run(
    rung: str, problem: StemProblem, inputs: dict[str, torch.Tensor], config: Config | None = None
) -> Any:
    chosen = STEM.ladder.rung(rung)
    output = STEM.output(problem, CPU)
    recipe = chosen.recipe(problem, config or chosen.configs(problem)[0])
    workspaces = {workspace.name: workspace.allocate(CPU) for workspace in recipe.workspaces}
    bind(recipe, {**inputs, **workspaces, "y": output}, rung)()
    return output


def by_definition(
    problem: StemProblem, inputs: dict[str, torch.Tensor], padding_is_multiplied: bool = False
) -> torch.Tensor:
    """Reference for an image that is not normalized, with pixels rounded as in the kernels."""
    p = problem
    y = formulas.convolution(
        inputs["x"].view(p.batch, p.channels, p.height, p.width).to(STORAGE[p.dtype]),
        inputs["weight"].view(p.filters, p.channels, p.filter_height, p.filter_width),
        inputs["bias"], p.stride, p.padding, padding_is_multiplied=padding_is_multiplied,
    )  # fmt: skip
    y = formulas.relu(y) if p.relu else y
    return (formulas.max_pool(y, *p.pool) if p.pool else y).to(STORAGE[p.dtype])


# --- problems


def test_it_is_registered() -> None:
    assert isinstance(OPERATIONS["stem"], StemOperation)


def test_sizes_of_the_resnet_stem() -> None:
    assert (RESNET.conv_height, RESNET.output_width) == (112, 56)
    assert RESNET.flops == 2 * 112 * 112 * 64 * 147
    assert RESNET.bytes == 3 * 224 * 224 * 4 + 2 * (64 * 147 + 64 + 56 * 56 * 64)
    assert RESNET.name == "3to64_224_k7s2_fp32_nchw_b1_relu_pool3s2p1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 5}, "conv2d"),
        ({"channels": 0}, "at least 1"),
        ({"layout": "nchw"}, "nhwc"),
        ({"source": "int8"}, "uint8, fp32"),
        ({"dtype": "fp8"}, "bf16"),
        ({"pool": (3, 2, 2)}, "half the kernel"),
        ({"height": 1, "pool": (2, 2, 0)}, "does not fit"),
        ({"height": 1, "padding": (0, 0)}, "only 1x224"),
        ({"height": 40_000, "width": 40_000}, "32-bit"),
    ],
)
def test_what_is_no_stem_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        replace(RESNET, **change)


def test_a_wrong_name_is_refused_with_the_form() -> None:
    with pytest.raises(UnsupportedError, match="the form is"):
        StemProblem.parse("3to64_224")


# --- limits of the rungs


@pytest.mark.parametrize(
    ("rung", "change", "message"),
    [
        ("tensor_core", {"dtype": "fp32"}, "fp16 and bf16"),
        ("tensor_core", {"filters": 24}, "multiples of 16"),
        ("tensor_core", {"filter_width": 9}, "up to 8 wide"),
        ("pooled", {"pool": None}, "needs a pool"),
        ("pooled", {"pool": (3, 3, 1)}, "`tensor_core` pools any"),
        ("warpgroup", {"stride": (2, 1)}, "stride 2"),
        ("warpgroup", {"filters": 32}, "64 or 128"),
        ("streamed", {"dtype": "tf32"}, "fp16 and bf16"),
        ("streamed", {"channels": 4}, "3 channels"),
        ("streamed", {"filters": 32}, "64 or 128"),
        ("streamed", {"stride": (1, 2)}, "takes stride 2, not (1, 2)"),
        ("streamed", {"filter_width": 6}, "3, 5 or 7 wide"),
        ("streamed", {"filter_height": 8}, "up to 7 high"),
        ("streamed", {"pool": (3, 3, 1)}, "`tensor_core` pools any"),
        ("streamed", {"batch": 2**20}, "2^31"),
    ],
)
def test_refusals_say_what_is_taken(rung: str, change: dict[str, Any], message: str) -> None:
    assert message in str(STEM.ladder.rung(rung).supports(replace(RESNET, **change)))


def test_every_problem_has_a_preferred_rung() -> None:
    for problem in (*STEM.problems, *STEM.small_problems):
        for dtype in STEM.dtypes:
            form = replace(problem, dtype=dtype)
            assert any(STEM.ladder.rung(name).supports(form) is None for name in STEM.preferred(form))


@pytest.mark.parametrize("rung", ("pooled", "warpgroup"))
def test_tiles_suit_the_batch(rung: str) -> None:
    """One image is spread over the card; many have tall tiles, of which few rows are computed twice."""
    one, many = (
        STEM.ladder.rung(rung).configs(problem)[0] for problem in (RESNET, replace(RESNET, batch=256))
    )
    assert isinstance(one, WarpConfig | WarpgroupConfig) and isinstance(many, WarpConfig | WarpgroupConfig)
    assert one.tiling(RESNET).tiles >= 100
    assert many.tiling(RESNET).rows >= 7 and many.tiling(RESNET).columns == 112


# --- tiles of every form


@pytest.mark.share(7)
@pytest.mark.parametrize(
    ("rung", "problem", "config"),
    [
        ("pooled", wide(115, (3, 2, 1)), WarpConfig(2, 1, 4, 2, 2)),
        ("pooled", wide(113, (3, 2, 1), relu=False), WarpConfig(1, 4, 2, 4, 2)),
        ("pooled", wide(222, (3, 2, 1)), WarpConfig(2, 2, 7, 2, 2)),
        ("pooled", wide(117, (2, 2, 0), dtype="bf16"), WarpConfig(2, 2, 4, 2, 2)),
        ("tensor_core", wide(117, None, relu=False), WarpConfig(2, 3, 4, 2, 2)),
        ("warpgroup", wide(224, (3, 2, 1), source="uint8"), WarpgroupConfig(2, 112, 3)),
        ("warpgroup", wide(229, (3, 2, 1), dtype="bf16"), WarpgroupConfig(3, 112, 3)),
        ("warpgroup", wide(130, (3, 2, 1), relu=False), WarpgroupConfig(1, 64, 3)),
        ("warpgroup", wide(131, (2, 2, 0)), WarpgroupConfig(4, 128, 3)),
        ("warpgroup", wide(131, None), WarpgroupConfig(3, 32, 3)),
        ("streamed", wide(224, (3, 2, 1), source="uint8"), StreamedConfig(112, 8)),
        ("streamed", wide(229, (3, 2, 1), dtype="bf16"), StreamedConfig(112, 12)),
        ("streamed", wide(130, (3, 2, 1), relu=False), StreamedConfig(64, 8)),
        ("streamed", wide(131, (2, 2, 0)), StreamedConfig(112, 8)),
        ("streamed", wide(131, None), StreamedConfig(32, 8)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_tiles_meet_without_gap_or_overlap(
    rung: str, problem: StemProblem, config: Config, seed: int
) -> None:
    check(STEM, STEM.ladder.rung(rung), problem, config, CPU, seed)


# --- streams

STREAMED = {
    "pooled": StemProblem(5, 3, 23, 19, 64, 7, 7, (2, 2), (3, 3), pool=(3, 2, 1)),
    "pairs_of_bytes": StemProblem(
        3, 3, 21, 18, 64, 7, 7, (2, 2), (3, 3), "uint8", "nhwc", True, pool=(3, 2, 1)
    ),
    "columns": StemProblem(2, 3, 13, 140, 64, 7, 7, (2, 2), (3, 3), "fp16", pool=(3, 2, 1)),
    "not_pooled": StemProblem(3, 3, 17, 16, 128, 5, 5, (2, 2), (2, 2), "bf16", "nhwc", pool=None),
    "even_padding": StemProblem(3, 3, 16, 14, 64, 3, 7, (2, 2), (0, 2), pool=(2, 2, 0), relu=False),
    "small_filter": StemProblem(4, 3, 12, 15, 64, 3, 3, (2, 2), (1, 1), "uint8", pool=(2, 2, 0)),
    "lone_corner": StemProblem(2, 3, 15, 13, 64, 4, 3, (2, 2), (1, 1), pool=(3, 2, 1), dtype="bf16"),
    "one_row": StemProblem(2, 3, 9, 12, 64, 1, 5, (2, 2), (0, 1), pool=None),
    "six_rows": StemProblem(2, 3, 18, 12, 64, 6, 5, (2, 2), (3, 2), normalise=True, pool=(3, 2, 1)),
}


@pytest.mark.share(7)
@pytest.mark.parametrize("sms", (1, 3))
@pytest.mark.parametrize("problem", STREAMED.values(), ids=STREAMED)
def test_streams_run_through_images_and_columns(problem: StemProblem, sms: int, seed: int) -> None:
    """Ranges of many rows, with any start and end; those of a CTA may have different numbers of rounds."""
    rung = STEM.ladder.rung("streamed").on(replace(TWIN, multiprocessors=sms))
    check(STEM, rung, problem, StreamedConfig(32, 8), CPU, seed)


@pytest.mark.parametrize("order", (Order(), Order(seed=7, late=True)), ids=("in_order", "shuffled"))
def test_streams_race_with_nobody(order: Order) -> None:
    problem = StemProblem(2, 3, 13, 11, 64, 7, 7, (2, 2), (3, 3), pool=(3, 2, 1))
    options = TwinOptions(order, checks=True)
    check(STEM, STEM.ladder.rung("streamed").on(TINY), problem, StreamedConfig(32, 8), CPU, 3, options)


@pytest.mark.parametrize("pool", ((3, 2, 1), None), ids=("pooled", "not_pooled"))
@pytest.mark.parametrize("source", ("fp32", "uint8"))
def test_streams_keep_their_registers(source: str, pool: Any) -> None:
    """Warpgroups that multiply have 168 registers, the others 88; more would spill."""
    problem = replace(RESNET, batch=256, source=source, normalise=source == "uint8", pool=pool)
    rung = STEM.ladder.rung("streamed")
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    resources = compile_program(recipe.steps[-1].program, "sm_90a").resources
    assert resources.registers == 128 and resources.spill_bytes == 0


def test_halves_of_weights_add_up() -> None:
    """Some weights are split in two halves. Those that cannot be split, and infinite ones, keep their value."""
    problem = replace(wide(21, None), relu=False)
    inputs = STEM.inputs(problem, CPU, 0)
    weight = inputs["weight"].view(64, 3, 7, 7)
    weight[0] = 2.0**-24  # the smallest fp16
    weight[1] = 3 * 2.0**-24
    weight[2, 0, 3, 2] = float("inf")
    result, expected = run("streamed", problem, inputs), by_definition(problem, inputs)
    # An infinite weight on padding may be multiplied by a zero, or skipped.
    multiplied = by_definition(problem, inputs, padding_is_multiplied=True).isnan() & ~expected.isnan()
    assert multiplied[0, 2, :, 0].all() and int(multiplied.sum()) == problem.output_height
    result = torch.where(multiplied & result.isnan(), expected, result)
    assert result[:, 2].isinf().any()
    torch.testing.assert_close(result[:, 2], expected[:, 2], rtol=2e-3, atol=2e-3, equal_nan=True)
    torch.testing.assert_close(result[:, :2], expected[:, :2], rtol=2e-3, atol=1e-6)


# --- non-finite values


@pytest.mark.share(7)
@pytest.mark.parametrize("relu", (True, False))
@pytest.mark.parametrize("rung", ("separate", "tensor_core", "pooled", "warpgroup", "streamed"))
def test_nan_and_infinity_reach_what_sees_them_and_nothing_else(rung: str, relu: bool) -> None:
    """Weights that pad a filter are zeros, and zero times infinity is NaN: neighboring outputs must not change."""
    problem = replace(wide(37, (3, 2, 1)), relu=relu, filter_height=5, padding=(2, 3))
    inputs = STEM.inputs(problem, CPU, 1)
    pixels = inputs["x"].view(1, 3, problem.height, problem.width)
    pixels[0, 1, 4, 9] = float("nan")
    pixels[0, 0, 11, 20] = float("inf")
    pixels[0, 2, 7, 33] = -1e9  # infinite in fp16
    result, expected = run(rung, problem, inputs), by_definition(problem, inputs)
    assert expected.isnan().any() and expected.isinf().any()
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("rung", ("separate", "pooled", "warpgroup", "streamed"))
def test_the_padding_is_zero_after_the_normalisation(rung: str) -> None:
    """A black image that normalizes to ones: at the corner, the window covers fewer of them."""
    problem = replace(wide(21, None), source="uint8", source_layout="nhwc", normalise=True, relu=False)
    problem = replace(problem, pool=(2, 2, 0) if rung == "pooled" else None)
    inputs = STEM.inputs(problem, CPU, 0)
    inputs["x"].zero_()
    inputs["shift"].fill_(1)
    inputs["weight"].fill_(1)
    inputs["bias"].zero_()
    result = run(rung, problem, inputs)
    seen = 6 if problem.pool else 4  # rows and columns of the image, by the largest pooled windows
    assert float(result[0, 0, 0, 0]) == 3 * seen**2
    assert float(result[0, 5, 2, 2]) == 3 * 49


def test_an_empty_batch_is_no_trouble() -> None:
    problem = replace(wide(21, (3, 2, 1)), batch=0)
    for rung in ("separate", "pooled", "warpgroup", "streamed"):
        assert run(rung, problem, STEM.inputs(problem, CPU, 0)).numel() == 0
