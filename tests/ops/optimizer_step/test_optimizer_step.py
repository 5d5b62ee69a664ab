"""An optimizer step: its rules beside PyTorch's optimizers, in-place steps, skipped steps, and messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from escalade import ops
from escalade.errors import UnsupportedError
from escalade.ops.expressions import Expression
from escalade.ops.optimizer_step import (
    ADAMW,
    AUTOENCODER,
    OPTIMIZER_STEP,
    RESNET18,
    OptimizerStepProblem,
    Rule,
    adam,
    no_progress,
    rmsprop,
    sgd,
)

STEPS = 4
SHAPES = ((4, 4, 2, 2), (3,), (1027,))
"""As many tensors as the ladder's small problem with a copy and a check, to reuse its kernel."""


def adamw(lr: float = 1e-3, weight_decay: float = 1e-2, **further: Any) -> Rule:
    return adam(lr, weight_decay=weight_decay, decoupled=True, **further)


@pytest.mark.parametrize(
    ("rule", "optimizer", "settings"),
    [
        (sgd, torch.optim.SGD, {"lr": 0.1}),
        (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
        (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
        (adam, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.0, 0.99)}),
        (adam, torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "eps": 1e-3, "maximize": True}),
        (adamw, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        (adamw, torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
        (rmsprop, torch.optim.RMSprop, {"lr": 0.1}),
        (
            rmsprop,
            torch.optim.RMSprop,
            {"lr": 0.1, "momentum": 0.9, "centered": True, "maximize": True, "eps": 1e-3},
        ),
    ],
)
def test_a_rule_is_pytorchs_optimiser(rule: Any, optimizer: Any, settings: dict[str, Any]) -> None:
    mine = rule(**settings)
    values = {"p": torch.randn(257), **{name: torch.zeros(257) for name in mine.state}}
    theirs = values["p"].clone().requires_grad_()
    stepping = optimizer([theirs], foreach=False, **settings)
    scalars = dict(zip(mine.scalar_names, mine.scalars(), strict=True))
    for step in range(1, STEPS + 1):
        gradient = torch.randn(257)
        theirs.grad = gradient.clone()
        stepping.step()
        results = Expression.parse(mine.expression).evaluate(
            {"g": gradient, "step": torch.tensor(float(step)), **values, **scalars}
        )
        values = dict(zip(("p", *mine.state), results, strict=True))
    torch.testing.assert_close(values["p"], theirs.detach(), rtol=2e-6, atol=2e-6)


def model() -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]], list[torch.Tensor]]:
    """Parameters, one with permuted dimensions, with state and copies."""
    parameters = [torch.randn(shape) for shape in SHAPES]
    parameters[0] = parameters[0].contiguous(memory_format=torch.channels_last)
    state = {name: [torch.zeros_like(one) for one in parameters] for name in ("m", "v")}
    return parameters, state, [torch.zeros_like(one, dtype=torch.float16) for one in parameters]


