"""Group normalisation: the rungs of group_norm, and how groups of channels lie under a block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, lcm

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import ELEMENT_BYTES, element, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.group_norm.problem import GroupNormProblem
from escalade.ops.shared import activation

MOST_VALUES = 32
"""Values of a thread at most: a block of 1,024 threads has 64 registers for each."""
_THREADS = (128, 256, 512, 1024)
_STATIC_SHARED = 48 * 1024
_PAIR_BYTES = 8
"""Bytes of a mean and what goes with it."""
_SEGMENT_BYTES = 64
"""Bytes of a pixel that blocks read side by side where there are blocks enough: two sectors."""
_MERGED = 4096
"""Pairs at most that a block of the second launch merges: a few for each thread."""
_RESIDENT_THREADS = 1024
"""Threads of a multiprocessor at once, with some 64 registers each."""
_PAUSE_US = 4.5
"""Microseconds from the last loads of blocks to their first stores, and from their end to the loads of the next: those
that begin together stay together, and hide nothing of each other's. By 16 turns of 8 MB on an H200, 134 µs in blocks of
1,024 threads and 119 in clusters of blocks of 128."""
_FIRST = 0.4
"""The part of a pause that a launch takes longer whose blocks all run at once."""


@dataclass(frozen=True)
class Span:
    """The channels under a block: whole groups in whole packs."""

    vector: int
    packs: int
    groups: int
    across: int
    """Blocks that it takes for all channels."""
    group_channels: int

    @staticmethod
    def every(problem: GroupNormProblem) -> tuple[Span, ...]:
        """All of them, the narrowest first."""
        vector = widest_vector(problem.dtype, problem.channels)
        least = lcm(vector, problem.group_channels)
        most = problem.channels // least
        return tuple(
            Span(vector, times * least // vector, times * least // problem.group_channels, most // times,
                 problem.group_channels)
            for times in range(1, most + 1)
            if most % times == 0
        )  # fmt: skip

    @property
    def unit(self) -> int:
        """Channels of one pack and one group."""
        return gcd(self.vector, self.group_channels)

    def fits(self, threads: int) -> bool:
        """Whether a block of so many threads is as wide, and has the shared memory for all that they find."""
        pairs = threads * (self.vector // self.unit) + self.groups
        return self.packs <= threads and pairs * _PAIR_BYTES <= _STATIC_SHARED

    def constants(self, problem: GroupNormProblem, threads: int, packs: int) -> dict[str, Constant]:
        return {
            **_constants(problem, threads),
            "VECTOR": self.vector,
            "WIDTH": self.packs,
            "UNIT": self.unit,
            "GROUP_CHANNELS": self.group_channels,
            "PACKS": packs,
        }


def _seen(problem: GroupNormProblem) -> GroupNormProblem:
    """The problem as kernels see it. In NCHW a group lies together: it is an image whose pixels are packs, with one
    group of as many channels."""
    if problem.layout == "nhwc":
        return problem
    vector = widest_vector(problem.dtype, problem.row)
    return replace(
        problem, batch=problem.batch * problem.groups, channels=vector, height=problem.row // vector, width=1,
        groups=1, layout="nhwc",
    )  # fmt: skip


def _constants(problem: GroupNormProblem, threads: int) -> dict[str, Constant]:
    planes = problem.layout == "nchw" and (problem.weight or problem.bias)
    return {
        "Element": element(problem.dtype),
        "HAS_WEIGHT": problem.weight,
        "HAS_BIAS": problem.bias,
        "THREADS": threads,
        "PLANE": problem.pixels if planes else 0,
        "IMAGE_GROUPS": problem.groups if planes else 1,
        "ROW_CHANNELS": problem.group_channels if planes else 1,
        **activation.constants_of(problem),
    }


def _pitches(problem: GroupNormProblem) -> tuple[int, int]:
    """Elements from pixel to pixel, as kernels see them."""
    return problem.x_pitch or problem.channels, problem.y_pitch or problem.channels


_X, _Y = Buffer("x"), Buffer("y")
_CHANNELWISE = (Buffer("weight", optional=True), Buffer("bias", optional=True))


@dataclass(frozen=True)
class Naive(Rung[GroupNormProblem]):
    def supports(self, problem: GroupNormProblem) -> str | None:
        return None

    def configs(self, problem: GroupNormProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: GroupNormProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = _seen(problem)
        call = KernelCall(
            Program.of("group_norm/naive.cu", "group_norm_naive", _constants(problem, config.threads)),
            (p.batch * p.groups, 1, 1),
            (config.threads, 1, 1),
            (_X, *_CHANNELWISE, _Y, p.groups, p.group_channels, p.pixels, *_pitches(p), float(p.epsilon)),
            overlap=True,
        )
        return Recipe((call,))


@dataclass(frozen=True)
class SpanConfig(Config):
    threads: int
    """Threads of a block."""
    packs: int
    """Pixels of a thread that are under way at once."""
    groups: int
    """Groups under a block."""


@dataclass(frozen=True)
class SplitConfig(SpanConfig):
    splits: int
    """Blocks that share the pixels of an image, about."""


@dataclass(frozen=True)
class Split(Rung[GroupNormProblem]):
    """Moments of shares of an image in one launch, and all else in a second."""

    def supports(self, problem: GroupNormProblem) -> str | None:
        if self._spans(problem):
            return None
        return f"groups of {problem.group_channels} channels are wider than a block of {_THREADS[-1]} threads"

    def _spans(self, problem: GroupNormProblem) -> list[tuple[Span, int]]:
        """The widest that the fewest threads reach, then by that of more."""
        found = []
        for threads in _THREADS[1:]:
            fitting = [span for span in Span.every(_seen(problem)) if span.fits(threads)]
            if fitting:
                found.append((fitting[-1], threads))
        return found

    def configs(self, problem: GroupNormProblem) -> tuple[Config, ...]:
        offered, p = [], _seen(problem)
        for span, threads in self._spans(problem):
            for filling in (self.card.filling, self.card.filling // 2, 2 * self.card.filling):
                wanted = ceil_div(filling, max(1, p.batch) * span.across)
                most = ceil_div(p.pixels, 4 * (threads // span.packs))
                splits = max(1, min(wanted, most, _MERGED // span.groups))
                offered += [SplitConfig(threads, packs, span.groups, splits) for packs in (4, 2)]
        return tuple(dict.fromkeys(offered))

    def estimate(self, problem: GroupNormProblem, config: Config) -> float:
        """Counts x twice, for both launches read it, and somewhat more: 268 MB take 112 to 116 µs on an H200."""
        return self.card.microseconds(0, 1.75 * problem.bytes, launches=2) + _FIRST * _PAUSE_US

    def recipe(self, problem: GroupNormProblem, config: Config) -> Recipe:
        assert isinstance(config, SplitConfig)
        p = _seen(problem)
        span = _span(p, config)
        per_split = ceil_div(p.pixels, config.splits)
        splits = ceil_div(p.pixels, per_split)
        grid, block = (p.batch * splits, span.across, 1), (config.threads, 1, 1)
        x_pitch, y_pitch = _pitches(p)
        partial = Buffer("partial")
        plain = replace(
            p, weight=False, bias=False, relu=False, activation=""
        )  # one program for all that follows
        moments = KernelCall(
            Program.of(
                "group_norm/split_moments.cu", "group_norm_split_moments",
                span.constants(plain, config.threads, config.packs),
            ),
            grid,
            block,
            (_X, partial, p.pixels, x_pitch, splits, per_split),
            overlap=True,
        )  # fmt: skip
        normalise = KernelCall(
            Program.of(
                "group_norm/split_normalise.cu", "group_norm_split_normalise",
                span.constants(problem, config.threads, config.packs),
            ),
            grid,
            block,
            (_X, partial, *_CHANNELWISE, _Y, p.pixels, x_pitch, y_pitch, splits, per_split, float(p.epsilon)),
            overlap=True,
        )  # fmt: skip
        workspace = Workspace("partial", _PAIR_BYTES * p.batch * splits * p.groups)
        return Recipe((moments, normalise), (workspace,))


@dataclass(frozen=True)
class InRegisters(Rung[GroupNormProblem]):
    """A block has all pixels of its groups in registers."""

    def supports(self, problem: GroupNormProblem) -> str | None:
        if self._offered(problem):
            return None
        return (
            f"groups of {problem.group_channels} channels of {problem.pixels} pixels do not fit into the registers of "
            "a block; the rung `split` takes any"
        )

    def configs(self, problem: GroupNormProblem) -> tuple[Config, ...]:
        return self._offered(problem)

    def _offered(self, problem: GroupNormProblem) -> tuple[SpanConfig, ...]:
        """Offers first the widest segments of a pixel that leave blocks enough; of each the fewest threads."""
        offered: list[tuple[bool, int, SpanConfig]] = []
        p = _seen(problem)
        for span in Span.every(p):
            bytes = span.packs * span.vector * ELEMENT_BYTES[p.dtype]
            if offered and bytes > _SEGMENT_BYTES:
                break
            few = p.batch * span.across < 2 * self.card.multiprocessors
            for threads in _THREADS:
                packs = ceil_div(p.pixels, max(1, threads // span.packs))
                if span.fits(threads) and packs * span.vector <= MOST_VALUES:
                    offered.append((few, bytes if few else -bytes, SpanConfig(threads, packs, span.groups)))
        return tuple(config for _, _, config in sorted(offered, key=lambda one: one[:2]))

    def estimate(self, problem: GroupNormProblem, config: Config) -> float:
        assert isinstance(config, SpanConfig)
        p = _seen(problem)
        return _held_us(self.card, p, _span(p, config), p.batch, config.threads)

    def recipe(self, problem: GroupNormProblem, config: Config) -> Recipe:
        assert isinstance(config, SpanConfig)
        p = _seen(problem)
        span = _span(p, config)
        call = KernelCall(
            Program.of(
                "group_norm/in_registers.cu", "group_norm_in_registers",
                span.constants(problem, config.threads, config.packs),
            ),
            (p.batch, span.across, 1),
            (config.threads, 1, 1),
            (_X, *_CHANNELWISE, _Y, p.pixels, *_pitches(p), float(p.epsilon)),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


@dataclass(frozen=True)
class ClusterConfig(SpanConfig):
    blocks: int
    """Blocks of a cluster, which share the pixels of an image."""


@dataclass(frozen=True)
class Clustered(Rung[GroupNormProblem]):
    """The blocks of a cluster have all pixels of their groups in registers."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def supports(self, problem: GroupNormProblem) -> str | None:
        if self.configs(problem):
            return None
        return (
            f"groups of {problem.group_channels} channels of {problem.pixels} pixels do not fit into the registers of "
            "a cluster; the rung `split` takes any"
        )

    def configs(self, problem: GroupNormProblem) -> tuple[Config, ...]:
        """Offers of each span and number of threads the fewest blocks."""
        offered, p = [], _seen(problem)
        for span in Span.every(p):
            for threads in _THREADS[:-1]:
                if not span.fits(threads):
                    continue
                for blocks in range(2, len(self.card.clusters) + 1):
                    packs = ceil_div(ceil_div(p.pixels, blocks), threads // span.packs)
                    if packs * span.vector <= MOST_VALUES:
                        offered.append(ClusterConfig(threads, packs, span.groups, blocks))
                        break
        return tuple(sorted(offered, key=lambda config: self.estimate(problem, config)))

    def estimate(self, problem: GroupNormProblem, config: Config) -> float:
        assert isinstance(config, ClusterConfig)
        p = _seen(problem)
        return _held_us(self.card, p, _span(p, config), p.batch * config.blocks, config.threads)

    def recipe(self, problem: GroupNormProblem, config: Config) -> Recipe:
        assert isinstance(config, ClusterConfig)
        p = _seen(problem)
        span = _span(p, config)
        call = KernelCall(
            Program.of(
                "group_norm/clustered.cu", "group_norm_clustered",
                span.constants(problem, config.threads, config.packs),
            ),
            (p.batch * config.blocks, span.across, 1),
            (config.threads, 1, 1),
            (_X, *_CHANNELWISE, _Y, p.pixels, *_pitches(p), ceil_div(p.pixels, config.blocks), float(p.epsilon)),
            cluster=(config.blocks, 1, 1),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


def _span(problem: GroupNormProblem, config: SpanConfig) -> Span:
    return next(span for span in Span.every(problem) if span.groups == config.groups)


def _held_us(card: Card, problem: GroupNormProblem, span: Span, blocks: int, threads: int) -> float:
    """The bytes, and a pause in each turn of blocks. Narrow segments of pixels take longer (16 bytes of them five times
    as long, on an H200)."""
    bytes = span.packs * span.vector * ELEMENT_BYTES[problem.dtype]
    narrow = max(1.0, _SEGMENT_BYTES / bytes) if problem.channels > span.packs * span.vector else 1.0
    turns = blocks * span.across * threads / (card.multiprocessors * _RESIDENT_THREADS)
    return (
        card.rates.launch_us
        + card.passing(narrow * problem.bytes)
        + _PAUSE_US * (_FIRST + max(0.0, turns - 1))
    )


# Predictions are for 256 channels in 32 groups, 56 x 56, batch 32, fp16: 51 MB in, 51 MB out.
NAIVE = Naive("naive", "a block a group of an image, in three passes of single elements", None, None)

SPLIT = Split(
    "split",
    "16 bytes a load; blocks share an image, and a second launch merges what they have found and normalises",
    below="naive",
    # naive: 25 k elements a block in three passes, each load 16 bytes of a sector and two divisions, 75 M loads and
    # stores of 2 bytes with some 40 instructions each, 140 us. Split: 51 MB read twice, the second time in part from
    # L2, and written once: 154 MB, 36 us, and a launch.
    predicted_gain=3.7,
)

IN_REGISTERS = InRegisters(
    "in_registers",
    "a group lies in the registers of a block, and is read once",
    below="split",
    # 103 MB, 24.5 us, and no second launch; against 37.
    predicted_gain=1.5,
)

CLUSTERED = Clustered(
    "clustered",
    "the blocks of a cluster share a group, so that larger ones are read once and whole pixels lie under a block",
    below="in_registers",
    # Groups of 8 channels are 16 bytes of a pixel, half of a sector, which two blocks read and write: 50 us and more.
    # Whole pixels: 24.5 us, and pauses of 6.5 us between blocks, of which those beside them hide the most.
    predicted_gain=1.5,
)
