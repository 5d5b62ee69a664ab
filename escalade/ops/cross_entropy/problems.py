"""The problems of cross_entropy: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.cross_entropy.problem import CrossEntropyProblem

PROBLEMS = (
    *(
        CrossEntropyProblem(batch, 1000, smoothing=0.1, ignored=-100, gradient=gradient)
        for batch in (256, 65_536)
        for gradient in (False, True)
    ),
    *(CrossEntropyProblem(1 << 20, classes, ignored=-100, gradient=True) for classes in (2, 21)),
)
"""A batch of ImageNet's, as many rows as the pixels or words of one, and the pixels of images by few classes."""

SMALL_PROBLEMS = (
    CrossEntropyProblem(5, 1000, ignored=-100, gradient=True),
    CrossEntropyProblem(70, 24, "sum", smoothing=0.1, gradient=True),
    CrossEntropyProblem(3, 33, smoothing=0.2, ignored=2),
    CrossEntropyProblem(600, 10, ignored=-1),
    CrossEntropyProblem(1, 33_002, gradient=True),
    CrossEntropyProblem(4, 1, "sum"),
    CrossEntropyProblem(130, 21, smoothing=0.1, ignored=-100, gradient=True),
)
"""Small problems that between them have rows of a part of a warp, of one, of several, and too wide for registers;
widths that no vector divides; rows that do not count, few and many; both reductions."""