def gradients_like(parameters: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """One not in its parameter's layout, and one misaligned to 16 bytes."""
    made = [(scale * torch.randn(one.shape)).half() for one in parameters]
    made[2] = torch.cat((made[2][:1], made[2]))[1:]
    assert made[2].data_ptr() % 16
    return made


def test_steps_in_place_with_a_loss_scale_are_adamws() -> None:
    rule = ADAMW.scaled(1024.0)
    parameters, state, copies = model()
    theirs = [one.clone().requires_grad_() for one in parameters]
    stepping = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=1e-2, foreach=True)
    scalars, progress = rule.scalars(), no_progress()
    for step in range(STEPS):
        gradients = gradients_like(parameters, 1024.0)
        if step == 1:  # PyTorch's GradScaler would skip it too
            before = [one.clone() for one in (*parameters, *state["v"], *copies)]
            gradients[2][1000] = torch.inf
        versions = [one._version for one in parameters]
        ops.optimizer_step(rule, parameters, gradients, state, scalars, progress, copies=copies, checked=True)
        assert [one._version for one in parameters] == [version + 1 for version in versions]
        if step == 1:
            assert all(map(torch.equal, (*parameters, *state["v"], *copies), before))
            scale = torch.tensor([1024.0])
            torch._amp_update_scale_(scale, torch.zeros(1, dtype=torch.int32), progress[2:3], 2.0, 0.5, 2000)
            assert scale == 512
            continue
        for one, gradient in zip(theirs, gradients, strict=True):
            one.grad = gradient.float() / 1024
        stepping.step()
    for one, other, copy in zip(parameters, theirs, copies, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=2e-6, atol=2e-6)
        assert torch.equal(copy, one.half())
    assert progress.tolist() == [STEPS - 1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("rung", [None, "per_tensor"])
def test_gradients_of_two_types_are_one_step(rung: str | None) -> None:
    """A non-finite gradient of either dtype skips the step for all."""
    rule = sgd(0.1).scaled(8.0)
    before = [torch.randn(size) for size in (1030, 7, 5)]
    gradients = [torch.randn_like(one) for one in before]
    gradients[0] = gradients[0].half()
    for infinite in (None, 0, 2):
        parameters, given = [one.clone() for one in before], [one.clone() for one in gradients]
        if infinite is not None:
            given[infinite][-1] = torch.inf
        ops.optimizer_step(
            rule, parameters, given, {}, rule.scalars(), no_progress(), checked=True, rung=rung
        )
        for one, old, gradient in zip(parameters, before, given, strict=True):
            expected = old if infinite is not None else old - 0.1 * gradient.float() / 8.0
            torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-6)


def test_opcheck() -> None:
    rule = ADAMW.scaled(1024.0)
    parameters, state, copies = model()
    torch.library.opcheck(
        torch.ops.escalade.optimizer_step.default,
        (parameters, gradients_like(parameters, 1.0), [*state["m"], *state["v"]], copies, rule.scalars(),
         no_progress(), rule.expression, list(rule.state), True),
    )  # fmt: skip


def test_what_does_not_fit_is_said() -> None:
    rule = sgd()
    x = torch.randn(8)

    def step(
        p: torch.Tensor = x, g: torch.Tensor = x, scalars: torch.Tensor | None = None, **more: Any
    ) -> None:
        ops.optimizer_step(rule, [p], [g], {}, rule.scalars() if scalars is None else scalars,
                           no_progress(), **more)  # fmt: skip

    with pytest.raises(UnsupportedError, match="requires grad; use torch.no_grad"):
        step(x.clone().requires_grad_())
    with pytest.raises(UnsupportedError, match=r"parameters are torch.float16"):
        step(x.half())
    with pytest.raises(UnsupportedError, match="a gradient of"):
        step(g=x[:4])
    with pytest.raises(UnsupportedError, match="without gaps"):
        step(torch.randn(16)[::2])
    with pytest.raises(UnsupportedError, match="of 1 elements, lr"):
        step(scalars=torch.zeros(2))
    with pytest.raises(UnsupportedError, match="the rule needs none"):
        ops.optimizer_step(rule, [x], [x], {"m": [x]}, rule.scalars(), no_progress())
    with pytest.raises(UnsupportedError, match="has 1 results"):
        OptimizerStepProblem((8,), "p - g", ("m",))
    with pytest.raises(UnsupportedError, match="the form is"):
        OptimizerStepProblem.parse("8[p-g](m)_copyfp8")
    with pytest.raises(UnsupportedError, match="nesterov"):
        sgd(nesterov=True)
    with pytest.raises(UnsupportedError, match="float32 before those of another dtype"):
        ops.optimizer_step(rule, [x, x.clone()], [x, x.half()], {}, rule.scalars(), no_progress())
    with pytest.raises(UnsupportedError, match="2 tensors with fp32 gradients"):
        OptimizerStepProblem((8,), "p-g", wide=2)


def test_a_network_is_one_launch() -> None:
    assert (len(RESNET18), sum(RESNET18), sum(AUTOENCODER)) == (62, 11_689_512, 751_875)
    problem = OptimizerStepProblem(RESNET18, ADAMW.expression, ADAMW.state)
    rung = OPTIMIZER_STEP.ladder.rung("vectorised")
    launches = [len(rung.recipe(one, rung.configs(one)[0]).steps)
                for one in (problem, OptimizerStepProblem((64,) * 1000, ADAMW.expression, ADAMW.state))]  # fmt: skip
    assert launches == [1, 2]
