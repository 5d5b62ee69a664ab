"""Results by definition, in float64 and by elementary operations alone.

PyTorch's kernels handle NaN, infinities and padding differently per processor: vectorized functions have their own
limits, and some convolutions skip the zeros of the padding where others multiply by them. Sums here are of products
formed one by one; whether a sum contains a NaN, or infinities of one or both signs, does not depend on its order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    groups: int = 1,
    *,
    padding_is_multiplied: bool = False,
) -> torch.Tensor:
    """Return the convolution of x [N, C, H, W] and weight [K, C / groups, R, S].

    Padding adds nothing, unless it is multiplied as zeros, which turn infinite weights into NaN.
    """
    x, weight = x.double(), weight.double()
    channels, filters = x.shape[1] // groups, weight.shape[0] // groups
    y = []
    for group in range(groups):
        pixels = x[:, group * channels : (group + 1) * channels]
        terms = [
            torch.where(
                inside | padding_is_multiplied,
                seen[:, None] * weight[group * filters : (group + 1) * filters, :, r, s, None, None],
                0.0,
            ).sum(2)
            for r, s, seen, inside in _windows(pixels, (weight.shape[2], weight.shape[3]), stride, padding)
        ]
        y.append(torch.stack(terms).sum(0))
    result = torch.cat(y, 1)
    return result if bias is None else result + bias.double().view(-1, 1, 1)


def weight_gradient(
    x: torch.Tensor, gradient: torch.Tensor, size: int, stride: int, padding: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a convolution's weights and bias; pixels outside the image add nothing."""
    gradient = gradient.double()
    of_weight = torch.zeros(gradient.shape[1], x.shape[1], size, size, dtype=torch.float64)
    for r, s, seen, inside in _windows(x.double(), (size, size), (stride, stride), (padding, padding)):
        products = torch.where(inside, gradient[:, :, None] * seen[:, None], 0.0)
        of_weight[:, :, r, s] = products.sum((0, 3, 4))
    return of_weight, gradient.sum((0, 2, 3))


def _windows(
    x: torch.Tensor, size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Yield each tap of a filter: its row and column, the pixels it covers, and which of them are inside the image."""
    images, channels, height, width = x.shape
    high, wide = height + 2 * padding[0], width + 2 * padding[1]
    padded, within = x.new_zeros(images, channels, high, wide), torch.zeros(high, wide, dtype=torch.bool)
    inner = (slice(padding[0], padding[0] + height), slice(padding[1], padding[1] + width))
    padded[:, :, inner[0], inner[1]] = x
    within[inner] = True
    for r in range(size[0]):
        for s in range(size[1]):
            rows = slice(r, high - size[0] + r + 1, stride[0])
            columns = slice(s, wide - size[1] + s + 1, stride[1])
            yield r, s, padded[:, :, rows, columns], within[rows, columns]


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the fully connected layer of rows x [N, C] and weight [K, C]."""
    y = (x.double()[:, None] * weight.double()[None]).sum(2)
    return y if bias is None else y + bias.double()


def relu(x: torch.Tensor, limit: float = math.inf) -> torch.Tensor:
    """NaN stays, since no comparison with it holds."""
    x = x.double()
    x = torch.where(x < 0, 0.0, x)
    return torch.where(x > limit, limit, x)


def max_pool_gradient(
    x: torch.Tensor, gradient: torch.Tensor, size: int, stride: int, padding: int, *, mask: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a maximum's input, and each maximum's index in its window: the first of equals, the last
    NaN.

    With a mask, nonpositive maxima get no gradient, and their index is 255.
    """
    best = torch.full(gradient.shape, -math.inf, dtype=torch.float64)
    places = torch.full(gradient.shape, -1)
    taps = list(_windows(x.double(), (size, size), (stride, stride), (padding, padding)))
    for r, s, seen, inside in taps:
        better = inside & ((places < 0) | (seen > best) | seen.isnan())
        best, places = torch.where(better, seen, best), torch.where(better, r * size + s, places)
    if mask:
        places = torch.where(best <= 0, 255, places)
    high, wide = (length + 2 * padding for length in x.shape[2:])
    padded = torch.zeros(*x.shape[:2], high, wide, dtype=torch.float64)
    for r, s, _, _ in taps:
        of_tap = padded[:, :, r : high - size + r + 1 : stride, s : wide - size + s + 1 : stride]
        of_tap += torch.where(places == r * size + s, gradient.double(), 0.0)
    return padded[:, :, padding : high - padding, padding : wide - padding], places.to(torch.uint8)


def max_pool(
    x: torch.Tensor, size: int, stride: int, padding: int = 0, ceil_mode: bool = False
) -> torch.Tensor:
    """Return the maximum of each window, or NaN if it contains one; padding is smaller than any number."""
    x = x.double()
    images, channels, height, width = x.shape

    def steps(extent: int) -> int:
        span = extent + 2 * padding - size
        count = (-(-span // stride) if ceil_mode else span // stride) + 1
        return count - (ceil_mode and (count - 1) * stride >= extent + padding)

    y = torch.full((images, channels, steps(height), steps(width)), -math.inf, dtype=torch.float64)
    for p in range(y.shape[2]):
        for q in range(y.shape[3]):
            best = y[:, :, p, q]
            for h in range(max(0, p * stride - padding), min(height, p * stride - padding + size)):
                for w in range(max(0, q * stride - padding), min(width, q * stride - padding + size)):
                    seen = x[:, :, h, w]
                    best = torch.where((seen > best) | seen.isnan(), seen, best)
            y[:, :, p, q] = best
    return y


def mean(x: torch.Tensor, dimensions: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(x.shape[dimension] for dimension in dimensions)
    return x.double().sum(dimensions) / count


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax of each row; all NaN if a row contains NaN, +infinity, or only -infinity."""
    x = x.double()
    rows = []
    for row in x.reshape(-1, x.shape[-1]).tolist():
        largest = -math.inf if any(map(math.isnan, row)) else max(row)
        if math.isinf(largest):
            rows.append([math.nan] * len(row))
            continue
        powers = [math.exp(value - largest) for value in row]
        total = math.fsum(powers)
        rows.append([power / total for power in powers])
    return torch.tensor(rows, dtype=torch.float64).view(x.shape)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return x times the normal CDF of x; by tanh, PyTorch's approximation of that name.

    Minus infinity gives NaN: it is multiplied by 0.
    """

    def one(value: float) -> float:
        if approximate == "tanh":
            inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value * value * value)
            return 0.5 * value * (1 + math.tanh(inner))
        return 0.5 * value * math.erfc(-value / math.sqrt(2))

    return torch.tensor([one(value) for value in x.double().flatten().tolist()], dtype=torch.float64).view(
        x.shape
    )


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest FP8 codes, ties to even; above 448 the largest, and 0x7F for a NaN."""
    positive = [_e4m3_value(code) for code in range(0x7F)]
    middles = torch.tensor(
        [(low + high) / 2 for low, high in itertools.pairwise(positive)], dtype=torch.float64
    )
    size = x.double().abs()
    below, above = torch.searchsorted(middles, size), torch.searchsorted(middles, size, right=True)
    code = torch.where(below % 2 == 0, below, above)  # they differ if x is a midpoint
    signed = code + 0x80 * torch.signbit(x.double())
    return torch.where(x.isnan(), 0x7F, signed).to(torch.uint8)


def _e4m3_value(code: int) -> float:
    """Decode four exponent bits and three mantissa bits; subnormals have no hidden bit."""
    exponent, mantissa = code >> 3, code & 7
    return (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
