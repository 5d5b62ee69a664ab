"""Draws networks from seeds."""

from __future__ import annotations

import random
import re

import torch

from tests.random_models.draft import SMALL, Draft, Rule, Sizes, known
from tests.random_models.program import Input, Text
from tests.random_models.rules import RULES

MOST_USES = 2
"""Limit on the uses of one rule in one network."""


def draw(seed: int, sizes: Sizes = SMALL, training: bool = False) -> Text:
    """The network of a seed."""
    chance = random.Random(seed)
    draft = Draft(
        Text(seed, _start(chance, sizes), training=training, on_host=seed % 3 == 0 and not training),
        chance,
        sizes,
    )
    begun = known(draft.text)
    assert begun is not None
    draft.values = begun
    themes = chance.sample(list(RULES), 4)
    offered = [*RULES["layers"], *(rule for theme in themes for rule in RULES[theme] * 2)]
    wanted = chance.randint(*sizes.statements)
    used: dict[Rule, int] = {}
    for _ in range(6 * wanted):
        # The first statement has weights: so there is something to train, and a kernel to run.
        rule = chance.choice(RULES["weights"] if not draft.text.body else offered)
        if used.get(rule, 0) < MOST_USES and draft.grow(rule):
            used[rule] = used.get(rule, 0) + 1
        if sum(used.values()) == wanted:
            break
    return _finish(draft)


def _start(chance: random.Random, sizes: Sizes) -> tuple[Input, ...]:
    """The inputs: an image, and sometimes a second one, rows or labels."""
    image = Input("x", (chance.choice(sizes.channels), *chance.choice(sizes.images)))
    match chance.randrange(6):
        case 0:
            return image, Input("z", image.size)
        case 1:
            return image, Input("z", (chance.choice(sizes.features),))
        case 2:
            return image, Input("mask", image.size[1:], torch.bool)
        case 3:
            return (Input("x", (chance.choice(sizes.channels), chance.choice(sizes.features))),)
        case _:
            return (image,)


def _finish(d: Draft) -> Text:
    """Choose the results: all unread values, and sometimes a view, an input, or the same value twice."""
    body = "\n".join(d.text.body)
    given = {each.name for each in d.text.inputs}
    unread = [v.name for v in d.values if v.name not in given and _reads(body, v.name) == 0]
    results = unread or [d.values[-1].name]
    made = [v for v in d.values if v.name not in given] or d.values
    further = d.random.choice(made)
    match d.random.randrange(8):
        case 0:
            results.append(results[0])
        case 1:
            results.append(d.text.inputs[0].name)
        case 2 if further.size:
            results.append(f"{further}[:, -1:]" if further.lead else f"{further}[-1:]")
        case 3:
            results.append(f"{further}.flatten(1)" if further.lead and further.size else further.name)
    if d.text.training:  # gradients of values that are also read further on have a sum
        read = [v for v in made if v.name not in results]
        for tapped in d.random.sample(read, min(len(read), d.random.randrange(3))):
            is_image = tapped.lead and len(tapped.size) == 3
            results.append(
                f"{tapped}.permute(0, 2, 3, 1)" if is_image and d.random.random() < 0.5 else tapped.name
            )
    if len(results) == 1:
        return d.text.returning(results[0])
    if d.random.random() < 0.3:
        return d.text.returning("{" + ", ".join(f"'r{n}': {r}" for n, r in enumerate(results)) + "}")
    return d.text.returning(f"({', '.join(results)})")


def _reads(body: str, name: str) -> int:
    """Count the uses of a name, excluding assignments."""
    count = 0
    for line in body.splitlines():
        _, sign, right = line.partition(" = ")
        text = right if sign else line
        count += len(re.findall(rf"\b{name}\b", text))
    return count
