"""The operator in PyTorch: its refusals, its inputs, and its interplay with PyTorch's features."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from escalade.device.run import Executable
from escalade.errors import EscaladeError, UnsupportedError
from escalade.ops import conv2d
from tests import formulas

# Few kernels: the twin compiles each combination of filter, stride, dtype, layout and epilogue.
SETTINGS: dict[str, Any] = {"padding": 1}


def tensors(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, batch: int = 2, channels: int = 8, size: int = 9
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, channels, size, size, generator=generator)
    weight = torch.randn(16, channels, 3, 3, generator=generator) / (9 * channels) ** 0.5
    return x.to(dtype), weight.to(dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[result.dtype]
    torch.testing.assert_close(result, expected.to(result.dtype), rtol=tolerance, atol=tolerance)


# --- refusals and their messages


@pytest.mark.parametrize(
    ("x", "weight", "sentence"),
    [
        (torch.ones(2, 8, 9), torch.ones(16, 8, 3, 3), "x: N C H W"),
        (torch.ones(2, 8, 9, 9), torch.ones(16, 8, 3), r"weight is torch.float32 \[.*weight: K C/groups R S"),
        (torch.ones(()), torch.ones(16, 8, 3, 3), "x: N C H W"),
        (torch.ones(2, 8, 9, 9), torch.ones(16, 4, 3, 3), "weight is .* here C is 8, groups is 1"),
        (
            torch.ones(2, 8, 9, 9).double(),
            torch.ones(16, 8, 3, 3).double(),
            "torch.float64.*float32, float16",
        ),
        (torch.ones(2, 8, 9, 9).int(), torch.ones(16, 8, 3, 3).int(), "x is torch.int32"),
        (
            torch.ones(2, 8, 9, 9).half(),
            torch.ones(16, 8, 3, 3),
            "weight is torch.float32 .*of one dtype",
        ),
        (torch.ones(2, 8, 2, 9), torch.ones(16, 8, 5, 3), "the filter covers 5x3 pixels"),
        (torch.ones(2, 8, 0, 9), torch.ones(16, 8, 3, 3), "height is 0"),
        (torch.ones(2, 0, 9, 9), torch.ones(16, 0, 3, 3), "channels is 0"),
        (torch.ones(2, 8, 9, 9), torch.ones(0, 8, 3, 3), "filters is 0"),
        (torch.ones(2, 8, 9, 9), torch.ones(16, 8, 0, 3), "filter height is 0"),
        (
            torch.ones(2, 8, 9, 9),
            torch.ones(16, 8, 3, 3, device="meta"),
            "weight is .* on meta; .* on one device",
        ),
        (
            torch.ones(2, 8, 9, 9, device="meta"),
            torch.ones(16, 8, 3, 3),
            "weight is .* on cpu; .* on one device",
        ),
    ],
)
def test_tensors_that_pose_no_problem(x: torch.Tensor, weight: torch.Tensor, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        conv2d(x, weight)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stride": 0}, "stride is 0"),
        ({"stride": (1, -1)}, "stride is -1"),
        ({"stride": (1, 1, 1)}, "stride is .*one integer, or two"),
        ({"stride": 1.5}, "stride is 1.5"),
        ({"padding": -1}, "padding \\("),
        ({"padding": "same"}, "padding is 'same'"),
        ({"padding": 2**31}, "32-bit"),
        ({"dilation": 0}, "dilation is 0"),
        ({"dilation": 10}, "the filter covers 21x21"),
        ({"groups": 0}, "here C is 8, groups is 0"),
        ({"groups": 3}, "weight: K C/groups R S, .* here C is 8, groups is 3"),
        ({"rung": "nonsense"}, "no rung 'nonsense'; it has direct"),
        ({"bias": torch.ones(8)}, r"bias is torch.float32 \[8\].* here K is 16"),
        ({"bias": torch.ones(16, 1)}, r"bias is torch.float32 \[16, 1\]"),
        ({"bias": torch.ones(16).half()}, "bias is torch.float16"),
        ({"bias": torch.ones(16, device="meta")}, "bias is .* on meta"),
        (
            {"residual": torch.ones(2, 16, 9, 9)},
            r"residual has shape .* it must have the output's shape, \(2, 16, 7, 7\)",
        ),
        ({"residual": torch.ones(16, 7, 7)}, "residual: N K P Q"),
        ({"residual": torch.ones(1, 16, 7, 7)}, "here N is 2, K is 16"),
        ({"residual": torch.ones(2, 16, 7, 7).bfloat16()}, "residual is torch.bfloat16"),
    ],
)
def test_options_that_pose_no_problem(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        conv2d(*tensors(), **options)


def test_tf32_is_for_fp32() -> None:
    with pytest.raises(UnsupportedError, match="torch.float16.*tf32=True"):
        conv2d(*tensors(dtype=torch.float16), tf32=True)


def test_a_rung_that_cannot_do_it_says_why() -> None:
    with pytest.raises(UnsupportedError, match="rung winograd_f2 of conv2d cannot compute 8to16_9_k3s2.*: ."):
        conv2d(*tensors(), stride=2, padding=1, rung="winograd_f2")


def test_what_32_bits_cannot_count_is_refused_before_anything_is_allocated() -> None:
    image = torch.ones(1, 1, 1, 1).expand(1, 8, 2**15, 2**14)
    with pytest.raises(UnsupportedError, match="32-bit"):
        conv2d(image, torch.ones(1, 8, 1, 1))
    images = torch.ones(1, 1, 1, 1).expand(2**24, 1, 16, 16)
    with pytest.raises(UnsupportedError, match="32-bit"):
        conv2d(images, torch.ones(1, 1, 1, 1))


def test_every_refusal_is_an_escalade_error_and_a_value_error() -> None:
    with pytest.raises(EscaladeError) as caught:
        conv2d(torch.ones(1), torch.ones(1))
    assert isinstance(caught.value, ValueError)


# --- results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dtypes_and_layouts(dtype: torch.dtype, memory_format: torch.memory_format, seed: int) -> None:
    x, weight = tensors(seed=seed, dtype=dtype)
    y = conv2d(x.contiguous(memory_format=memory_format), weight, **SETTINGS)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=memory_format)
    assert_close(y, F.conv2d(x.double(), weight.double(), **SETTINGS))


def test_tf32_rounds_products_only(seed: int) -> None:
    x, weight = tensors(seed=seed)
    x = x.contiguous(memory_format=torch.channels_last)
    y, exact = conv2d(x, weight, tf32=True, **SETTINGS), F.conv2d(x, weight, **SETTINGS)
    error = float((y - exact).norm() / exact.norm())
    assert y.dtype == torch.float32
    assert 1e-5 < error < 1e-3


def test_the_whole_epilogue(seed: int) -> None:
    x, weight = tensors(seed=seed)
    bias, residual = torch.randn(16), torch.randn(2, 16, 9, 9)
    y = conv2d(x, weight, bias, residual, relu=True, **SETTINGS)
    assert_close(y, F.relu(F.conv2d(x, weight, bias, **SETTINGS) + residual))


_STRIDED = {
    "transposed image": lambda x: x.transpose(2, 3),
    "every second column": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "a slice of channels": lambda x: torch.cat([x, x, x], 1)[:, 8:16],
    "a slice of rows": lambda x: F.pad(x, (0, 0, 2, 3))[:, :, 2:-3],
    "one image for all": lambda x: x[:1].expand(2, -1, -1, -1),
    "one channel for all": lambda x: x[:, :1].expand(-1, 8, -1, -1),
    "flipped batch": lambda x: x.flip(0),
    "channels_last slice": lambda x: torch.cat([x, x], 1).to(memory_format=torch.channels_last)[:, :8],
    "not aligned": lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view_as(x),
}


@pytest.mark.parametrize("make", _STRIDED.values(), ids=list(_STRIDED))
def test_any_strides_are_taken(make: Any, seed: int) -> None:
    x, weight = tensors(seed=seed)
    strided = make(x)
    assert_close(conv2d(strided, weight, **SETTINGS), F.conv2d(strided, weight, **SETTINGS))


def test_weight_bias_and_residual_may_be_strided_too(seed: int) -> None:
    x, weight = tensors(seed=seed)
    weight = weight.transpose(2, 3)
    bias = torch.randn(32)[::2]
    residual = torch.randn(2, 9, 9, 16).permute(0, 3, 1, 2)
    y = conv2d(x, weight, bias, residual, relu=True, **SETTINGS)
    assert_close(y, F.relu(F.conv2d(x, weight, bias, **SETTINGS) + residual))


def test_kernels_are_given_aligned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misaligned 16-byte load is an error on the GPU only."""
    given: list[int] = []
    bind = Executable.bind

    def record(self: Executable, named: Any) -> Executable:
        given.extend(tensor.data_ptr() for tensor in named.values() if tensor is not None)
        return bind(self, named)

    monkeypatch.setattr(Executable, "bind", record)

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)

    x, weight = tensors()
    conv2d(
        shifted(x),
        shifted(weight),
        shifted(torch.ones(16)),
        shifted(torch.ones(2, 16, 9, 9)),
        relu=True,
        **SETTINGS,
    )
    assert given and all(address % 16 == 0 for address in given)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_an_empty_batch(memory_format: torch.memory_format) -> None:
    x, weight = tensors()
    y = conv2d(x[:0].contiguous(memory_format=memory_format), weight, **SETTINGS)
    assert y.shape == (0, 16, 9, 9) and y.dtype == x.dtype


