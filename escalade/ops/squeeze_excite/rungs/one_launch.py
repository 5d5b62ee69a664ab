"""Means and both layers in one launch, by a block or by a cluster of blocks for a few images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.card import MIN_SHARED, TWIN, Card
from escalade.ops.base.dtypes import ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.squeeze_excite.problem import SqueezeExciteProblem
from escalade.ops.squeeze_excite.rungs.arguments import BUFFERS, constants, x_pitch
from escalade.ops.squeeze_excite.rungs.sliced import SLICED

_IN_FLOAT4 = 4
_MOST_TEAM = 32
_AHEAD = 8
"""Pixels of a thread that are under way at once."""
_REGISTERS = 96
"""Registers of a thread at most, about: as many loads under way take them."""
LANES = 128
"""Instructions of threads that a multiprocessor starts in a clock."""
ROUND_TRIP_US = 1.0
"""Microseconds from a load out of L2, behind a barrier, to a sum that all threads of a block know: the image, and each
of the two weights."""
TURN_US = 0.4
"""Microseconds of each further turn of loads: images follow each other, and so do the pixels of a thread."""
SMALL_LAYER_US = 0.8
"""Microseconds of a layer over a few rows, or of a mean besides its bytes, in a launch of its own."""
MEETING_US = 0.5
"""Microseconds in which the blocks of a cluster meet and read what the others have found."""


@dataclass(frozen=True)
class OneLaunchConfig(Config):
    threads: int
    images: int
    """Images that a cluster has at once: it reads the weights once for all of them."""
    cluster: int = 1
    """Blocks that share the pixels of an image, then its channels."""

    def share(self, problem: SqueezeExciteProblem) -> int:
        """Channels of a block, in whole packs."""
        least = max(_IN_FLOAT4, widest_vector(problem.dtype, problem.channels))
        return ceil_div(ceil_div(problem.channels, self.cluster), least) * least

    def groups(self, problem: SqueezeExciteProblem) -> int:
        """Threads that share the pixels of a pack of channels."""
        chunks = problem.channels // widest_vector(problem.dtype, problem.channels)
        return max(1, min(self.threads // chunks, ceil_div(problem.pixels, self.cluster)))

    def team(self, outputs: int) -> int:
        """Lanes that share a sum: as many as leave each sum of a layer its own."""
        team = 1
        while team < _MOST_TEAM and 2 * team * outputs <= self.threads:
            team *= 2
        return team

    def shared_bytes(self, problem: SqueezeExciteProblem) -> int:
        share, hidden = self.share(problem), ceil_div(problem.squeezed, _IN_FLOAT4) * _IN_FLOAT4
        summed = self.groups(problem) * problem.channels
        return 4 * self.images * (share * self.cluster + share + 2 * hidden + summed)

    def clusters(self, problem: SqueezeExciteProblem) -> int:
        return ceil_div(problem.batch, self.images)


@dataclass(frozen=True)
class OneLaunch(Rung[SqueezeExciteProblem, OneLaunchConfig]):
    sizes: tuple[int, ...]
    """Blocks of a cluster that it offers."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return super().architectures if self.sizes == (1,) else WITH_WGMMA

    def supports(self, problem: SqueezeExciteProblem) -> str | None:
        if self._offered(problem):
            return None
        return (
            f"the sums of {problem.channels} channels and {problem.squeezed} squeezed features do not fit into the "
            "shared memory of a block; the rung `naive` takes any"
        )

    def configs(self, problem: SqueezeExciteProblem) -> tuple[OneLaunchConfig, ...]:
        return tuple(sorted(self._offered(problem), key=lambda config: self.estimate(problem, config)))

    def _offered(self, problem: SqueezeExciteProblem) -> list[OneLaunchConfig]:
        most = max(1, problem.batch)
        return [
            config
            for cluster in self.sizes
            for images in (1, 2, 4)
            for threads in (512, 256)
            if images == 1 or images <= most
            if (config := OneLaunchConfig(threads, images, cluster)).shared_bytes(problem) <= MIN_SHARED
        ]

    def estimate(self, problem: SqueezeExciteProblem, config: OneLaunchConfig) -> float:
        """Waves of clusters, each of them the bytes and the instructions of its blocks, one round trip behind another;
        x at the rate of the whole card if that takes longer.
        """
        p, rates, size = problem, self.card.rates, ELEMENT_BYTES[problem.dtype]
        blocks = config.clusters(p) * config.cluster
        usable = max(1, self.card.max_active_clusters(config.cluster) * config.cluster)
        resident = min(
            self.card.registers // (_REGISTERS * config.threads), self.card.resident_blocks(config.shared_bytes(p)),
            max(1, ceil_div(blocks, usable)),
        )  # fmt: skip
        waves = ceil_div(blocks, resident * usable)
        pixels = config.images * p.channels * ceil_div(p.pixels, config.cluster)
        weights = 2 * p.weight_elements / config.cluster
        clocks = (pixels + weights) * size / rates.copies.loads
        clocks += (2 * pixels + (1 + config.images) * weights) / LANES
        moved = max(self.card.transfer_us(p.elements * size), waves * resident * clocks / rates.clock)
        moved += config.clusters(p) * 2 * p.weight_elements * size / rates.l2
        meetings = 2 * MEETING_US if config.cluster > 1 else 0.0
        each = ceil_div(ceil_div(p.pixels, config.cluster), config.groups(p))
        further = (config.images * ceil_div(each, _AHEAD) - 1) / resident
        return rates.launch_us + waves * (3 * ROUND_TRIP_US + meetings + further * TURN_US) + moved

    def recipe(self, problem: SqueezeExciteProblem, config: OneLaunchConfig) -> Recipe:
        p = problem
        choices: dict[str, Constant] = {
            **constants(p, config.threads),
            "VECTOR": widest_vector(p.dtype, p.channels),
            "SQUEEZED_VECTOR": widest_vector(p.dtype, p.squeezed),
            "IMAGES": config.images,
            "CLUSTER": Macro(str(config.cluster)),
            "SHARE": config.share(p),
            "GROUPS": config.groups(p),
            "AHEAD": _AHEAD,
            "TEAM": config.team(p.squeezed),
            "GATE_TEAM": config.team(config.share(p)),
        }
        call = KernelCall(
            Program.of("squeeze_excite/one_launch.cu", "squeeze_excite_one_launch", choices),
            (config.clusters(p) * config.cluster, 1, 1),
            (config.threads, 1, 1),
            (*BUFFERS, p.batch, x_pitch(p)),
            shared_bytes=config.shared_bytes(p),
            cluster=(config.cluster, 1, 1),
            overlap=True,
        )
        return Recipe((call,))


