"""Input gradients by conv2d's rungs: convolutions of dy with the flipped filter, one per sub-pixel phase."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import C, Config, Rung
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.phases import PixelPhase, pixel_phases
from escalade.ops.conv2d_input_gradient.rungs.rung import InputGradientRung

MOST_PHASES = 16
"""Largest number of sub-pixel phases; each takes a few launches."""
LANES = 4
"""Lanes in which phases overlap."""
FLIP_TILE = 32
FLIP_ROWS = 8
FLIP_THREADS = 256
PLACE_THREADS = 256


def too_many_phases(rung: str, forward: Conv2dProblem) -> str | None:
    """Return why a rung with one convolution per phase does not support the stride."""
    if forward.stride[0] * forward.stride[1] > MOST_PHASES:
        return (
            f"{rung} runs one convolution per sub-pixel phase, {MOST_PHASES} at most; a stride of {forward.stride} "
            "has more"
        )
    return None


def place_rows(forward: Conv2dProblem) -> int:
    """Return the contiguous rows of dx; in NCHW those of every channel."""
    return forward.images * forward.height * (1 if forward.layout == "nhwc" else forward.channels)


def flip(phase: PixelPhase, flipped: str, lane: int) -> KernelCall:
    """Return the launch that writes the filter of a phase: taps in reverse, channels and filters swapped."""
    f = phase.forward
    if f.groups > 1:
        return KernelCall(
            Program.of("conv2d_input_gradient/groups_flip.cu", forward=f),
            (blocks(phase.weight_elements, FLIP_THREADS), 1, 1),
            (FLIP_THREADS, 1, 1),
            (Buffer("weight"), Buffer(flipped), phase.sub_filter, f.groups),
            weights_only=True,
            overlap=True,
            lane=lane,
        )
    tiles = ceil_div(f.channels, FLIP_TILE) * ceil_div(f.filters, FLIP_TILE)
    return KernelCall(
        Program.of("conv2d_input_gradient/flip.cu", forward=f, rows=FLIP_ROWS),
        (tiles * phase.taps, 1, 1),
        (FLIP_TILE, FLIP_ROWS, 1),
        (Buffer("weight"), Buffer(flipped), phase.sub_filter),
        weights_only=True,
        overlap=True,
        lane=lane,
    )


def place(problem: Conv2dInputGradientProblem, phase: PixelPhase, source: str, lane: int) -> KernelCall:
    """Return the launch that scatters the results of a phase to dx, applying mask or residual; zeros if it has no
    taps."""
    f, nhwc = phase.forward, phase.forward.layout == "nhwc"
    vector = widest_vector(f.dtype, f.channels) if nhwc else 1
    row_packs = phase.columns.count * (f.channels // vector if nhwc else 1)
    along = min(PLACE_THREADS, 1 << (row_packs - 1).bit_length())
    at_once = PLACE_THREADS // along
    return KernelCall(
        Program.of(
            "conv2d_input_gradient/place.cu",
            forward=f,
            problem=problem,
            phase=phase,
            vector=vector,
        ),
        (ceil_div(place_rows(f) // f.height * phase.rows.count, at_once), 1, 1),
        (along, at_once, 1),
        (
            Buffer(source, optional=phase.taps == 0),
            Buffer(problem.aux, optional=True),
            Buffer("y"),
            phase.places,
        ),
        overlap=True,
        lane=lane,
    )


@dataclass(frozen=True)
class PhaseLaunches:
    """The launches of one phase, which overlap those of the others."""

    number: int
    weight: str
    """Buffer of its filter."""

    @property
    def lane(self) -> int:
        return self.number % LANES

    def over(self, convolution: Recipe, **names: str) -> Recipe:
        """Return a convolution's recipe over dy, the filter and `names`, in this lane and with its own workspaces."""
        tensors = {"x": "gradient", "weight": self.weight, **names}
        scratch = {workspace.name: f"{workspace.name}{self.number}" for workspace in convolution.workspaces}
        return convolution.remap(
            {name: Buffer(buffer) for name, buffer in {**tensors, **scratch}.items()}, self.lane
        )