def test_an_empty_batch_does_not_hide_a_wrong_rung() -> None:
    x, weight = tensors()
    with pytest.raises(UnsupportedError, match="no rung 'fastest'"):
        conv2d(x[:0], weight, rung="fastest", **SETTINGS)


def test_an_empty_batch_has_gradients() -> None:
    x, weight = (tensor.requires_grad_() for tensor in tensors())
    conv2d(x[:0], weight, relu=True, **SETTINGS).sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["x", "weight", "bias", "residual"])
def test_nan_and_inf_travel(where: str, value: float, memory_format: torch.memory_format) -> None:
    x, weight = tensors(seed=3)
    inputs = {"x": x, "weight": weight, "bias": torch.ones(16), "residual": torch.ones(2, 16, 7, 7)}
    inputs[where].view(-1)[40 % inputs[where].numel()] = value
    x = inputs["x"].contiguous(memory_format=memory_format)
    # The default for fp32 in NHWC splits its operands, and turns an infinity into NaN.
    rung = "implicit_gemm" if memory_format is torch.channels_last else None
    y = conv2d(x, inputs["weight"], inputs["bias"], inputs["residual"], relu=True, rung=rung)
    sums = formulas.convolution(x, inputs["weight"], inputs["bias"]) + inputs["residual"]
    torch.testing.assert_close(y, formulas.relu(sums).float(), rtol=1e-5, atol=1e-5, equal_nan=True)