def one_launch_pays(problem: SqueezeExciteProblem, card: Card = TWIN) -> bool:
    """Whether gates in one launch take less time than three launches do at the least: the mean as fast as x is read,
    and two small layers. Graphs are made before their card is known, and by an H200's rates.
    """
    rungs: tuple[Any, ...] = (SLICED, CLUSTER, ONE_BLOCK)
    able = [rung.on(card) for rung in rungs if rung.supports(problem) is None]
    times = [rung.estimate(problem, rung.configs(problem)[0]) for rung in able]
    separate = 3 * (card.rates.launch_us + SMALL_LAYER_US)
    separate += card.transfer_us(problem.elements * ELEMENT_BYTES[problem.dtype])
    return min(times, default=separate) < separate


# Predictions are for 1152_7_b1_s48 in fp16: 113 KB of x and 111 KB of each weight.
ONE_BLOCK = OneLaunch(
    "one_block",
    "16 bytes a load; the lanes of a team share a feature's products, and weights serve several images",
    below="naive",
    # naive: 49 loads 5 times over, four under way, 37,000 clocks; 1152 products one behind another, 40 clocks each,
    # 46,000; 48 of them 5 times, 10,000: 53 us. Here 335 KB at 39 bytes a clock, 4.9 us, 0.8 us of instructions, and a
    # launch with three round trips, 3.3 us.
    predicted_gain=5.9,
    sizes=(1,),
)
CLUSTER = OneLaunch(
    "cluster",
    "the blocks of a cluster share an image's pixels, then its channels: sums meet in distributed shared memory",
    below="one_block",
    # 42 KB a block, 0.6 us, 0.1 us of instructions, a launch with three round trips, 3.3 us, and two meetings, 1 us;
    # against 9.0.
    predicted_gain=1.8,
    sizes=(8, 4, 2),
)
