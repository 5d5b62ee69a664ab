"""The likeliest classes as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.shared.rows import check_fields
from escalade.ops.softmax.problem import softmax_rounding

MOST_K = 32
MOST_CLASSES = 2**24 - 1
"""The largest number of classes: up to here every class number is an fp32 number."""
STEP = 1 / 16
"""The step between one logit and the next of the random inputs."""


@dataclass(frozen=True)
class TopKProblem(Named):
    """y[row] = the k largest of softmax(x[row]) in falling order, then their k classes.

    x is [batch][classes], y [batch][2 * k] in fp32 whatever x is. Classes are ranked by their logits, which softmax
    leaves in order: NaN first, as in torch.topk, and of equal ones the lower class.
    """

    NAME: ClassVar = NamePattern(
        "top_k",
        "{classes}_k{k}_b{batch}",
    )

    batch: int
    classes: int
    k: int
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        check_fields("top_k", self, DTYPES, {"classes": self.classes, "k": self.k})
        if self.k > min(MOST_K, self.classes):
            raise UnsupportedError(
                f"k of {self.k}: top_k finds up to {MOST_K}, and no more than there are classes ({self.classes})"
            )
        if self.classes > MOST_CLASSES:
            raise UnsupportedError(
                f"{self.classes} classes: top_k numbers them in fp32, which takes {MOST_CLASSES} at most"
            )

    @property
    def flops(self) -> int:
        """A comparison with the largest and one with the k-th, a difference, an exponential and an addition."""
        return 5 * self.batch * self.classes

    @property
    def bytes(self) -> int:
        return self.batch * (self.classes * ELEMENT_BYTES[self.dtype] + 2 * self.k * 4)

    @property
    def rounding(self) -> float:
        """Errors are taken relative to the whole of y, but only the probabilities have any: class numbers are exact.

        So it is a probability's error, scaled down by how much larger the class numbers are: then a probability that is
        wrong by a thousandth is out of bounds, and a class that is wrong by one all the more. The inputs' logits are
        STEP apart, which makes the probabilities a geometric row, and their classes random.
        """
        shares = [math.exp(-STEP * i) for i in range(min(self.classes, 512))]
        probabilities = math.sqrt(sum((share / sum(shares)) ** 2 for share in shares[: self.k]))
        numbers = math.sqrt(self.k / 3) * self.classes / 2
        return softmax_rounding(self.classes) * probabilities / math.hypot(numbers, probabilities)
