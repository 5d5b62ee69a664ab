"""Weight gradients in fp32 and TF32 by fp16 wgmma: operands are split into fp16 halves in global memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from escalade.device.program import Program
from escalade.device.recipe import Buffer, ConstantCopy, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.accuracy import tf32_tolerance
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Rung
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts
from escalade.ops.conv2d_weight_gradient.rungs.sm90_wgmma import WGMMA, Wgmma
from escalade.ops.conv2d_weight_gradient.rungs.sm90_window import WINDOW, Window

PACK = 8
THREADS = 256
ROUNDS = 4
"""Packs in flight per thread."""
BLOCKS_PER_SM = 3
PAIRS = {
    "fp32": (("upper", "lower"), ("upper", "upper"), ("lower", "upper")),
    "tf32": (("upper", "upper"),),
}
"""Halves of x and of the gradient to multiply, by dtype. The bias gradient is part of all pairs but the last of
three."""
MOST_PRODUCTS = {"fp32": 64, "tf32": 2**31}
"""Products accumulated in the tensor cores before promotion to ordinary fp32 additions.

Tensor cores truncate every sum. If all products have the same sign, the errors do not cancel. That happens in networks,
whose activations are positive: in an autoencoder's step at batch 1024 gradients were up to 3.6e-5 too small without a
limit, and 1.4e-6 to 3.7e-6 with this one (H200). That is below TF32's own rounding, and products with a lower half are
small themselves.
"""


def _halved(problem: Conv2dWeightGradientProblem) -> Conv2dWeightGradientProblem:
    return replace(problem, dtype="fp16")


def _sizes(problem: Conv2dWeightGradientProblem) -> dict[str, int]:
    """Return the elements of the tensors to split."""
    return {"x": problem.forward.input_elements, "gradient": problem.forward.output_elements}


def _columns(problem: Conv2dWeightGradientProblem) -> int:
    """Return the CTAs per row of all channels, or of all filters."""
    return ceil_div(max(problem.forward.channels, problem.forward.filters), PACK * THREADS)


@dataclass(frozen=True)
class Halves(Rung[Conv2dWeightGradientProblem]):
    inner: Wgmma | Window
    """Rung for fp16."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.inner.architectures

    def supports(self, problem: Conv2dWeightGradientProblem) -> str | None:
        if problem.dtype not in PAIRS:
            return f"{self.name} takes {' and '.join(PAIRS)}, not {problem.dtype}; {self.inner.name} does"
        return self.inner.supports(_halved(problem))

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[Any, ...]:
        return self.inner.on(self.card).configs(_halved(problem))

    def estimate(self, problem: Conv2dWeightGradientProblem, config: Any) -> float:
        """Sum up the split, and one fp16 gradient per pair of halves."""
        f, launch, inner = problem.forward, self.card.rates.launch_us, self.inner.on(self.card)
        products = 0.0
        for _, pair_config in self._pairs(problem, config):
            product = inner.estimate(_halved(problem), pair_config)
            assert product is not None
            products += product - launch
        halves = min(len(PAIRS[problem.dtype]), 2)
        moved = (f.input_elements + f.output_elements) * (4 + 2 * halves)
        return self.card.microseconds(0, moved, launches=2) + products + launch

    def _pairs(
        self, problem: Conv2dWeightGradientProblem, config: Any
    ) -> Iterator[tuple[tuple[str, str], Any]]:
        """Yield the pairs of halves, and the config of each."""
        short = self.inner.on(self.card).shortened(_halved(problem), config, MOST_PRODUCTS[problem.dtype])
        for pair in PAIRS[problem.dtype]:
            yield pair, config if "lower" in pair else short

    def recipe(self, problem: Conv2dWeightGradientProblem, config: Any) -> Recipe:
        f = problem.forward
        products: list[KernelCall | ConstantCopy] = []
        counts: list[int] = []
        for (of_x, of_gradient), pair_config in self._pairs(problem, config):
            inner = self.inner.on(self.card).in_parts(_halved(problem), pair_config)
            placed = Recipe(inner.steps[:1]).remap(
                {
                    "x": Buffer(f"{of_x}_x"),
                    "gradient": Buffer(f"{of_gradient}_gradient"),
                    parts.PARTS: Buffer(parts.PARTS, offset=4 * problem.part_elements * sum(counts)),
                }
            )
            products += placed.steps
            counts.append(inner.workspaces[0].bytes // (4 * problem.part_elements))
        bias_parts = sum(counts[:2])
        halves = ("upper", "lower")[: min(len(counts), 2)]
        both = f.channels + f.filters
        tickets = 2 * _columns(problem)
        return Recipe(
            (
                *(self._split(problem, attempt) for attempt in (0, 1)),
                *products,
                parts.total(problem, sum(counts), bias_parts, scaled=True),
            ),
            (
                parts.workspace(problem, sum(counts)),
                *(
                    Workspace(f"{half}_{name}", 2 * size)
                    for name, size in _sizes(problem).items()
                    for half in halves
                ),
                Workspace("seen", 4 * (both + tickets), zeroed=True),
                Workspace(parts.EXPONENTS, 2 * 4 * both),
            ),
        )

    def _split(self, problem: Conv2dWeightGradientProblem, attempt: int) -> KernelCall:
        f, sizes = problem.forward, _sizes(problem)
        lower = len(PAIRS[problem.dtype]) > 1
        wanted = ceil_div(max(sizes.values()), PACK * THREADS * ROUNDS)
        halves = (
            Buffer(f"{half}_{name}", optional=half == "lower")
            for name in sizes
            for half in ("upper", "lower")
        )
        return KernelCall(
            Program.of(
                "conv2d_weight_gradient/sm90_halves.cu",
                threads=THREADS, blocks_per_sm=BLOCKS_PER_SM, rounds=ROUNDS, lower=lower,
            ),
            (min(wanted, BLOCKS_PER_SM * self.card.multiprocessors), len(sizes), _columns(problem)),
            (THREADS, 1, 1),
            (
                *(Buffer(name) for name in sizes), *halves, Buffer("seen"), Buffer(parts.EXPONENTS), attempt,
                Int64(f.input_elements // f.channels), Int64(f.output_elements // f.filters), f.channels, f.filters,
            ),
            overlap=True,
        )  # fmt: skip

    def tolerance(self, problem: Conv2dWeightGradientProblem, peer_error: float) -> float:
        """Two halves have 22 bits; of a few products, all may have the maximum error."""
        tolerance = super().tolerance(problem, peer_error)
        if problem.dtype == "tf32":
            return tf32_tolerance(problem.dtype, problem.forward.output_pixels, tolerance)
        return max(tolerance, 2.0**-21)


# Predictions for 64to64_56_k3s1 at batch 256 in fp32, 59 GFLOP.
WGMMA_SPLIT = Halves(
    "wgmma_split",
    "fp32 and TF32: x and the gradient are split into fp16 halves in global memory, with a power of two per channel, "
    "and wgmma computes the gradients of three pairs of them (TF32: of the upper halves), which are added up; an "
    "infinity becomes NaN",
    below="direct",
    # direct: two loads per product, 30 G of them in 8 ms. 822 MB of operands and halves are 200 us, plus three times
    # 148 us.
    predicted_gain=12.5,
    inner=replace(WGMMA, single=False),
)
WINDOW_SPLIT = Halves(
    "window_split",
    "the same by window, for 3x3 filters",
    below="wgmma_split",
    # Three times 95 us instead of 148.
    predicted_gain=1.33,
    inner=WINDOW,
)
