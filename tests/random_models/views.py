"""Small networks in which PyTorch's steps, views of their results, and kernels follow each other in every order.

PyTorch's allocator places the results of PyTorch's steps in a plan, and a view of one is a pointer into that memory
with other strides. A kernel that reads such a view must find it at every run, at an address that it can load from,
in memory that is still allocated.
"""

from __future__ import annotations

import random
from itertools import product

from tests.random_models.program import Input, Text

SIZE = (8, 6, 6)
"""Shape of the input and of every source, without the batch."""
SOURCES = {
    "input": "x",
    "kernel": "F.relu(x) + 1",
    "convolution": "self.source(x)",
    "cumsum": "x.cumsum(1)",
    "sort": "x.sort(-1).values",
    "unknown": "torch.logcumsumexp(x, 2)",
    "mask": "(~torch.zeros(x.shape[0], 8, 6, 6, dtype=torch.bool{device})).cumsum(1, dtype=torch.float32)",
    "zeros": "torch.zeros(x.shape[0], 8, 6, 6{device}) + self.table",
    "pytorch behind a kernel": "F.silu(x).cumsum(1)",
    "kernel behind pytorch": "F.relu(x.cumsum(2)) + 0.5",
}
"""Viewed values: computed by PyTorch, by a kernel, from constants, or passed by the caller."""
VIEWS = {
    "whole": "{s}",
    "first": "{s}[:, :1]",
    "last": "{s}[:, -1:]",
    "middle": "{s}[:, 3:6]",
    "rows": "{s}[:, :, 1:]",
    "last row": "{s}[:, :, -1:]",
    "last column": "{s}[..., -1:]",
    "step": "{s}[..., ::2]",
    "of a view": "{s}[:, -2:][..., 1:]",
    "permuted": "{s}.permute(0, 2, 3, 1)",
    "transposed": "{s}.transpose(2, 3)",
    "expanded": "{s}[:, 2:3].expand(-1, 8, -1, -1)",
    "selected": "{s}[:, 3]",
    "selected row": "{s}.select(2, -1)",
    "flat": "{s}.flatten(2)",
    "flat part": "{s}.flatten(1)[:, 7:]",
    "joined": "torch.cat([{s}, {s}[:, :3]], 1)",
    "part of a join": "torch.cat([{s}, x], 1)[:, 5:11]",
    "chunk": "{s}.chunk(2, 1)[1]",
    "one item": "{s}[-1:]",
}
CONSUMERS = {
    "quotient": "{s} / ({v}.abs() + 1.0) * 6.283185307179586",
    "pointwise": "torch.sigmoid({v}) * 2",
    "convolution": "self.{m}({v})",
    "mean": "{v}.mean(-1)",
    "softmax": "F.softmax({v}, -1)",
    "linear": "self.{m}({v})",
    "cumsum": "{v}.cumsum(-1)",
    "result": "{v}",
    "twice": "torch.tanh({v} + 1) * {v}.amax(-1, keepdim=True)",
    "joined": "torch.cat([F.relu({v}), {v}], 1)",
    "pytorch behind a kernel": "torch.tanh({v}).cumsum(1)",
}
_FALLBACK = "pointwise"
_SIZES: dict[str, tuple[int, ...]] = {
    "first": (1, 6, 6), "last": (1, 6, 6), "middle": (3, 6, 6), "rows": (8, 5, 6), "last row": (8, 1, 6),
    "last column": (8, 6, 1), "step": (8, 6, 3), "of a view": (2, 6, 5), "selected": (6, 6), "selected row": (8, 6),
    "flat": (8, 36), "flat part": (281,), "joined": (11, 6, 6), "part of a join": (6, 6, 6), "chunk": (4, 6, 6),
    "permuted": (6, 6, 8),
}  # fmt: skip
"""Sizes after the batch, if they differ from the source's."""


def network(links: list[tuple[str, str, str]], seed: int = 0) -> Text:
    """A network with one such chain after another, each a source, a view and a consumer by name."""
    modules = [
        "self.source = nn.Conv2d(8, 8, 3, padding=1)",
        'self.register_buffer("table", torch.rand(6))',
    ]
    on_host = seed % 2 == 0
    device = "" if on_host else ", device=x.device"
    body, results = [], []
    for number, (source, view, consumer) in enumerate(links):
        size = _SIZES.get(view, SIZE)
        consumer = _fitting(consumer, view, size)
        made = CONSUMERS[consumer]
        if consumer == "convolution":
            modules.append(f"self.m{number} = nn.Conv2d({size[0]}, 8, 3, padding=1)")
        elif consumer == "linear":
            modules.append(f"self.m{number} = nn.Linear({size[-1]}, 8)")
        names = {"s": f"s{number}", "v": f"v{number}", "m": f"m{number}"}
        body += [
            f"s{number} = {SOURCES[source].format(device=device)}",
            f"v{number} = {VIEWS[view].format(**names)}",
            f"r{number} = {made.format(**names)}",
        ]
        results.append(f"r{number}")
    result = results[0] if len(results) == 1 else f"({', '.join(results)})"
    given = Input("x", SIZE)
    return Text(seed, (given,), tuple(modules), tuple(body), result, on_host=on_host)


def _fitting(consumer: str, view: str, size: tuple[int, ...]) -> str:
    """The consumer, or one that supports any size."""
    if consumer == "convolution" and len(size) != 3:
        return _FALLBACK
    if consumer == "quotient" and view not in (
        "whole",
        "first",
        "last",
        "last row",
        "last column",
        "expanded",
        "one item",
        "transposed",
    ):
        return _FALLBACK
    return consumer


PAIRS = tuple(product(SOURCES, VIEWS))
COUNT = len(PAIRS) * len(CONSUMERS)
"""Combinations of a source, a view and a consumer."""


def numbered(number: int) -> Text:
    """One combination. Any `len(PAIRS)` consecutive numbers combine every source with every view."""
    turn, pair = divmod(number % COUNT, len(PAIRS))
    consumers = list(CONSUMERS)
    # Neighboring pairs get different consumers, and so does one pair in another turn.
    return network([(*PAIRS[pair], consumers[(pair + pair // len(VIEWS) + turn) % len(consumers)])], number)


def drawn(seed: int, links: int) -> Text:
    """Several combinations in one network, each after the one before it."""
    chance = random.Random(seed)
    chains = [(*chance.choice(PAIRS), chance.choice(list(CONSUMERS))) for _ in range(links)]
    return network(chains, seed)
