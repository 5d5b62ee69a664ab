"""The gradient by conv2d's own rungs: a convolution of the output's gradient with the filter turned around."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import element, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import C, Config, Rung
from escalade.ops.conv2d import Conv2d, Conv2dProblem
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.classes import PixelClass, pixel_classes

MOST_CLASSES = 16
"""Classes of pixels at most: each is a few launches."""
LANES = 4
"""Lanes in which classes run side by side."""
FLIP_TILE = 32
FLIP_ROWS = 8
FLIP_THREADS = 256
PLACE_THREADS = 256


def too_many_classes(rung: str, forward: Conv2dProblem) -> str | None:
    """What rungs with a convolution for each class of pixels say to long strides."""
    if forward.stride[0] * forward.stride[1] > MOST_CLASSES:
        return (
            f"{rung} has a convolution for each of stride x stride classes of pixels, {MOST_CLASSES} at most; "
            f"a stride of {forward.stride} has more"
        )
    return None


def place_rows(forward: Conv2dProblem) -> int:
    """Rows of pixels of dx that lie in memory one behind another; in NCHW those of every channel."""
    return forward.batch * forward.height * (1 if forward.layout == "nhwc" else forward.channels)


def flip(one: PixelClass, flipped: str, lane: int) -> KernelCall:
    """The filter of a class: the taps backwards, channels and filters in each other's place."""
    f = one.forward
    if f.groups > 1:
        return KernelCall(
            Program.of(
                "conv2d_input_gradient/groups_flip.cu",
                "conv2d_input_gradient_groups_flip",
                {"Element": element(f.dtype), "NHWC": f.layout == "nhwc"},
            ),
            (blocks(one.weight_elements, FLIP_THREADS), 1, 1),
            (FLIP_THREADS, 1, 1),
            (Buffer("weight"), Buffer(flipped), one.sub_filter, f.groups),
            weights_only=True,
            overlap=True,
            lane=lane,
        )
    constants: dict[str, Constant] = {
        "Element": element(f.dtype),
        "NHWC": f.layout == "nhwc",
        "ROWS": FLIP_ROWS,
    }
    tiles = ceil_div(f.channels, FLIP_TILE) * ceil_div(f.filters, FLIP_TILE)
    return KernelCall(
        Program.of("conv2d_input_gradient/flip.cu", "conv2d_input_gradient_flip", constants),
        (tiles * one.taps, 1, 1),
        (FLIP_TILE, FLIP_ROWS, 1),
        (Buffer("weight"), Buffer(flipped), one.sub_filter),
        weights_only=True,
        overlap=True,
        lane=lane,
    )


