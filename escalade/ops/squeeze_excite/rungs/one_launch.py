"""Means and both layers in one launch, by one CTA or one cluster per few images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.card import MIN_SHARED, TWIN, Card
from escalade.ops.base.dtypes import ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.squeeze_excite.problem import SqueezeExciteProblem
from escalade.ops.squeeze_excite.rungs.arguments import BUFFERS, generated, x_pitch
from escalade.ops.squeeze_excite.rungs.sliced import SLICED

_IN_FLOAT4 = 4
_MOST_TEAM = 32
_AHEAD = 8
"""Pixels in flight per thread."""
_REGISTERS = 96
"""Approximate registers per thread, with that many loads in flight."""
LANES = 128
"""Thread instructions issued per clock and SM."""
ROUND_TRIP_US = 1.0
"""Microseconds from an L2 load behind a barrier to a sum known to all threads of a CTA: for the image, and for each
weight."""
TURN_US = 0.4
"""Microseconds per further round of loads, of images or of a thread's pixels."""
SMALL_LAYER_US = 0.8
"""Microseconds of a layer over a few rows, or of a mean besides its traffic, in a separate launch."""
EXCHANGE_US = 0.5
"""Microseconds of one exchange between the CTAs of a cluster."""


@dataclass(frozen=True)
class OneLaunchConfig(Config):
    threads: int
    images: int
    """Images per cluster, which share one read of the weights."""
    cluster: int = 1
    """CTAs that share the pixels of an image, then its channels."""

    def share(self, problem: SqueezeExciteProblem) -> int:
        """Return the channels per CTA, in whole packs."""
        least = max(_IN_FLOAT4, widest_vector(problem.dtype, problem.channels))
        return ceil_div(ceil_div(problem.channels, self.cluster), least) * least

    def groups(self, problem: SqueezeExciteProblem) -> int:
        """Return the threads per pack of channels."""
        chunks = problem.channels // widest_vector(problem.dtype, problem.channels)
        return max(1, min(self.threads // chunks, ceil_div(problem.pixels, self.cluster)))

    def team(self, outputs: int) -> int:
        """Return the lanes per sum, so that every sum of a layer has its own."""
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
    """Cluster sizes to offer."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return super().architectures if self.sizes == (1,) else WITH_WGMMA

    def supports(self, problem: SqueezeExciteProblem) -> str | None:
        if self._offered(problem):
            return None
        return (
            f"{self.name} keeps the sums of {problem.channels} channels and {problem.squeezed} squeezed features in "
            "shared memory, where they do not fit; the rung `naive` takes any"
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
        """Sum up waves of clusters, each with the traffic and instructions of its CTAs and serial round trips; at least
        the time to read x."""
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
        exchanges = 2 * EXCHANGE_US if config.cluster > 1 else 0.0
        each = ceil_div(ceil_div(p.pixels, config.cluster), config.groups(p))
        more_turns = (config.images * ceil_div(each, _AHEAD) - 1) / resident
        return rates.launch_us + waves * (3 * ROUND_TRIP_US + exchanges + more_turns * TURN_US) + moved

    def recipe(self, problem: SqueezeExciteProblem, config: OneLaunchConfig) -> Recipe:
        p = problem
        program = Program.of(
            "squeeze_excite/one_launch.cu",
            constants=generated(p),
            problem=p,
            config=config,
            vector=widest_vector(p.dtype, p.channels),
            squeezed_vector=widest_vector(p.dtype, p.squeezed),
            ahead=_AHEAD,
        )
        call = KernelCall(
            program,
            (config.clusters(p) * config.cluster, 1, 1),
            (config.threads, 1, 1),
            (*BUFFERS, p.batch, x_pitch(p)),
            shared_bytes=config.shared_bytes(p),
            cluster=(config.cluster, 1, 1),
            overlap=True,
        )
        return Recipe((call,))


def one_launch_pays(problem: SqueezeExciteProblem, card: Card = TWIN) -> bool:
    """Return True if one launch takes less time than three launches at best: the mean at memory bandwidth, and two
    small layers. Graphs are built before their card is known, with an H200's rates."""
    rungs: tuple[Any, ...] = (SLICED, CLUSTER, ONE_BLOCK)
    supported = [rung.on(card) for rung in rungs if rung.supports(problem) is None]
    times = [rung.estimate(problem, rung.configs(problem)[0]) for rung in supported]
    separate = 3 * (card.rates.launch_us + SMALL_LAYER_US)
    separate += card.transfer_us(problem.elements * ELEMENT_BYTES[problem.dtype])
    return min(times, default=separate) < separate


# Predictions are for 1152_7_b1_s48 in fp16: 113 KB of x and 111 KB of each weight.
ONE_BLOCK = OneLaunch(
    "one_block",
    "16-byte loads; several lanes share the products of a feature, and weights serve several images",
    below="naive",
    # naive: 49 loads 5 times, four in flight, 37,000 clocks; 1152 serial products, 40 clocks each, 46,000; 48 of them 5
    # times, 10,000: 53 us. Here 335 KB at 39 bytes per clock, 4.9 us, 0.8 us of instructions, and a launch with three
    # round trips, 3.3 us.
    predicted_gain=5.9,
    sizes=(1,),
)
CLUSTER = OneLaunch(
    "cluster",
    "the CTAs of a cluster share an image's pixels, then its channels: sums are exchanged through DSMEM",
    below="one_block",
    # 42 KB per CTA, 0.6 us, 0.1 us of instructions, a launch with three round trips, 3.3 us, and two exchanges, 1 us;
    # against 9.0.
    predicted_gain=1.8,
    sizes=(8, 4, 2),
)