@given(
    batch=st.integers(0, 3),
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    channels=st.integers(1, 20),
    filters=st.integers(1, 20),
    filter_size=st.sampled_from([1, 3]),
    padding=st.integers(0, 2),
    channels_last=st.booleans(),
)
@settings(max_examples=25)
def test_any_shape(
    batch: int,
    height: int,
    width: int,
    channels: int,
    filters: int,
    filter_size: int,
    padding: int,
    channels_last: bool,
) -> None:
    x = torch.randn(batch, channels, height, width)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(filters, channels, filter_size, filter_size) / (channels**0.5 * filter_size)
    if min(height, width) + 2 * padding < filter_size:
        with pytest.raises(UnsupportedError, match="covers"):
            conv2d(x, weight, padding=padding)
        return
    assert_close(conv2d(x, weight, padding=padding), F.conv2d(x, weight, padding=padding))


# --- autograd


@pytest.mark.share(7)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("bias", "residual"), [(False, False), (True, False), (True, True)])
def test_gradients_are_those_of_pytorch(
    bias: bool, residual: bool, relu: bool, memory_format: torch.memory_format, seed: int
) -> None:
    x, weight = tensors(seed=seed)
    given = [x.contiguous(memory_format=memory_format), weight]
    given += [torch.randn(16)] if bias else []
    given += [torch.randn(2, 16, 9, 9)] if residual else []
    ours = [tensor.clone().requires_grad_() for tensor in given]
    theirs = [tensor.clone().requires_grad_() for tensor in given]
    y = conv2d(*ours, relu=relu, **SETTINGS)
    expected = F.conv2d(theirs[0], theirs[1], theirs[2] if bias else None, **SETTINGS)
    expected = expected + theirs[3] if residual else expected
    expected = F.relu(expected) if relu else expected
    gradient = torch.randn_like(expected)
    y.backward(gradient)
    expected.backward(gradient)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.grad is not None and its.grad is not None
        assert_close(mine.grad, its.grad)


def test_only_the_gradients_that_are_asked_for() -> None:
    x, weight = tensors()
    weight.requires_grad_()
    conv2d(x, weight, **SETTINGS).sum().backward()
    assert x.grad is None and weight.grad is not None


def test_a_call_with_nothing_but_tensors_has_gradients() -> None:
    x, weight = tensors()
    torch.ops.escalade.conv2d(x, weight.requires_grad_()).sum().backward()
    assert weight.grad is not None


def test_stride_dilation_and_groups_reach_the_gradient(seed: int) -> None:
    options: dict[str, Any] = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2}
    x = torch.randn(2, 8, 9, 9)
    weight = torch.randn(6, 4, 3, 3)
    ours = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y, expected = conv2d(*ours, **options), F.conv2d(theirs[0], theirs[1], **options)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    y.square().sum().backward()
    expected.square().sum().backward()
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-3, atol=1e-3)


