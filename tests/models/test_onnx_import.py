"""ONNX files as models: every operator against ONNX's own evaluator, whole networks against the exported model."""

from __future__ import annotations

import importlib.util
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from escalade.engine import compile
from escalade.errors import UnsupportedError
from escalade.models.onnx_import.operators import OPERATORS
from escalade.models.onnx_import.reader import read_onnx

onnx = pytest.importorskip("onnx")

_X = np.random.default_rng(0).standard_normal((2, 4, 6, 5)).astype(np.float32)
_V = _X[0, 0]
_POSITIVE = np.abs(_X) + 0.5
_OLDEST, _MIDDLE, _NEWEST = 13, 17, 21


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _cases() -> Iterator[tuple[str, int, list[Any], list[Any], dict[str, Any], int]]:
    """Yield operator, opset, data, constants behind it (None for an absent one), attributes and number of results."""

    def at(*opsets: int) -> Callable[..., Iterator[Any]]:
        def case(
            op: str, data: Any = _X, constants: Any = (), results: int = 1, **attributes: Any
        ) -> Iterator[Any]:
            for opset in opsets:
                yield op, opset, data if isinstance(data, list) else [data], [*constants], attributes, results

        return case

    old, new, both, later = at(_OLDEST, _MIDDLE), at(18, _NEWEST), at(_OLDEST, _NEWEST), at(_NEWEST)
    unary = (
        "Abs Atan Ceil Cos Cosh Erf Exp Floor Neg Relu Round Sigmoid Sign Sin Sinh Softplus Softsign Tan Tanh"
    )
    for op in (
        *unary.split(),
        "Identity",
        "Elu",
        "Celu",
        "Selu",
        "LeakyRelu",
        "HardSigmoid",
        "ThresholdedRelu",
    ):
        yield from both(op)
    for op in ("Log", "Sqrt", "Reciprocal"):
        yield from both(op, _POSITIVE)
    yield from both("Acos", _X / 9)
    yield from both("Asin", _X / 9)
    yield from at(_MIDDLE, _NEWEST)("HardSwish")
    yield from later("Mish")
    for kind in ("none", "tanh"):
        yield from later("Gelu", approximate=kind)
    yield from both("HardSigmoid", alpha=1 / 6, beta=0.5)
    yield from both("Elu", alpha=0.7)
    yield from both("Selu", alpha=1.5, gamma=1.2)
    yield from both("PRelu", _X, [_floats(4, 1, 1)])
    yield from both("PRelu", _X, [_floats(6, 5)])
    for op in ("Add", "Sub", "Mul", "Div"):
        yield from both(op, [_X, _POSITIVE])
        yield from both(op, [_X], [_floats(4, 1, 1) + 3])
        yield from both(op, [_X], [np.float32(3)])
        yield from both(op, [_ints(7, -7, 5), _ints(2, 2, 3)])
    yield from both("Pow", _POSITIVE, [np.float32(1.5)])
    yield from both("Mod", [_ints(7, -7, 5), _ints(2, 3, 3)])
    yield from both("Mod", [_X, _POSITIVE], fmod=1)
    for op in ("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"):
        yield from both(op, [_X.round(), _X[:, :, ::-1].round()])
    for op in ("And", "Or", "Xor"):
        yield from both(op, [_X > 0, _X[:, :, ::-1] > 0])
    yield from both("Not", _X > 0)
    yield from both("IsNaN", np.where(_X > 0, np.nan, _X).astype(np.float32))
    yield from both("Where", [_X > 0, _X, _POSITIVE])
    for op in ("Max", "Min", "Sum", "Mean"):
        yield from both(op, [_X, _POSITIVE, _X[:, :, ::-1].copy()])
    yield from both("Where", [_X > 0], [np.float32(1), np.float32(0)])
    yield from _quantizations(at(19, _NEWEST))
    yield from both("Clip", _X, [np.float32(-0.5), np.float32(0.25)])
    yield from both("Clip", _X, [None, np.float32(0.25)])
    yield from both("Cast", _X, to=7)
    yield from both("Cast", _ints(1, 2), to=1)
    weight, bias = _floats(8, 4, 3, 3), _floats(8)
    yield from both("Conv", _X, [weight, bias], pads=[1, 1, 1, 1], strides=[2, 1])
    yield from both("Conv", _X, [weight], pads=[0, 1, 2, 0], dilations=[1, 2])
    yield from both("Conv", _X, [_floats(8, 2, 3, 3), bias], group=2)
    yield from both("Conv", _X[:, :, 0], [_floats(8, 4, 3)])
    for automatic in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield from both("Conv", _X, [_floats(8, 4, 2, 3)], auto_pad=automatic, strides=[2, 2])
    transposed = _floats(4, 8, 3, 3)
    yield from both(
        "ConvTranspose", _X, [transposed, bias], strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]
    )
    yield from both("ConvTranspose", _X, [transposed], strides=[2, 2], pads=[0, 1, 1, 0])
    for automatic in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield from both("ConvTranspose", _X, [transposed], strides=[2, 2], auto_pad=automatic)
    for automatic in ("SAME_UPPER", "SAME_LOWER"):
        yield from both(
            "ConvTranspose", _X, [transposed], strides=[2, 2], auto_pad=automatic, output_shape=[12, 10]
        )
    yield from both("MaxPool", kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1], ceil_mode=1)
    for ceil in (0, 1):
        yield from both("MaxPool", kernel_shape=[3, 2], strides=[2, 2], ceil_mode=ceil)
        yield from both("AveragePool", kernel_shape=[3, 2], strides=[2, 2], ceil_mode=ceil)
    yield from both("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    yield from both(
        "MaxPool", kernel_shape=[2, 2], pads=[0, 1, 1, 0]
    )  # ONNX's evaluator swaps the middle two
    yield from both("MaxPool", kernel_shape=[2, 2], dilations=[2, 2])
    for counted in (0, 1):
        yield from both("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=counted)
        yield from both("AveragePool", kernel_shape=[2, 2], pads=[0, 0, 1, 1], count_include_pad=counted)
    yield from both("GlobalAveragePool")
    yield from both("GlobalMaxPool")
    channels = [_floats(4), _floats(4) * 2]
    yield from at(_MIDDLE, _NEWEST)(
        "BatchNormalization", _X, [*channels, _floats(4), _POSITIVE[0, :, 0, 0]], epsilon=1e-3
    )
    yield from both("InstanceNormalization", _X, channels, epsilon=1e-3)
    yield from later("GroupNormalization", _X, channels, num_groups=2)
    yield from at(_MIDDLE, _NEWEST)("LayerNormalization", _X, [_floats(6, 5), _floats(6, 5)], axis=2)
    yield from at(_MIDDLE, _NEWEST)("LayerNormalization", _X, [_floats(1), _floats(6, 1)], axis=2)
    yield from both("LpNormalization", axis=1, p=2)
    yield from both("MatMul", [_X, _floats(5, 3)])
    yield from both("Gemm", [_V], [_floats(7, 5), _floats(7)], transB=1)
    yield from both("Gemm", [_V.T.copy()], [_floats(5, 7), _floats(6, 7)], transA=1, alpha=0.5, beta=2.0)
    yield from both("Gemm", [_V], [_floats(5, 7)])
    yield from both("Einsum", [_V, _V], equation="ij,kj->ik")
    for axis in (-1, 1):
        yield from both("Softmax", axis=axis)
        yield from both("LogSoftmax", axis=axis)
    reductions = "L1 L2 LogSumExp Max Mean Min Prod SumSquare".split()
    for op in (f"Reduce{name}" for name in reductions):
        for keep in (0, 1):
            yield from old(op, axes=[1, -1], keepdims=keep)
            yield from new(op, _X, [_ints(1, -1)], keepdims=keep)
        yield from both(op)
    yield from both("ReduceSum", _X, [_ints(2, 3)])
    yield from both("ReduceSum", _X, noop_with_empty_axes=1)
    yield from both("ReduceLogSum", _POSITIVE)
    yield from both("ArgMax", axis=1, keepdims=0)
    yield from both("ArgMin", axis=-1)
    yield from both("Reshape", _X, [_ints(0, -1, 5)])
    for axis in (0, 1, 2, 4, -1):
        yield from both("Flatten", axis=axis)
    yield from both("Transpose", perm=[0, 2, 3, 1])
    yield from both("Transpose")
    yield from both("Unsqueeze", _X, [_ints(0, -1)])
    yield from both("Squeeze", _X[:, :1, :, :1], [_ints(1, -1)])
    yield from both("Squeeze", _X[:, :1, :, :1])
    yield from both("Concat", [_X, _POSITIVE], axis=-3)
    yield from both("Split", _X, [_ints(1, 3)], results=2, axis=1)
    yield from at(_OLDEST, _MIDDLE)("Split", _X, results=2, axis=1)
    yield from new("Split", _X, results=2, axis=3, num_outputs=2)
    yield from both("Slice", _X, [_ints(1, -4), _ints(2**62, -1), _ints(1, 2), _ints(2, 1)])
    yield from both("Slice", _X, [_ints(2**31), _ints(-(2**31)), _ints(3), _ints(-1)])
    yield from both("Gather", _X, [_ints(2, -1, 0)], axis=1)
    yield from both("Gather", _X, [np.int64(1)], axis=2)
    yield from both("Gather", _X, [_ints(0, 1, 1, 0).reshape(2, 2)], axis=3)
    yield from both("Expand", _V[:, :1], [_ints(3, 1, 4)])
    yield from both("Tile", _V, [_ints(2, 3)])
    yield from both("Pad", _X, [_ints(0, 0, 1, 2, 0, 1, 0, 3), np.float32(0.5)])
    yield from new("Pad", _X, [_ints(1, 2), None, _ints(3)])
    yield from both("Pad", _X, [_ints(0, 0, 1, 1, 0, 0, 1, 1), _floats(1)])
    for mode in ("reflect", "edge", "wrap"):
        for pads in ((0, 0, 1, 2, 0, 0, 0, 3), (0, 0, 0, 2, 0, 0, 0, 3), (1, 2, 0, 0, 0, 1, 2, 0)):
            yield from at(19, _NEWEST)("Pad", _X, [_ints(*pads)], mode=mode)
        yield from at(19, _NEWEST)("Pad", _V, [_ints(1, 2, 0, 3)], mode=mode)
    for mode in ("DCR", "CRD"):
        yield from both("DepthToSpace", blocksize=2, mode=mode)
    yield from both("SpaceToDepth", _X[..., :4], blocksize=2)
    yield from both("TopK", _X, [_ints(3)], results=2, axis=1)
    yield from both("CumSum", _X, [np.int64(2)])
    yield from at(20, _NEWEST)(
        "GridSample", [_X, np.tanh(_floats(2, 3, 3, 2))], mode="linear", align_corners=1
    )
    factors = np.array([1, 1, 2, 2], np.float32)
    half = {"coordinate_transformation_mode": "half_pixel"}
    yield from both("Resize", _X, [None, factors], mode="linear", **half)
    yield from both("Resize", _X, [None, factors], mode="nearest", **half)
    yield from both("Resize", _X, [None, factors], mode="cubic", **half)
    asymmetric = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    yield from both("Resize", _X, [None, None, _ints(2, 4, 9, 7)], mode="nearest", **asymmetric)
    corners = {"coordinate_transformation_mode": "align_corners"}
    yield from both("Resize", _X, [None, None, _ints(2, 4, 9, 7)], mode="linear", **corners)
    yield from new("Resize", _X, [None, np.array([2, 2], np.float32)], mode="linear", axes=[2, 3], **half)


def _quantizations(both: Callable[..., Iterator[Any]]) -> Iterator[Any]:
    for codes in (np.int8, np.uint8):
        zeros = (_floats(4) * 3 + 9).astype(codes)
        yield from both("QuantizeLinear", _X, [np.float32(0.03), codes(3)])
        yield from both("QuantizeLinear", _X, [np.abs(_floats(4)), zeros], axis=1)
        yield from both("DequantizeLinear", (_X * 20).astype(codes), [np.float32(0.03), codes(3)])
        yield from both("DequantizeLinear", (_X * 20).astype(codes), [np.abs(_floats(4)), zeros], axis=1)
    yield from both("QuantizeLinear", _X, [np.float32(0.03)])
    yield from both("DequantizeLinear", _ints(7, -9).astype(np.int32), [np.float32(0.03)])


def _write(path: pathlib.Path, case: tuple[str, int, list[Any], list[Any], dict[str, Any], int]) -> Any:
    op, opset, data, constants, attributes, results = case
    names = [f"x{index}" for index in range(len(data))]
    held = [("" if value is None else f"c{index}") for index, value in enumerate(constants)]
    node = onnx.helper.make_node(op, names + held, [f"y{index}" for index in range(results)], **attributes)
    inputs = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
        for name, value in zip(names, data, strict=True)
    ]
    weights = [
        onnx.numpy_helper.from_array(np.asarray(value), name)
        for name, value in zip(held, constants, strict=True)
        if value is not None
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = onnx.helper.make_graph([node], "case", inputs, outputs, weights)
    found = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    onnx.save(found, path)
    return found


def test_every_operator_matches_onnx(tmp_path: pathlib.Path) -> None:
    from onnx.reference import ReferenceEvaluator

    path, failures, seen = tmp_path / "case.onnx", [], set()
    for case in _cases():
        op, opset, data, constants, attributes, _ = case
        found = _write(path, case)
        with np.errstate(all="ignore"):
            expected = ReferenceEvaluator(found).run(None, {f"x{i}": value for i, value in enumerate(data)})
        with torch.no_grad():
            results = read_onnx(path).module(*(torch.from_numpy(value.copy()) for value in data))
        for result, wanted in zip(
            results if isinstance(results, tuple) else (results,), expected, strict=True
        ):
            good = result.shape == wanted.shape and np.allclose(
                result.numpy(), wanted, rtol=1e-4, atol=1e-5, equal_nan=True
            )
            if not good or result.numpy().dtype != wanted.dtype:
                failures.append((op, opset, attributes, [np.shape(each) for each in constants]))
        seen.add(op)
    assert not failures
    # The others are tested with whole networks, since they return values on the host, and LRN below.
    assert OPERATORS.keys() - seen == {
        "CastLike",
        "ConstantOfShape",
        "Dropout",
        "LRN",
        "Range",
        "Shape",
        "Size",
    }


@pytest.mark.usefixtures("all_in_8_bits")
def test_quantized_networks_keep_their_scales(tmp_path: pathlib.Path) -> None:
    """As other tools write them: values and weights behind a quantization and its inverse."""
    from onnx.reference import ReferenceEvaluator

    make, scale, path = onnx.helper.make_node, np.float32(0.05), tmp_path / "quantized.onnx"
    weights = {
        "s": scale, "z": np.int8(0), "b": _ints(*range(-8, 8)).astype(np.int32), "bs": scale,
        "w": (_floats(16, 16, 3, 3) * 40).clip(-127, 127).astype(np.int8),
        "ws": np.abs(_floats(16)) / 500 + np.float32(1e-3), "wz": np.zeros(16, np.int8),
    }  # fmt: skip
    nodes = [
        make("DequantizeLinear", ["w", "ws", "wz"], ["dw"], axis=0),
        make("DequantizeLinear", ["b", "bs"], ["db"]),
        *(
            node
            for x, y in (("x", "y"), ("y", "r"))
            for node in (
                make("QuantizeLinear", [x, "s", "z"], [f"q{x}"]),
                make("DequantizeLinear", [f"q{x}", "s", "z"], [f"d{x}"]),
                make("Conv", [f"d{x}", "dw", "db"], [y], pads=[1, 1, 1, 1]),
            )
        ),
    ]
    x = np.random.default_rng(0).standard_normal((2, 16, 9, 9)).astype(np.float32)
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)
    held = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    outputs = [onnx.helper.make_empty_tensor_value_info("r")]
    graph = onnx.helper.make_graph(nodes, "quantized", [info], outputs, held)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", _NEWEST)]), path)
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
    engine = compile(read_onnx(path).module, torch.from_numpy(x), dtype="int8", device="cpu")
    layers = [step.node for step in engine.plan(torch.from_numpy(x)).steps if step.node.op == "conv2d"]
    assert [layer.attributes["quantized"] for layer in layers] == ["int8", "int8"]
    difference = engine(torch.from_numpy(x)).numpy() - expected
    assert np.linalg.norm(difference) < 0.01 * np.linalg.norm(expected)


