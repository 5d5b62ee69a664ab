"""PyTorch's operators return the same through the engine's calls for operands of any strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import escalade
from escalade.engine.graph.aten import (
    _PURE_OPERATORS,
    OperatorError,
    _is_pointwise,
    has_rows,
    memory_order,
    to_memory_order,
)
from escalade.engine.graph.graph import Reference, map_leaves
from escalade.engine.nodes.aten import results_of

Function = Callable[[torch.Tensor], torch.Tensor]
CHANNELS = 4
_BY_STRIDES = (
    "as_strided",
    "empty",
    "new_empty",
    "resize",
    "set_",
    "rand",
    "bernoulli",
    "multinomial",
    "normal",
)


class _Recorder(TorchDispatchMode):
    """Records one call of each operator with its operands, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[torch._ops.OpOverload, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "aten" and function not in self.calls:
            names = [argument.name for argument in function._schema.arguments]
            self.calls[function] = _referring(dict(zip(names, args, strict=False)) | kwargs)
        return function(*args, **kwargs)


def _referring(bound: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    inputs: dict[str, torch.Tensor] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        inputs[f"in{len(inputs)}"] = value.detach().clone(memory_format=torch.contiguous_format)
        return Reference(f"in{len(inputs) - 1}")

    return map_leaves(leaf, bound), inputs


LAYERS: tuple[Callable[[], Function], ...] = (
    lambda: nn.Conv2d(CHANNELS, 6, 3),
    lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS),
    lambda: nn.ConvTranspose2d(CHANNELS, 6, 2, stride=2),
    lambda: nn.GroupNorm(2, CHANNELS),
    lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    lambda: nn.BatchNorm2d(CHANNELS),
    lambda: nn.LayerNorm(6),
    lambda: nn.RMSNorm(6),
    lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(CHANNELS, 6, 3)),
    lambda: nn.MaxPool2d(2),
    lambda: nn.AvgPool2d(2),
    lambda: nn.AdaptiveAvgPool2d(4),
    lambda: nn.AdaptiveMaxPool2d(4),
    lambda: nn.FractionalMaxPool2d(2, output_size=3),
    lambda: nn.Upsample(scale_factor=2),
    lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    lambda: nn.ReflectionPad2d(1),
    lambda: nn.ReplicationPad2d(1),
    lambda: nn.PixelShuffle(2),
    lambda: nn.PReLU(CHANNELS),
    lambda: nn.LocalResponseNorm(3),
    lambda: nn.GLU(1),
    lambda: nn.LogSigmoid(),
    lambda: nn.Softmax(1),
    lambda: nn.LogSoftmax(1),
    lambda: lambda x: F.fold(F.unfold(x, 3), x.shape[2:], 3),
    lambda: lambda x: F.grid_sample(x, torch.rand(2, 5, 7, 2), align_corners=False),
    lambda: lambda x: F.scaled_dot_product_attention(x, x, x),
    lambda: lambda x: F.cross_entropy(x, torch.randint(0, CHANNELS, (2, 6, 6))),
    lambda: lambda x: torch.cdist(x.flatten(2), x.flatten(2)),
    lambda: lambda x: F.embedding_bag(torch.randint(0, 6, (3, 2)), x[0, 0]),
    lambda: lambda x: torch.fft.rfft2(x).abs(),
    lambda: lambda x: torch.linalg.inv(x @ x.mT + torch.eye(6)),
    *(
        (lambda name=name: lambda x: getattr(torch, name)(x, 1))
        for name in "prod sum mean amax var norm cumsum cumprod logcumsumexp logsumexp cummax sort median".split()
    ),
    lambda: lambda x: x.gather(1, x.argsort(1)),
    lambda: lambda x: x.topk(2, 1).values,
    lambda: lambda x: x.index_select(1, torch.tensor([2, 0])),
    lambda: lambda x: torch.einsum("nchw,ndhw->ncd", x, x),
)


