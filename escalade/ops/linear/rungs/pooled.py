"""The mean over an image's pixels and the fully connected layer behind it: as two launches, and as one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, WeightsReady, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.adaptive_avg_pool2d import AdaptiveAvgPool2d, AdaptiveAvgPool2dProblem
from escalade.ops.base.card import TWIN, Card
from escalade.ops.base.dtypes import ELEMENT_BYTES, NAMES, STORAGE, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.linear.problem import LinearProblem
from escalade.ops.linear.rungs.cuda_core import TILED, WARP_PER_OUTPUT
from escalade.ops.linear.rungs.tensor_core import TENSOR_CORE
from escalade.ops.shared import activation

FEW_ROWS = {"fp32": 16, "tf32": 8, "fp16": 8, "bf16": 8}
"""Up to this many rows, reading the weights takes longer than the products of one warp per output."""
_MEAN = AdaptiveAvgPool2d.ladder.rung("vectorised")


def plain_rungs(problem: LinearProblem) -> tuple[Rung[LinearProblem], ...]:
    """Return the rungs without pooling, fastest expected first. Split products are omitted: they turn an infinity into
    NaN."""
    few = (WARP_PER_OUTPUT,) if problem.batch <= FEW_ROWS[problem.dtype] else ()
    return (*few, TENSOR_CORE, TILED)


def _mean(problem: LinearProblem) -> AdaptiveAvgPool2dProblem:
    """Return the mean of images of `pixels` rows and one column: the same memory as x."""
    stored = NAMES[STORAGE[problem.dtype]]
    return AdaptiveAvgPool2dProblem(
        problem.batch, problem.in_features, problem.pixels, 1, dtype=stored, layout="nhwc"
    )


@dataclass(frozen=True)
class PoolFirst(Rung[LinearProblem]):
    def supports(self, problem: LinearProblem) -> str | None:
        if problem.pixels == 1:
            return f"{self.name} needs several pixels; this problem has one"
        try:
            return _MEAN.supports(_mean(problem))
        except UnsupportedError as error:
            return f"as a pooling: {error}"

    def configs(self, problem: LinearProblem) -> tuple[Config, ...]:
        """Return the configs of the layer; the mean uses its default."""
        rung, plain = self._layer(problem)
        return rung.configs(plain)

    def recipe(self, problem: LinearProblem, config: Config) -> Recipe:
        rung, plain = self._layer(problem)
        pooling = _MEAN.on(self.card)
        mean = pooling.recipe(_mean(problem), pooling.configs(_mean(problem))[0]).remap(
            {"y": Buffer("means")}
        )
        layer = rung.recipe(plain, config).remap({"x": Buffer("means")})
        bytes = plain.input_elements * ELEMENT_BYTES[plain.dtype]
        return Recipe((*mean.steps, *layer.steps), (Workspace("means", bytes), *layer.workspaces))

    def tolerance(self, problem: LinearProblem, peer_error: float) -> float:
        rung, _ = self._layer(problem)
        return rung.tolerance(problem, peer_error)

    def _layer(self, problem: LinearProblem) -> tuple[Rung[LinearProblem], LinearProblem]:
        plain = replace(problem, pixels=1)
        rungs = (rung.on(self.card) for rung in plain_rungs(plain))
        return next(rung for rung in rungs if rung.supports(plain) is None), plain


@dataclass(frozen=True)
class PooledConfig(Config):
    threads: int
    outputs: int
    """Output features per warp."""

    def blocks(self, problem: LinearProblem) -> int:
        return ceil_div(problem.out_features, self.threads // 32 * self.outputs)


MOST_ROWS = 4
MOST_PACKS = 16
"""Largest number of weight packs per lane in registers, 64 registers at 16 bytes each; half with two outputs."""
MOST_GROUPS = 16
"""Largest number of threads per feature, whose sums are added up serially."""
AHEAD_OF_BLOCK = 4096
"""Loads in flight per CTA, up to 16 bytes each: a quarter of the register file."""
SM_BYTES = 64
"""Bytes per clock and SM."""
LANES = 128
"""Thread instructions issued per clock and SM."""
CONFIGS = (PooledConfig(512, 1), PooledConfig(256, 1), PooledConfig(512, 2), PooledConfig(256, 2))
"""16 warps first: 1000 outputs are then 63 CTAs, which read x half as often as 125 and are few enough to launch
early."""


class Pooled(Rung[LinearProblem, PooledConfig]):
    def supports(self, problem: LinearProblem) -> str | None:
        if problem.pixels == 1:
            return f"{self.name} needs several pixels; this problem has one"
        if problem.batch > MOST_ROWS:
            return f"{self.name} takes up to {MOST_ROWS} rows, not {problem.batch}: every CTA reads all of x"
        if _packs(problem) > MOST_PACKS:
            return (
                f"{self.name} keeps a row of weights in a warp's registers; {problem.in_features} features in vectors "
                f"of {_vector(problem)} do not fit"
            )
        return None

    def configs(self, problem: LinearProblem) -> tuple[PooledConfig, ...]:
        return tuple(config for config in CONFIGS if config.outputs**2 * _packs(problem) <= MOST_PACKS)

    def recipe(self, problem: LinearProblem, config: PooledConfig) -> Recipe:
        p, vector = problem, _vector(problem)
        groups = max(1, min(config.threads * vector // p.in_features, p.pixels, MOST_GROUPS))
        call = KernelCall(
            Program.of(
                "linear/pooled.cu", constants=activation.constants_of(p), problem=p, config=config, vector=vector,
                groups=groups, ahead=min(p.pixels // groups, AHEAD_OF_BLOCK // config.threads),
            ),
            (config.blocks(p), 1, 1),
            (config.threads, 1, 1),
            (
                Buffer("x"), Buffer("weight"), Buffer("bias", optional=True), Buffer("y"),
                p.out_features, WeightsReady(("weight", "bias")),
            ),
            shared_bytes=p.batch * p.in_features * (groups * 4 + ELEMENT_BYTES[p.dtype]),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


def _vector(problem: LinearProblem) -> int:
    return widest_vector(problem.dtype, problem.in_features)


def _packs(problem: LinearProblem) -> int:
    """Return the packs per lane of a row of weights."""
    return ceil_div(problem.in_features, 32 * _vector(problem))


def one_launch_pays(problem: LinearProblem, card: Card = TWIN) -> bool:
    """Return True if reading all of x in every CTA takes less time than the launch that is saved.

    Graphs are built before their card is known, with an H200's rates. ResNet-18's 512 channels of 7x7 in fp16 are 50
    KB: 63 CTAs read 3.2 MB in 0.45 us from L2, and one SM takes as long for its 50 KB; converting and adding 25,088
    values takes 390 clocks, 0.22 us. That is less than a launch's 1.5 us for up to two images. ResNet-50's 2048
    channels take 2.7 us for one.
    """
    if POOLED.supports(problem) is not None:
        return False
    rates = card.rates
    x = problem.input_elements * ELEMENT_BYTES[problem.dtype]
    reading = max(x / (SM_BYTES * rates.clock), CONFIGS[0].blocks(problem) * x / rates.l2)
    instructions = problem.input_elements * (1 if ELEMENT_BYTES[problem.dtype] == 4 else 2)
    return reading + instructions / (LANES * rates.clock) < rates.launch_us


# Predictions are for 512to1000_mean49 at batch 1 in fp16: 50 KB of x, 1 MB of weights.
POOL_FIRST = PoolFirst(
    "pool_first",
    "the mean over pixels by adaptive_avg_pool2d's vectorised, and the layer's own rung behind it: two launches",
    below="naive",
    # naive: 25088 serial loads of x per thread, some 10 clocks each, 150 us; here 2.0 and 1.9 us.
    predicted_gain=40.0,
)
POOLED = Pooled(
    "pooled",
    "for a few rows, mean and layer in one launch: every CTA computes the means of all features, with its weights "
    "already in registers",
    below="pool_first",
    # A launch with one round trip, 1.6 us, x to 63 CTAs, 0.45 us, and its sums, 0.22 us, against 3.9 us.
    predicted_gain=1.7,
)