@dataclass(frozen=True)
class PerPhase(InputGradientRung[C]):
    """One convolution of dy per sub-pixel phase."""

    convolution: str
    """Name of the rung of conv2d."""
    takes_frames = True

    @property
    def inner(self) -> Rung[Conv2dProblem]:
        return Conv2dOperation.ladder.rung(self.convolution).on(self.card)

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.inner.architectures

    def limits(self, problem: Conv2dInputGradientProblem) -> str | None:
        if reason := too_many_phases(self.name, problem.forward):
            return reason
        if place_rows(problem.forward) >= 2**31 - PLACE_THREADS:
            return f"{self.name} counts rows of pixels in 32 bits, not {place_rows(problem.forward)}"
        phases = pixel_phases(problem.forward)
        f = problem.forward
        if f.has_frames and (max(f.frame_stride, *f.stride) > 1 or not phases[0].whole):
            return f"{self.name} takes volumes with stride 1, and padding up to the filter's size"
        met = [phase for phase in phases if phase.taps]
        if not met:
            return f"{self.name} needs a tap; no pixel of this image has one"
        if problem.has_epilogue and len(met) < len(phases):
            return (
                f"{self.name} writes zeros to pixels without a tap, and supports no bias or activation there"
            )
        refusals = (self._phase_refusal(phase) for phase in met)
        refusal = next((reason for reason in refusals if reason), None)
        return refusal and f"as a convolution of the gradient, {refusal}"

    def _phase_refusal(self, phase: PixelPhase) -> str | None:
        try:
            return self.inner.supports(phase.convolution)
        except UnsupportedError as error:
            return str(error)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[C, ...]:
        """Return the configs of the phase with the most taps; the others use the same one if valid."""
        return self.inner.configs(largest_phase(problem).convolution)

    def recipe(self, problem: Conv2dInputGradientProblem, config: C) -> Recipe:
        """Each phase runs in a lane and waits for no other."""
        parts = []
        for number, phase in enumerate(pixel_phases(problem.forward)):
            launches = PhaseLaunches(
                number, f"flipped{number}" if phase.taps and self.flips(phase, config) else "weight"
            )
            if not phase.taps:
                parts.append(Recipe((place(problem, phase, "", launches.lane),)))
                continue
            if launches.weight != "weight":
                workspace = Workspace(launches.weight, phase.forward.element_bytes * phase.weight_elements)
                parts.append(Recipe((flip(phase, launches.weight, launches.lane),), (workspace,)))
            parts.append(self.part(problem, phase, config, launches))
        return Recipe(
            tuple(step for part in parts for step in part.steps),
            tuple(workspace for part in parts for workspace in part.workspaces),
        )

    def flips(self, phase: PixelPhase, config: C) -> bool:
        """Return True if a launch flips the filter; otherwise the kernel reads it in place."""
        return True

    @abstractmethod
    def part(
        self, problem: Conv2dInputGradientProblem, phase: PixelPhase, config: C, launches: PhaseLaunches
    ) -> Recipe:
        """Return the launches from the filter of a phase to its pixels in dx."""

    def estimate(self, problem: Conv2dInputGradientProblem, config: C) -> float | None:
        """Sum up the filter flips and the phases, each of which fills the card."""
        f = problem.forward
        total = self.flip_estimate(problem, config)
        for phase in pixel_phases(f):
            if phase.taps:
                us = self.part_estimate(problem, phase, config)
                if us is None:
                    return None
                total += us
            else:
                total += self.card.microseconds(0, f.element_bytes * phase.elements)
        return total

    def flip_estimate(self, problem: Conv2dInputGradientProblem, config: C) -> float:
        f = problem.forward
        if not self.flips(largest_phase(problem), config):
            return 0.0
        return self.card.microseconds(0, 2 * f.element_bytes * f.weight_elements)

    @abstractmethod
    def part_estimate(
        self, problem: Conv2dInputGradientProblem, phase: PixelPhase, config: C
    ) -> float | None:
        """Estimate the microseconds of a phase without its filter flip."""

    @staticmethod
    def moved(problem: Conv2dInputGradientProblem, phase: PixelPhase) -> int:
        """Return the bytes of a phase by a launch that applies the epilogue and scatters."""
        f = phase.forward
        return f.element_bytes * (
            f.output_elements + phase.weight_elements + (1 + bool(problem.aux)) * phase.elements
        )

    def tolerance(self, problem: Conv2dInputGradientProblem, peer_error: float) -> float:
        """At least that of the convolution's rung."""
        return max(
            super().tolerance(problem, peer_error),
            self.inner.tolerance(largest_phase(problem).convolution, peer_error),
        )


