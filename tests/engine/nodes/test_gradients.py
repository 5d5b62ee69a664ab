"""Operators of training steps: gradients match float64, are computed by kernels where possible, and fused."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.joint import Joint, capture_step
from escalade.engine.graph.forms import InputFormat
from escalade.engine.passes import optimize_step
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.planner import make_plan
from escalade.engine.training.program import ReferenceStep

Loss = Callable[..., torch.Tensor]
_CPU = torch.device("cpu")


class Autoencoder(nn.Module):
    """A small network with pools, two modes of upsampling, and an average."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.third, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.avg_pool2d(F.relu(self.second(x)), 2)
        x = F.interpolate(F.relu(self.third(x)), scale_factor=2)
        return F.interpolate(self.last(x), scale_factor=2, mode="bilinear")


class Residual(nn.Module):
    """A strided block with a shortcut, gates, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.inner = nn.Sequential(
            nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(8, 8, 1, 2, bias=False), nn.BatchNorm2d(8))
        self.gate, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = F.relu(self.inner(x) + self.short(x))
        x = F.silu(x) * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.head(F.hardswish(x).mean((2, 3)))


def planned(model: nn.Module, loss: Loss, *given: torch.Tensor) -> tuple[Joint, Plan, list[torch.Tensor]]:
    """A step's plan and its results."""
    joint = capture_step(model, loss, given[:1], given[1:])
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = [*(state[name].detach() for name in (*joint.parameters, *joint.buffers)), *given]
    bound = {one.name: tensor for one, tensor in zip(joint.graph.inputs, tensors, strict=True)}
    formats = {name: InputFormat.of(tensor) for name, tensor in bound.items()}
    plan = make_plan(optimize_step(joint.graph, {}, {}), "fp32", _CPU, formats, bound=True)
    program = ReferenceStep(plan, ConstantCache("fp32", _CPU, typed=True), bound, lambda: None)
    program.run()
    return joint, plan, list(program.results())


def in_pytorch(plan: Plan) -> set[str]:
    return {step.node.attributes.get("target", step.node.op) for step in plan.fallbacks}


def judged(model: nn.Module, loss: Loss, target: torch.Tensor) -> Plan:
    """A step's plan, whose results match float64."""
    x, exact = torch.randn(2, 3, 16, 16), copy.deepcopy(model).double()
    joint, plan, results = planned(model, loss, x, target)
    expected = loss(exact(x.double()), target.double() if target.is_floating_point() else target)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in exact.named_parameters()}
    state = {**gradients, **dict(exact.named_buffers())}
    torch.testing.assert_close(results[0].double(), expected.detach(), rtol=1e-5, atol=0)
    for name, found in zip((*joint.trained, *joint.changed), results[1:], strict=True):
        wanted = state[name]
        assert wanted is not None
        torch.testing.assert_close(found.to(wanted.dtype), wanted, rtol=1e-3, atol=1e-5)
    return plan


def test_an_autoencoder_is_done_by_kernels() -> None:
    """The pool writes its argmax indices, the weight gradient also the bias gradient; nothing is left of the pool's
    ReLU, and repeated pixels become convolutions by summed filters."""
    torch.manual_seed(0)
    plan = judged(Autoencoder(), F.mse_loss, torch.randn(2, 3, 16, 16))
    assert not in_pytorch(plan)
    assert any(step.node.attributes.get("activation") == "where(residual <= 0, 0, x)" for step in plan.steps)
    besides = [step.side_output.buffer for step in plan.steps if step.side_output is not None]
    assert besides.count("places") == 1 and besides.count("bias_gradient") == 3
    pool = next(step for step in plan.steps if step.node.op == "max_pool2d")
    assert pool.lowered is not None and "behindrelu" in pool.lowered.problem.name
    assert not any("* 1" in step.node.attributes.get("expression", "") for step in plan.steps)
    assert not any("nearest" in step.node.attributes.get("mode", "") for step in plan.steps)
    masks = [step for step in plan.steps if "<= 0" in step.node.attributes.get("expression", "")]
    assert len(masks) == 1  # behind the average
    for step in plan.steps:
        if step.side_output is not None:  # it exists from its producer on, and keeps nothing alive
            maker = next(one for one in plan.steps if one.node.name == step.side_output.node)
            assert plan.steps.index(step) == plan.steps.index(maker) + 1


def test_a_loss_is_one_pass_with_its_gradient() -> None:
    """For every pointwise function whose gradient is a multiple of the incoming gradient."""
    torch.manual_seed(0)
    for loss in (F.mse_loss, F.huber_loss, F.l1_loss, F.binary_cross_entropy_with_logits):
        plan = judged(nn.Conv2d(3, 4, 3), loss, torch.rand(2, 4, 14, 14))
        operators = [step.node.op for step in plan.steps]
        assert operators.count("pointwise_loss") == 1 and not {"pointwise", "reduce"} & set(operators)