def _recorded() -> dict[torch._ops.OpOverload, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    recorder = _Recorder()
    for make in LAYERS:
        layer, x = make(), torch.rand(2, CHANNELS, 6, 6, requires_grad=True)
        with recorder:
            results = layer(x)
            first = next(leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor))
            (first * first).sum().backward()
    return recorder.calls


def _by_schema() -> Iterator[tuple[torch._ops.OpOverload, tuple[dict[str, Any], dict[str, torch.Tensor]]]]:
    """Calls of the operators that a file may name, with operands generated from their schemas."""
    plain = {
        "int": 1,
        "float": 0.5,
        "bool": False,
        "number": 2,
        "Scalar": 2,
        "List[int]": [1],
        "Optional[int]": 1,
    }
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket) or not (
            name in _PURE_OPERATORS or _is_pointwise(name)
        ):
            continue
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            needed = [one for one in operator._schema.arguments if not one.has_default_value()]
            if operator._schema.is_mutable or not all(
                str(one.type) in {*plain, "Tensor", "List[Tensor]"} for one in needed
            ):
                continue
            for shape in ((2, 4, 6, 6), (6, 6), (2, 4, 6)):
                kinds: dict[str, Callable[[], Any]] = {"Tensor": lambda: torch.rand(shape) * 0.5 + 0.25}  # noqa: B023
                kinds["List[Tensor]"] = lambda: [torch.rand(shape), torch.rand(shape)]  # noqa: B023
                made = {
                    one.name: kinds[str(one.type)]() if str(one.type) in kinds else plain[str(one.type)]
                    for one in needed
                }
                yield operator, _referring(made)