def place(problem: Conv2dInputGradientProblem, one: PixelClass, source: str, lane: int) -> KernelCall:
    """The results of a class to their places in dx, through the mask or with the residual if there is one; zeros where
    no tap is met."""
    f, nhwc = one.forward, one.forward.layout == "nhwc"
    vector = widest_vector(f.dtype, f.channels) if nhwc else 1
    constants: dict[str, Constant] = {
        "Element": element(f.dtype),
        "NHWC": nhwc,
        "HAS_MASK": problem.mask,
        "HAS_RESIDUAL": f.residual,
        "NO_SOURCE": one.taps == 0,
        "VECTOR": vector,
    }
    row_packs = one.columns.count * (f.channels // vector if nhwc else 1)
    along = min(PLACE_THREADS, 1 << (row_packs - 1).bit_length())
    at_once = PLACE_THREADS // along
    return KernelCall(
        Program.of("conv2d_input_gradient/place.cu", "conv2d_input_gradient_place", constants),
        (ceil_div(place_rows(f) // f.height * one.rows.count, at_once), 1, 1),
        (along, at_once, 1),
        (
            Buffer(source, optional=one.taps == 0),
            Buffer(problem.aux, optional=True),
            Buffer("y"),
            one.places,
        ),
        overlap=True,
        lane=lane,
    )


@dataclass(frozen=True)
class ClassLaunches:
    """The launches of one class of pixels in a recipe, side by side with the other classes'."""

    number: int
    weight: str
    """The buffer of its filter."""

    @property
    def lane(self) -> int:
        return self.number % LANES

    def over(self, convolution: Recipe, **names: str) -> Recipe:
        """A convolution's recipe over the gradient, the filter and what is named besides, in this lane; its scratch
        memory is the class's own."""
        tensors = {"x": "gradient", "weight": self.weight, **names}
        scratch = {workspace.name: f"{workspace.name}{self.number}" for workspace in convolution.workspaces}
        return convolution.remap(
            {name: Buffer(buffer) for name, buffer in {**tensors, **scratch}.items()}, self.lane
        )


@dataclass(frozen=True)
class ByClasses(Rung[Conv2dInputGradientProblem, C]):
    """A convolution of the gradient for each class of pixels."""

    convolution: str
    """The rung of conv2d that does it."""
    takes_groups: ClassVar[bool] = False

    @property
    def inner(self) -> Rung[Conv2dProblem]:
        return Conv2d.ladder.rung(self.convolution).on(self.card)

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.inner.architectures

    def supports(self, problem: Conv2dInputGradientProblem) -> str | None:
        if problem.forward.groups != 1 and not self.takes_groups:
            return f"{self.name} takes groups=1, not {problem.forward.groups}; direct takes any"
        sentence = too_many_classes(self.name, problem.forward)
        if sentence is not None:
            return sentence
        if place_rows(problem.forward) >= 2**31 - PLACE_THREADS:
            return f"{self.name} counts rows of pixels in 32 bits; {place_rows(problem.forward)} are too many"
        classes = pixel_classes(problem.forward)
        met = [one for one in classes if one.taps]
        if not met:
            return f"{self.name} convolves, but no tap of the filter meets a pixel of the image here"
        if problem.has_epilogue and len(met) < len(classes):
            return f"{self.name} leaves zeros where no tap of the filter meets a pixel, without bias and activation"
        refusals = (self._class_refusal(one) for one in met)
        refusal = next((sentence for sentence in refusals if sentence), None)
        return refusal and f"as a convolution of the gradient, {refusal}"

    def _class_refusal(self, one: PixelClass) -> str | None:
        try:
            return self.inner.supports(one.convolution)
        except UnsupportedError as error:
            return str(error)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[C, ...]:
        """The configs of the class with the most taps; the others follow it where they can."""
        return self.inner.configs(largest_class(problem).convolution)

    def recipe(self, problem: Conv2dInputGradientProblem, config: C) -> Recipe:
        """Each class from start to end in a lane, which waits for no other."""
        parts = []
        for number, one in enumerate(pixel_classes(problem.forward)):
            launches = ClassLaunches(
                number, f"flipped{number}" if one.taps and self.flips(one, config) else "weight"
            )
            if not one.taps:
                parts.append(Recipe((place(problem, one, "", launches.lane),)))
                continue
            if launches.weight != "weight":
                room = Workspace(launches.weight, one.forward.element_bytes * one.weight_elements)
                parts.append(Recipe((flip(one, launches.weight, launches.lane),), (room,)))
            parts.append(self.part(problem, one, config, launches))
        return Recipe(
            tuple(step for part in parts for step in part.steps),
            tuple(workspace for part in parts for workspace in part.workspaces),
        )

    def flips(self, one: PixelClass, config: C) -> bool:
        """Whether a launch turns the filter of a class around, which is read as it lies otherwise."""
        return True

    @abstractmethod
    def part(
        self, problem: Conv2dInputGradientProblem, one: PixelClass, config: C, launches: ClassLaunches
    ) -> Recipe:
        """What takes a class from its filter to its places in dx."""

    def estimate(self, problem: Conv2dInputGradientProblem, config: C) -> float | None:
        """Filters turned around side by side, then class after class: each fills the card."""
        f = problem.forward
        total = self.flip_estimate(problem, config)
        for one in pixel_classes(f):
            if one.taps:
                us = self.part_estimate(problem, one, config)
                if us is None:
                    return None
                total += us
            else:
                total += self.card.microseconds(0, f.element_bytes * one.elements)
        return total

    def flip_estimate(self, problem: Conv2dInputGradientProblem, config: C) -> float:
        f = problem.forward
        if not self.flips(largest_class(problem), config):
            return 0.0
        return self.card.microseconds(0, 2 * f.element_bytes * f.weight_elements)

    @abstractmethod
    def part_estimate(self, problem: Conv2dInputGradientProblem, one: PixelClass, config: C) -> float | None:
        """An estimate for a class without its filter."""

    @staticmethod
    def moved(problem: Conv2dInputGradientProblem, one: PixelClass) -> int:
        """Bytes of a class, by a launch that masks or adds, and places."""
        f = one.forward
        return f.element_bytes * (
            f.output_elements + one.weight_elements + (1 + bool(problem.aux)) * one.elements
        )

    def tolerance(self, problem: Conv2dInputGradientProblem, peer_error: float) -> float:
        """What the convolution's rung rounds beyond a plain sum is allowed here too."""
        return max(
            super().tolerance(problem, peer_error),
            self.inner.tolerance(largest_class(problem).convolution, peer_error),
        )


@dataclass(frozen=True)
class AsConvolution(ByClasses):
    """Each class by a rung of conv2d as it is; results that are not dx as they lie are placed by a launch of their
    own."""

    def _config_of(self, convolution: Conv2dProblem, config: C) -> Config:
        offered = _offered(self.inner, convolution)
        return config if config in offered else offered[0]

    def part_estimate(self, problem: Conv2dInputGradientProblem, one: PixelClass, config: C) -> float | None:
        convolution = one.convolution
        us = self.inner.estimate(convolution, self._config_of(convolution, config))
        if us is None or (one.whole and not problem.aux):
            return us
        return us + self.card.microseconds(
            0, one.forward.element_bytes * (2 + bool(problem.aux)) * one.elements
        )

    def part(
        self, problem: Conv2dInputGradientProblem, one: PixelClass, config: C, launches: ClassLaunches
    ) -> Recipe:
        convolution = one.convolution
        inner = self.inner.recipe(convolution, self._config_of(convolution, config))
        result = "y" if one.whole else f"result{launches.number}"
        inner = launches.over(inner, y=result)
        if one.whole and not problem.aux:
            return inner
        steps = (*inner.steps, place(problem, one, result, launches.lane))
        if one.whole:
            return Recipe(steps, inner.workspaces)
        room = Workspace(result, convolution.element_bytes * convolution.output_elements)
        return Recipe(steps, (*inner.workspaces, room))


@lru_cache(maxsize=256)
def _offered(rung: Rung[Conv2dProblem], convolution: Conv2dProblem) -> tuple[Config, ...]:
    return rung.configs(convolution)


def largest_class(problem: Conv2dInputGradientProblem) -> PixelClass:
    return max(pixel_classes(problem.forward), key=lambda one: one.taps)


# Predictions for 128to128_28_k3 at batch 256, 59 GFLOP; turning the filter around adds about 2 us.
RUNGS = (
    AsConvolution(
        "implicit_gemm",
        "a convolution of the gradient with the filter turned around, by conv2d's implicit_gemm; with a stride, one "
        "for each class of pixels that meet the same taps",
        below="shared_tile",
        # direct: two loads for a multiply-add come to about 2 TFLOP/s, 30 ms; conv2d's implicit_gemm takes 1.4 ms. Of
        # these 21 times, shared_tile is expected to gain 2.7.
        predicted_gain=7.8,
        convolution="implicit_gemm",
    ),
    AsConvolution(
        "tensor_core",
        "the same by conv2d's fused_epilogue: fp16, bf16 or TF32 products on tensor cores, in NHWC",
        below="shared_tile",
        # fp16: 140 us of products and 2 us for the filter, against 30 ms of direct. Of these 210 times, shared_tile is
        # expected to gain 2.7.
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
        "the same by conv2d's overlapped_store: Hopper's own copies and products",
        below="tensor_core",
        # 91 us at 650 TFLOP/s and 2 us for the filter, against 142.
        predicted_gain=1.5,
        convolution="overlapped_store",
    ),
)