def test_second_derivatives(seed: int) -> None:
    x, weight = (tensor.requires_grad_() for tensor in tensors(seed=seed))

    def penalty(y: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), weight)
        return second

    mine, its = penalty(conv2d(x, weight, **SETTINGS)), penalty(F.conv2d(x, weight, **SETTINGS))
    torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-2)


# --- PyTorch's features


def _samples() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    x, weight = tensors()
    residual = torch.randn(2, 16, 9, 9)
    last = x.contiguous(memory_format=torch.channels_last)
    return [
        ((x, weight, None, None, [1, 1], [1, 1]), {}),
        ((last, weight, torch.randn(16), residual, [1, 1], [1, 1], [1, 1], 1, True), {}),
        ((x.clone().requires_grad_(), weight.clone().requires_grad_(), None, None, [1, 1], [1, 1]), {}),
        ((last, torch.randn(1, 8, 3, 3), None, None, [1, 1], [1, 1]), {}),
        ((x[:0], weight), {}),
    ]


@pytest.mark.parametrize("sample", range(len(_samples())))
def test_opcheck(sample: int) -> None:
    arguments, options = _samples()[sample]
    torch.library.opcheck(torch.ops.escalade.conv2d.default, arguments, options)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 8, 3, 3) / 8)
        self.bias = torch.nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return conv2d(x * 2, self.weight, self.bias, relu=True, padding=1).sin()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_torch_compile_takes_it_whole(memory_format: torch.memory_format) -> None:
    torch._dynamo.reset()
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = tensors()[0].contiguous(memory_format=memory_format)
    assert_close(compiled(x), block(x))
    compiled(x).sum().backward()
    mine = [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]
    block.zero_grad()
    block(x).sum().backward()
    for gradient, parameter in zip(mine, block.parameters(), strict=True):
        assert parameter.grad is not None
        assert_close(gradient, parameter.grad)


def test_torch_compile_with_a_batch_that_changes() -> None:
    torch._dynamo.reset()
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3, 1):
        x = tensors(batch=batch)[0]
        assert_close(compiled(x), block(x))


def test_torch_compile_tells_of_a_mistake_while_it_traces() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Block(), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="here C is 4, groups is 1"):
        compiled(torch.ones(2, 4, 9, 9))


def test_torch_export() -> None:
    block = Block().eval()
    x = tensors()[0]
    exported = torch.export.export(block, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1)}})
    assert "escalade.conv2d" in str(exported.graph)
    for batch in (2, 3):
        x = tensors(batch=batch)[0]
        assert_close(exported.module()(x), block(x))


def test_meta_tensors_give_shape_and_layout() -> None:
    x, weight = (tensor.to("meta") for tensor in tensors())
    y = conv2d(x.contiguous(memory_format=torch.channels_last), weight, stride=2, padding=1)
    assert (y.shape, y.dtype, y.device.type) == ((2, 16, 5, 5), torch.float32, "meta")
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_vmap_is_refused_or_right() -> None:
    """Not silently wrong."""
    x, weight = tensors()
    try:
        y = torch.func.vmap(lambda image: conv2d(image[None], weight, **SETTINGS)[0])(x)
    except (RuntimeError, EscaladeError):
        return
    assert_close(y, F.conv2d(x, weight, **SETTINGS))


@pytest.mark.parametrize("tf32", [False, True])
def test_autocast(tf32: bool) -> None:
    x, weight = tensors()
    bias = torch.randn(16)
    x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = conv2d(x, weight, bias, tf32=tf32, **SETTINGS)
    assert y.dtype == torch.bfloat16
    assert_close(y, F.conv2d(x, weight, bias, **SETTINGS))
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_no_grad_and_inference_mode() -> None:
    x, weight = tensors()
    weight.requires_grad_()
    with torch.no_grad():
        assert not conv2d(x, weight, **SETTINGS).requires_grad
    with torch.inference_mode():
        assert conv2d(x, weight, **SETTINGS).is_inference()


def test_threads_do_not_disturb_each_other(seed: int) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                x, weight = tensors(seed=seed + 100 * number + turn)
                assert_close(conv2d(x, weight, **SETTINGS), F.conv2d(x, weight, **SETTINGS))
        except Exception as error:
            wrong.append(f"thread {number}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_tensor_outlives_its_call() -> None:
    x, weight = tensors()
    kept = weakref.ref(x)
    conv2d(x, weight, **SETTINGS)
    del x
    gc.collect()
    assert kept() is None
