"""The problems of copy: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.copy.problem import CopyProblem, Part
from escalade.ops.shared.pointwise import dense_strides


def permuted(sizes: tuple[int, ...], order: tuple[int, ...]) -> CopyProblem:
    """The problem of a dense tensor whose dimensions are put into another order."""
    strides = dense_strides(sizes)
    turned = tuple(sizes[axis] for axis in order)
    part = Part(0, turned, tuple(strides[axis] for axis in order), dense_strides(turned))
    return CopyProblem.of(part.elements, [part])


def joined(rows: int, widths: tuple[int, ...]) -> CopyProblem:
    """The problem of several matrices side by side."""
    whole = sum(widths)
    parts = [
        Part(number, (rows, width), (width, 1), (whole, 1), 0, sum(widths[:number]))
        for number, width in enumerate(widths)
    ]
    return CopyProblem.of(rows * whole, parts)


def rolled(sizes: tuple[int, int, int], down: int, along: int) -> CopyProblem:
    """The problem of an image in NHWC whose rows and columns go round by so many."""
    rows, columns, channels = sizes
    parts = []
    for first_row, last_row in ((0, rows - down), (rows - down, rows)):
        for first, last in ((0, columns - along), (columns - along, columns)):
            to = (first_row + down) % rows * columns + (first + along) % columns
            box = (last_row - first_row, last - first, channels)
            steps = (columns * channels, channels, 1)
            parts.append(Part(0, box, steps, steps, (first_row * columns + first) * channels, to * channels))
    return CopyProblem.of(rows * columns * channels, parts)


PROBLEMS = (
    permuted((32, 196, 512), (0, 2, 1)),
    permuted((8, 8, 7, 8, 7, 96), (0, 1, 3, 2, 4, 5)),
    rolled((56 * 8, 56, 96), 3, 3),
    joined(56 * 56 * 32, (13, 11)),
)
"""What `escalade ladder copy` measures: tokens as channels, an image cut into windows, one that goes round, and
channels of odd numbers side by side."""

SMALL_PROBLEMS = (
    permuted((2, 33, 72), (0, 2, 1)),
    permuted((2, 3, 16, 5, 24), (3, 0, 4, 1, 2)),
    permuted((3, 2, 4, 5, 16), (0, 2, 1, 3, 4)),
    permuted((5, 3, 7), (2, 1, 0)),
    rolled((6, 5, 8), 2, 3),
    rolled((3, 4, 3), 1, 1),
    joined(20, (1, 1)),
    joined(7, (3, 8, 13)),
    CopyProblem.of(2 * 40 * 40, [
        Part(0, (40, 40), (1, 40), (40, 1), 0, 0), Part(1, (40, 40), (2, 90), (40, 1), 6, 1600),
    ]),
    CopyProblem.of(2 * 48 * 64, [
        Part(0, (48, 64), (1, 48), (64, 1)), Part(1, (48, 64), (1, 56), (64, 1), 8, 3072),
    ]),
    CopyProblem.of(6 * 16, [Part(0, (6, 16), (-16, 1), (16, 1), 80)]),
    CopyProblem.of(5 * 12, [Part(0, (5, 12), (0, -1), (12, 1), 11)]),
    CopyProblem.of(24 * 48, [Part(0, (24, 48), (1, 24), (48, 1))], aligned=2),
    CopyProblem.of(24 * 40, [Part(0, (24, 40), (80, 1), (40, 1))], aligned=1),
)  # fmt: skip
"""Small problems that between them have dimensions in many orders, several parts and sources, edges of tiles, strides
of 0 and below, and buffers that begin at any element."""