def _reversed(x: torch.Tensor) -> torch.Tensor:
    return to_memory_order(x, range(x.dim())[::-1]) if x.dim() > 1 else x


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Every second element in each dimension, like a slice with steps."""
    room = x.new_zeros([2 * size for size in x.shape])
    part = room[tuple(slice(None, None, 2) for _ in x.shape)]
    return part.copy_(x)


def test_operators_compute_the_same_however_operands_are_stored() -> None:
    """All operators that files may hold, and those of layers and their gradients."""
    torch.manual_seed(0)
    wrong, compared = [], set()
    for operator, (arguments, inputs) in [*_recorded().items(), *_by_schema()]:
        name = operator.name()
        random = torch.Tag.nondeterministic_seeded in operator.tags
        if name in compared or random or not inputs or any(one in name for one in _BY_STRIDES):
            continue
        try:
            expected = pytree.tree_leaves(list(results_of(name, arguments, inputs)))
        except Exception:  # operands that it does not support
            continue
        for store in (_reversed, _channels_last, _apart):
            for other in {None, *list(inputs)[:1]}:  # all of them, or the first
                given = {role: x if other not in (None, role) else store(x) for role, x in inputs.items()}
                try:
                    found = pytree.tree_leaves(list(results_of(name, arguments, given)))
                except OperatorError:
                    found = [None] * len(expected)
                alike = (
                    one is not None and torch.allclose(one, wanted, 1e-4, 1e-5, equal_nan=True)
                    for one, wanted in zip(found, expected, strict=True)
                    if isinstance(wanted, torch.Tensor)
                )
                if not all(alike):
                    wrong.append((name, store.__name__, other))
        compared.add(name)
    assert not wrong
    assert {
        "aten::native_group_norm_backward",
        "aten::_weight_norm_interface_backward",
        "aten::sort",
    } <= compared
    assert len(compared) > 400


def test_an_order_of_dimensions_is_found_again() -> None:
    x = torch.rand(2, 3, 4, 5)
    for tensor, order in (
        (x, None),
        (x[:, :2, 1:], None),
        (x.expand(3, 2, 3, 4, 5), None),
        (x.contiguous(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (x.contiguous(memory_format=torch.channels_last)[:, :2], (0, 2, 3, 1)),
        (x.permute(3, 0, 2, 1), (1, 3, 2, 0)),
    ):
        assert memory_order(tensor) == order
        dense = to_memory_order(tensor, order)
        assert torch.equal(dense, tensor) and (order is None or memory_order(dense) == order)
        assert to_memory_order(dense, order).data_ptr() == dense.data_ptr()


def test_attention_reads_rows_in_place() -> None:
    packed = torch.randn(2, 6, 3, 4, 8, dtype=torch.float16)
    heads = [packed[:, :, number].transpose(1, 2) for number in range(3)]
    assert all(map(has_rows, heads)) and has_rows(heads[0][:, :, :1])
    rejected = [
        heads[0].transpose(2, 3),  # columns
        packed[:, :, 0, :, 2:].transpose(1, 2),  # 4 bytes from an aligned address
        torch.randn(2, 4, 6, 12, dtype=torch.float16)[..., :8],  # 24 bytes from row to row
        torch.randn(2, 1, 6, 8, dtype=torch.float16).expand(2, 4, 6, 8),
        packed,
    ]
    assert not any(map(has_rows, rejected))
    target = "aten::_scaled_dot_product_flash_attention_for_cpu"
    arguments = {name: Reference(name) for name in ("query", "key", "value")}
    read: list[int] = []

    class Operands(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attention" in str(function):
                read.extend(tensor.data_ptr() for tensor in args)
            return function(*args, **(kwargs or {}))

    with Operands():
        found = results_of(target, arguments, dict(zip(arguments, heads, strict=True)))[0]
    assert read == [tensor.data_ptr() for tensor in heads]
    query, key, value = (tensor.contiguous() for tensor in heads)
    expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class _OverChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


LAST = Call(lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
COMBINATIONS: tuple[tuple[str, Callable[[], nn.Module]], ...] = (
    ("cpu", lambda: nn.Sequential(nn.GroupNorm(2, 8), _OverChannels())),
    ("cpu", lambda: nn.Sequential(Call(lambda x: x.permute(0, 1, 3, 2)), nn.GroupNorm(2, 8), LAST)),
    ("cpu", lambda: nn.Sequential(LAST, nn.GroupNorm(2, 8), Call(lambda x: x[:, :, ::2]))),
    (
        "cpu",
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), _OverChannels()),
    ),
    (
        "cpu",
        lambda: nn.Sequential(LAST, nn.InstanceNorm2d(8, affine=True), Call(lambda x: x.permute(0, 1, 3, 2))),
    ),
    ("cpu", lambda: nn.Sequential(_OverChannels(), Call(lambda x: x * x.prod(1, keepdim=True)))),
    ("cpu", lambda: nn.Sequential(LAST, nn.AdaptiveMaxPool2d(3), _OverChannels())),
    ("twin", lambda: nn.Sequential(nn.GroupNorm(2, 8), _OverChannels())),
    ("twin", lambda: nn.Sequential(Call(lambda x: x.permute(0, 1, 3, 2)), nn.GroupNorm(2, 8), LAST)),
)


def test_layers_train_as_in_pytorch_between_others_that_change_strides() -> None:
    for number, (device, make) in enumerate(COMBINATIONS):
        torch.manual_seed(0)
        order = torch.channels_last if number % 2 else torch.contiguous_format
        model = nn.Sequential(nn.Conv2d(8, 8, 1), make()).to(memory_format=order)  # type: ignore[call-overload]
        x = torch.randn(2, 8, 6, 6).contiguous(memory_format=order)
        before = [one.detach().clone() for one in model.parameters()]
        loss(model(x)).backward()
        wanted = [one.grad for one in model.parameters()]
        model.zero_grad()
        options: dict[str, Any] = {} if device == "cpu" else {"device": device}
        step = escalade.training_step(
            model,
            loss,
            torch.optim.SGD(model.parameters(), lr=1.0),
            (x,),
            dtype="fp32",
            **options,
        )
        step(x)
        scale = 1e-2 * max(float(one.norm()) for one in wanted if one is not None)
        for parameter, was, gradient in zip(model.parameters(), before, wanted, strict=True):
            assert gradient is not None
            error = (was - parameter.detach() - gradient).norm() / (gradient.norm() + scale)
            assert error < 1e-3, (device, model, tuple(parameter.shape))


def loss(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() + y.square().mean()