@dataclass(frozen=True)
class AsConvolution(PerPhase):
    """Each phase by an unmodified rung of conv2d; a launch scatters results that are not dx itself."""

    def _config_of(self, convolution: Conv2dProblem, config: C) -> Config:
        offered = _offered(self.inner, convolution)
        return config if config in offered else offered[0]

    def part_estimate(
        self, problem: Conv2dInputGradientProblem, phase: PixelPhase, config: C
    ) -> float | None:
        convolution = phase.convolution
        us = self.inner.estimate(convolution, self._config_of(convolution, config))
        if us is None or (phase.whole and not problem.aux):
            return us
        return us + self.card.microseconds(
            0, phase.forward.element_bytes * (2 + bool(problem.aux)) * phase.elements
        )

    def part(
        self, problem: Conv2dInputGradientProblem, phase: PixelPhase, config: C, launches: PhaseLaunches
    ) -> Recipe:
        convolution = phase.convolution
        inner = self.inner.recipe(convolution, self._config_of(convolution, config))
        result = "y" if phase.whole else f"result{launches.number}"
        inner = launches.over(inner, y=result)
        if phase.whole and not problem.aux:
            return inner
        steps = (*inner.steps, place(problem, phase, result, launches.lane))
        if phase.whole:
            return Recipe(steps, inner.workspaces)
        workspace = Workspace(result, convolution.element_bytes * convolution.output_elements)
        return Recipe(steps, (*inner.workspaces, workspace))


@dataclass(frozen=True)
class GroupedAsConvolution(AsConvolution):
    takes_groups = True


@lru_cache(maxsize=256)
def _offered(rung: Rung[Conv2dProblem], convolution: Conv2dProblem) -> tuple[Config, ...]:
    return rung.configs(convolution)


def largest_phase(problem: Conv2dInputGradientProblem) -> PixelPhase:
    return max(pixel_phases(problem.forward), key=lambda phase: phase.taps)


# Predictions for 128to128_28_k3 at batch 256, 59 GFLOP; flipping the filter adds about 2 us.
RUNGS = (
    AsConvolution(
        "implicit_gemm",
        "a convolution of dy with the flipped filter by conv2d's implicit_gemm; with a stride, one per sub-pixel phase",
        below="shared_tile",
        # direct: two loads per multiply-add reach about 2 TFLOP/s, 30 ms; conv2d's implicit_gemm takes 1.4 ms. Of this
        # factor of 21, shared_tile is expected to gain 2.7.
        predicted_gain=7.8,
        convolution="implicit_gemm",
    ),
    AsConvolution(
        "tensor_core",
        "the same by conv2d's fused_epilogue: fp16, bf16 or TF32 products on tensor cores, in NHWC",
        below="shared_tile",
        # fp16: 140 us of products and 2 us for the filter, against 30 ms of direct. Of this factor of 210, shared_tile
        # is expected to gain 2.7.
        predicted_gain=78.0,
        convolution="fused_epilogue",
    ),
    AsConvolution(
        "tensor_core_split",
        "the same by conv2d's tensor_core_split: fp32 accuracy on tensor cores; an infinity becomes NaN",
        below="implicit_gemm",
        # 1.0 ms of products against 1.4.
        predicted_gain=1.4,
        convolution="tensor_core_split",
    ),
    AsConvolution(
        "tma_wgmma",
        "the same by conv2d's overlapped_store: TMA and wgmma",
        below="tensor_core",
        # 91 us at 650 TFLOP/s and 2 us for the filter, against 142.
        predicted_gain=1.5,
        convolution="overlapped_store",
    ),
)

# Predictions for 144to144_56_k3s1g144 at batch 256 in fp16, 1 GFLOP and 462 MB; the last for 128to128_56_k3s1g32.
GROUPED_RUNGS = (
    GroupedAsConvolution(
        "depthwise",
        "a convolution of dy with the flipped filter by conv2d's depthwise; with a stride, one per sub-pixel phase",
        below="direct",
        # One thread per element of x takes nine 2-byte loads of each tensor for its nine products, 116 M times: 2 G
        # loads at 32 lanes per SM are 0.5 ms. Here 462 MB at 75% of copy bandwidth are 145 us, plus 4 for the filter.
        predicted_gain=3.4,
        convolution="depthwise",
    ),
    GroupedAsConvolution(
        "depthwise_tile",
        "the same by conv2d's depthwise_tile, which reads the gradient once from shared memory",
        below="depthwise",
        # As in conv2d: 135 us instead of 145.
        predicted_gain=1.07,
        convolution="depthwise_tile",
    ),
    GroupedAsConvolution(
        "depthwise_mma",
        "the same by conv2d's depthwise_mma, on tensor cores, for large filters",
        below="depthwise",
        # For 3x3 filters the multiply-adds are hidden behind the copies anyway.
        predicted_gain=1.0,
        convolution="depthwise_mma",
    ),
    GroupedAsConvolution(
        "grouped",
        "the same for groups of several channels, by conv2d's grouped: several groups together on tensor cores",
        below="direct",
        # 7.4 G products of two loads each are 1.8 ms; 205 MB at 60% of copy bandwidth are 85 us.
        predicted_gain=21.0,
        convolution="grouped",
    ),
)