def test_local_response_norm_sums_over_neighboring_channels(tmp_path: pathlib.Path) -> None:
    # ONNX's own evaluator squares one image only, so this is its formula.
    path = tmp_path / "case.onnx"
    _write(path, ("LRN", _NEWEST, [_X], [], {"size": 3, "alpha": 0.3, "beta": 0.6, "bias": 2.0}, 1))
    padded = np.pad(_X**2, ((0, 0), (1, 1), (0, 0), (0, 0)))
    sums = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    result = read_onnx(path).module(torch.from_numpy(_X)).numpy()
    np.testing.assert_allclose(result, _X / (2.0 + 0.3 / 3 * sums) ** 0.6, rtol=1e-4)


class Small(nn.Module):
    """Shapes computed from the input's, shared weights, several results, and layers without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.shared = nn.Conv2d(8, 8, 3, padding=1)
        self.grouped, self.drop = nn.GroupNorm(2, 8), nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.norm(self.first(x)))
        y = self.shared(torch.nn.functional.silu(self.grouped(self.shared(y))))
        half = nn.functional.interpolate(y, scale_factor=0.5, mode="bilinear")
        back = nn.functional.interpolate(half, size=y.shape[2:], mode="nearest")
        rows = (y + back).flatten(2).transpose(1, 2)  # batch and pixels stay symbolic
        attended = torch.softmax(rows @ rows.transpose(1, 2), -1) @ rows
        image = attended.transpose(1, 2).reshape(x.shape[0], -1, x.shape[2], x.shape[3])
        return self.head(self.drop(image.mean((2, 3)))), torch.cat([image, x], 1)


def _exported(network: nn.Module, x: torch.Tensor, path: pathlib.Path, **how: Any) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.onnx.export(network, (x,), str(path), input_names=["x"], verbose=False, **how)


@pytest.mark.share(7)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [13, 20, 21])
def test_a_network_with_open_sizes_is_captured_for_every_size(tmp_path: pathlib.Path, opset: int) -> None:
    torch.manual_seed(0)
    network, path, x = Small().eval(), tmp_path / "small.onnx", torch.randn(2, 3, 16, 12)
    network(torch.randn(4, 3, 16, 16))
    if opset > 20:  # PyTorch's older exporter stops there
        pytest.importorskip("onnxscript")
        sizes = {
            0: torch.export.Dim("batch"),
            2: 4 * torch.export.Dim("rows"),
            3: 4 * torch.export.Dim("columns"),
        }
        _exported(
            network, x, path, dynamo=True, opset_version=opset, dynamic_shapes=(sizes,), external_data=True
        )
    else:
        axes = {"x": {0: "batch", 2: "rows", 3: "columns"}}
        _exported(network, x, path, dynamo=False, opset_version=opset, dynamic_axes=axes)
    engine = compile(path, torch.zeros(1, 3, 16, 12))
    for batch in (x, torch.randn(3, 3, 16, 12), torch.randn(1, 3, 20, 8)):
        for result, expected in zip(engine(batch), network(batch), strict=True):
            torch.testing.assert_close(result, expected.detach(), rtol=1e-4, atol=1e-5)
    assert engine.graph.inputs[0].name == "x"
    again = read_onnx(path).module.state_dict()
    assert {"head.weight", "shared.bias"} <= again.keys() and torch.equal(
        again["head.bias"], network.head.bias
    )


class Fixed(nn.Module):
    """Reshapes and resizes by sizes that an exporter stores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).reshape(x.shape[0], 2, 4, x.shape[2], x.shape[3]).transpose(1, 2)
        y = y.reshape(x.shape[0], 8, x.shape[2], x.shape[3])
        y = nn.functional.interpolate(y, size=(4, 4), mode="bilinear")
        return self.head(y.view(y.shape[0], -1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_that_the_exporter_wrote_down_is_no_limit(tmp_path: pathlib.Path, batch: int) -> None:
    torch.manual_seed(0)
    network, path = Fixed().eval(), tmp_path / "fixed.onnx"
    _exported(network, torch.randn(batch, 3, 8, 8), path, dynamo=False, opset_version=17)
    engine = compile(path)
    assert engine.graph.is_batched
    for size in (batch, 3):
        x = torch.randn(size, 3, 8, 8)
        torch.testing.assert_close(engine(x), network(x).detach(), rtol=1e-4, atol=1e-5)


NETWORKS = (
    "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "mobilenet_v3_small", "mobilenet_v2", "resnet18",
    "regnet_y_400mf", "efficientnet_b0", "googlenet", "convnext_tiny", "lraspp_mobilenet_v3_large",
)  # fmt: skip


@pytest.mark.share(7)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_torchvision_are_planned_like_the_models_themselves(
    tmp_path: pathlib.Path, name: str
) -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    from escalade_bench.coverage.catalogue import entries

    torch.manual_seed(0)
    network, path, x = (
        entries(f"torchvision:{name}")[0].make().eval(),
        tmp_path / "it.onnx",
        torch.randn(2, 3, 64, 64),
    )
    _exported(network, x, path, dynamo=False, opset_version=17, dynamic_axes={"x": {0: "batch"}})
    engine, own = compile(path), compile(network, x)
    with torch.no_grad():
        expected = network(x)
    outputs = list(expected.values()) if isinstance(expected, dict) else [expected]
    results = engine(x)
    for result, wanted in zip(results if isinstance(results, tuple) else (results,), outputs, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
    kernels = [[step.node.op for step in each.plan(x).steps if step.runs] for each in (engine, own)]
    assert len(kernels[0]) <= 1.1 * len(kernels[1])


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it.onnx"

    def refused(match: str, case: Any = None) -> None:
        if case is not None:
            _write(path, case)
        with pytest.raises(UnsupportedError, match=match):
            compile(path)

    refused("no file")
    path.write_bytes(b"not a graph")
    refused("it.onnx is not an ONNX file, or is damaged")
    refused("operators that are not supported: LSTM", ("LSTM", _NEWEST, [_X], [], {}, 1))
    refused("opset 12; supported are opsets 13 to 23", ("Relu", 12, [_X], [], {}, 1))
    refused(r"'y0' \(Resize\): coordinate_transformation_mode='asymmetric'.*1\.5", (
        "Resize", _NEWEST, [_X], [None, np.array([1, 1, 1.5, 2], np.float32)],
        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}, 1,
    ))  # fmt: skip
    refused(r"input 1 is computed from the data", ("Tile", _NEWEST, [_X, _ints(1, 1, 2, 2)], [], {}, 1))
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])], "open",
        [onnx.helper.make_tensor_value_info("x", 1, ["batch", "channels", 4])],
        [onnx.helper.make_empty_tensor_value_info("y")],
    )  # fmt: skip
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), path)
    refused(r"leaves sizes of its input 'x' open: \(batch, channels, 4\)")
    monkeypatch.setitem(sys.modules, "onnx", None)
    refused("needs the package onnx; install it with pip install 'escalade\\[onnx\\]'")