def test_a_loss_by_classes_of_pixels_is_one_pass() -> None:
    """Pixels in NHWC are rows of classes. This holds too for narrow logarithms and a wide loss, as under CUDA's
    autocast, and the gradient is then of the original logits."""
    torch.manual_seed(0)
    labels = torch.randint(0, 4, (2, 14, 14))
    labels[0, 3:5] = 2
    loss = partial(F.cross_entropy, ignore_index=2)

    def as_on_cuda(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(F.log_softmax(y, 1).float(), target, ignore_index=2)

    plan = judged(nn.Conv2d(3, 4, 3), loss, labels)
    narrow, x = nn.Conv2d(3, 4, 3).bfloat16(), torch.randn(2, 3, 16, 16).bfloat16()
    _, mixed, (found, *_) = planned(narrow, as_on_cuda, x, labels)
    assert 0 < found < 4
    for each, dtype in ((plan, torch.float32), (mixed, torch.bfloat16)):
        assert not in_pytorch(each)
        (step,) = (step for step in each.steps if step.node.op == "cross_entropy")
        form = each.forms[step.node.name]
        assert (form.layout, form.dtype) == ("nhwc", dtype) and each.forms[step.node.inputs["x"]] == form


def test_operators_of_pytorchs_have_images_in_the_order_that_they_were_captured_with() -> None:
    """The loss's gradient requires PyTorch's layout, pools accept any."""
    torch.manual_seed(0)

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(F.softmax(y, 1).log(), target, reduction="none").mean()

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(5))
    plan = judged(model, loss, torch.randint(0, 4, (2, 5, 5)))
    lying = {
        step.node.attributes["target"]: plan.forms[name].layout
        for step in plan.fallbacks
        for name in step.node.inputs.values()
        if name in plan.forms and plan.forms[name].layout != "flat"
    }
    assert lying["aten::nll_loss2d_forward"] == lying["aten::nll_loss2d_backward"] == "nchw"
    assert lying["aten::adaptive_max_pool2d"] == "nhwc"
    assert plan.forms["nll_loss2d_backward"].layout == "nchw"


def test_a_gradient_that_depends_on_the_loss_comes_behind_it() -> None:
    torch.manual_seed(0)
    judged(nn.Conv2d(3, 4, 3), lambda y, t: F.mse_loss(y, t).sqrt(), torch.rand(2, 4, 14, 14))
    labels = torch.randint(0, 4, (2, 14, 14))
    judged(nn.Conv2d(3, 4, 3), lambda y, t: F.cross_entropy(y.mean((2, 3)), t[:, 0, 0]).sqrt(), labels)


def test_normalization_fuses_its_neighbors() -> None:
    """Fused ReLU and residual; the backward pass recomputes the mask from x."""
    torch.manual_seed(0)
    plan = judged(Residual(), F.cross_entropy, torch.tensor([1, 4]))
    assert in_pytorch(plan) == {"permute", "aten::add.Tensor", "aten::addmm", "aten::mm"}
    names = [
        step.lowered.problem.name
        for step in plan.steps
        if step.lowered is not None and step.node.op.startswith("batch_norm")
    ]
    assert sum(name.endswith("m0.1_relu") for name in names) == 2
    assert sum("_res+relu" in name for name in names) == 1 and sum("_byx" in name for name in names) == 2
    assert all(tensor.numel() == 1 for tensor in plan.graph.constants.values())  # no image of ones
    added = [
        one for one in plan.steps if one.node.op == "conv2d_input_gradient" and "residual" in one.node.inputs
    ]
    assert len(added) == 1


def test_linear_layers_are_convolutions_of_single_pixels() -> None:
    """In 16 bits, with gradients; the bias gradient comes with the weight gradient, and the loss reads the original
    logits.

    The ReLU's input is exact in 16 bits, so its sign does not depend on rounding.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8, bias=False)).bfloat16()
    for parameter in model[0].parameters():
        parameter.data.copy_(torch.randint(-2, 3, parameter.shape) / 4)
    x, target = torch.randint(-2, 3, (5, 16)).bfloat16(), torch.tensor([1, 4, -100, 0, 7])

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(y.to(torch.promote_types(y.dtype, torch.float32)), target)

    def as_on_cuda(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(torch.ops.aten._log_softmax(y.half(), 1, True), target)

    assert not in_pytorch(planned(model, as_on_cuda, x, target)[1])
    joint, plan, (found, *gradients) = planned(model, loss, x, target)
    assert not in_pytorch(plan)
    assert Counter(step.node.op for step in plan.steps if step.lowered) == {
        "conv2d": 2, "cross_entropy": 1, "conv2d_input_gradient": 1, "conv2d_weight_gradient": 2,
        "pointwise": 1,
    }  # fmt: skip
    exact = copy.deepcopy(model).double()
    expected = loss(exact(x.double()), target)
    expected.backward()
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-2, atol=0)
    wanted = dict(exact.named_parameters())
    for name, gradient in zip(joint.trained, gradients, strict=True):
        torch.testing.assert_close(gradient.double(), wanted[name].grad, rtol=2e-2, atol=2e-3)


def test_layers_between_casts_are_narrow() -> None:
    """Autocast upsamples in fp32; for 16-bit inputs and results, kernels do it without casts, and also round once."""

    class Cast(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).bfloat16()
            return F.interpolate(y.float(), scale_factor=2).bfloat16().float()

    _, plan, _ = planned(Cast(3, 8, 1), F.mse_loss, torch.randn(2, 3, 4, 4), torch.randn(2, 8, 8, 8))
    forms = {step.node.op: plan.forms[step.node.name].dtype for step in plan.steps}
    assert forms["upsample2d"] == forms["upsample2d_backward"] == torch.bfloat16
