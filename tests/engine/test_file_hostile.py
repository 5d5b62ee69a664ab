"""Malicious files: none runs the code it names, and none of its claims is trusted."""

from __future__ import annotations

import json
import os
import pathlib
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from escalade.engine import compile, load
from escalade.engine.check import GraphError, check_graph
from escalade.engine.file import FileError
from escalade.engine.graph.aten import OperatorError, require_matching_sizes, require_pure
from escalade.engine.graph.graph import Reference
from escalade.engine.graph.trees import TreeError, structure_from_json
from escalade.engine.nodes import BY_NAME
from escalade.errors import EscaladeError
from tests.engine.files import Contents, every_kind, replaced


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    return every_kind(tmp_path_factory.mktemp("hostile") / "whole.engine")


def written(contents: Contents, path: pathlib.Path, change: Callable[[Any], None]) -> pathlib.Path:
    """The file with its graph changed, under a matching checksum."""
    changed = Contents(contents.metadata, json.loads(contents.metadata["graph"]), contents.tensors)
    change(changed.graph)
    replaced(path, changed.written())
    return path


def calling(target: str, arguments: dict[str, Any], shape: list[int], **inputs: str) -> Callable[[Any], None]:
    """One more node, which depends on constants alone and is an output: loading would compute it."""

    def change(graph: Any) -> None:
        attributes = {"target": target, "arguments": arguments}
        graph["nodes"].append(["evil", "aten", inputs, attributes, shape, "float32", ""])
        graph["outputs"][0] = "evil"
        graph["output_types"][0] = "float32"

    return change


def value(role: str) -> dict[str, str]:
    return {"$value": role}


def _updated(change: dict[str, Any], graph: Any) -> None:
    graph.update(change)


def test_files_are_neither_read_nor_written(whole: Contents, tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"\x00\x00\x80\x3f" * 4)
    before = secret.stat()
    for shared in (False, True):  # this creates a missing file
        for place in (secret, tmp_path / "new"):
            arguments = {"filename": str(place), "shared": shared, "size": 4, "dtype": {"$torch": "float32"}}
            path = written(whole, tmp_path / "evil.engine", calling("aten::from_file", arguments, [4]))
            with pytest.raises(FileError, match="aten::from_file is none of the operators"):
                load(path, device="cpu")
    arguments = {"filename": str(tmp_path / "new"), "item": value("in0")}
    path = written(whole, tmp_path / "evil.engine", calling("aten::save", arguments, [1, 4], in0="p_token"))
    with pytest.raises(FileError, match="aten::save"):
        load(path, device="cpu")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["evil.engine", "secret"]
    assert secret.stat() == before


def test_nothing_is_imported(
    whole: Contents, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own form of a structure names a module and a class, and importing runs code."""
    (tmp_path / "evil_module.py").write_text(
        f"open({str(tmp_path / 'done')!r}, 'w')\nclass Kind(tuple): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    named = {"type": "evil_module.Kind", "context": '["evil_module", "Kind"]', "children_spec": []}
    namedtuple = {"type": "collections.namedtuple", "context": '"evil_module.Kind"', "children_spec": []}
    structures: list[Any] = [named, namedtuple, [1, named], [1, namedtuple], {"evil_module.Kind": []}]
    for structure in (*structures, json.dumps([1, named])):
        for change in ({"structure": structure}, {"arguments": structure}):
            path = written(whole, tmp_path / "evil.engine", partial(_updated, change))
            with pytest.raises(FileError, match="holds no valid network: a structure that"):
                load(path, device="cpu")
    assert not (tmp_path / "done").exists() and "evil_module" not in sys.modules


OUTSIDE = [
    "aten::add.out", "aten::cat.out", "aten::set_.source_Tensor", "aten::set_", "aten::resize_", "aten::resize",
    "aten::as_strided", "aten::as_strided_", "aten::as_strided_scatter", "aten::empty.memory_format",
    "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::rand", "aten::rand_like", "aten::bernoulli",
    "aten::multinomial", "aten::normal_", "aten::uniform_", "aten::from_file", "aten::save", "aten::_print",
    "aten::item",
    "aten::_local_scalar_dense", "aten::nonzero", "aten::_unsafe_index.Tensor", "aten::embedding_bag",
    "aten::_fft_c2r", "aten::_foobar", "aten::_test_string_default", "aten::_pin_memory", "aten::pin_memory",
    "aten::record_stream", "aten::_make_dep_token", "aten::_cudnn_init_dropout_state", "aten::data", "aten::set_data",
    "aten::requires_grad_", "aten::_fw_primal", "aten::_foreach_add_.Scalar", "aten::native_batch_norm",
    "aten::_native_batch_norm_legit", "aten::embedding_renorm_", "aten::mvlgamma", "aten::len.t",
    "aten::special_hermite_polynomial_h", "aten::to_sparse", "aten::quantize_per_tensor", "aten::_assert_async",
    "prims::mul", "prim::Print", "prim::PythonOp", "higher_order::cond", "torchvision::nms", "os::system",
    "aten::__class__", "aten::add.__init__", "aten::add.Tensor.op", "aten::", "aten", "", "aten::add.tensor",
    "aten::add.Tensor ", "aten::ADD", "../aten::add",
]  # fmt: skip


@pytest.mark.parametrize("target", OUTSIDE)
def test_other_operators_are_refused(target: str) -> None:
    with pytest.raises(OperatorError):
        require_pure(target, {"self": Reference("in0")})


def test_every_overload_that_passes_is_functional() -> None:
    """Among all operators of this PyTorch: none writes to an argument, returns anything but tensors, or is random."""
    passed = []
    for name in torch._C._dispatch_get_all_op_names():
        try:
            operator = require_pure(name, {"self": Reference("in0")})
        except OperatorError:
            continue
        passed.append(name)
        schema = operator._schema
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert written in ([], ["self"]), name  # the engine copies them first
        assert not any(argument.is_out or str(argument.type) == "Storage" for argument in schema.arguments), (
            name
        )
        assert not any(
            word in name for word in ("rand", "empty", "file", "save", "_unsafe_index", "strided")
        ), name
    assert len(passed) > 500


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("aten::scaled_dot_product_attention", {"dropout_p": 0.1}),
        ("aten::dropout", {"p": 0.5, "train": True}),
        ("aten::rrelu", {"training": Reference("in1")}),
        ("aten::batch_norm", {"running_mean": Reference("in1"), "training": True}),
        ("aten::instance_norm", {"running_mean": Reference("in1"), "use_input_stats": True}),
        ("aten::zeros", {"size": (1,), "pin_memory": True}),
        ("aten::relu_", {"self": 3}),
    ],
)
def test_pure_operators_may_be_called_impurely(target: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(OperatorError):
        require_pure(target, arguments)


@pytest.mark.parametrize(
    ("target", "arguments", "shape"),
    [
        ("aten::zeros", {"size": [2**40]}, [2**40]),
        ("aten::zeros", {"size": [2**30]}, [2**30]),
        ("aten::zeros", {"size": [2**62, 2**62]}, [2**62, 2**62]),
        ("aten::zeros", {"size": [4]}, [8]),
        ("aten::full", {"size": [2**20, 2**20], "fill_value": 1.0}, [2**20, 2**20]),
        ("aten::arange", {"end": 1e18}, [10**18]),
        ("aten::arange", {"end": float("nan")}, [4]),
        ("aten::repeat", {"self": value("in0"), "repeats": [2**20, 2**20]}, [2**20, 2**22]),
        ("aten::expand", {"self": value("in0"), "size": [2**29, 4]}, [2**29, 4]),
        ("aten::unbind.int", {"self": value("in0"), "dim": 9}, [4]),
        ("aten::tensor_split.sections", {"self": value("in0"), "sections": 2**40}, [4]),
        ("aten::add.Tensor", {"self": value("in0"), "other": value("in9")}, [1, 4]),
        ("aten::add.Tensor", {"self": value("in0")}, [1, 4]),
        ("aten::add.Tensor", {"self": value("in0"), "other": 1, "unknown": 2}, [1, 4]),
        ("aten::relu", {"self": value("in0")}, [4, 1]),
        ("aten::relu", {"self": [[value("in0")]]}, [1, 4]),
        ("aten::relu", {"self": {"a": value("in0")}}, [1, 4]),
        ("aten::_weight_norm", {"v": value("in0"), "g": value("in0"), "dim": 0}, [1, 4]),
        ("aten::native_group_norm", {"input": value("in0"), "weight": None, "bias": None, "N": 9, "C": 4, "HxW": 9,
                                     "group": 1, "eps": 0.1}, [1, 4]),
    ],
)  # fmt: skip
def test_sizes_are_not_believed(
    whole: Contents, tmp_path: pathlib.Path, target: str, arguments: dict[str, Any], shape: list[int]
) -> None:
    inputs = {"in0": "p_token"} if "in0" in json.dumps(arguments) else {}
    path = written(whole, tmp_path / "false.engine", calling(target, arguments, shape, **inputs))
    with pytest.raises(FileError, match="holds no valid network"):
        load(path, device="cpu")


@pytest.mark.parametrize(
    ("target", "sizes", "arguments"),
    [
        ("aten::_weight_norm", {"v": (4, 3), "g": (3, 1)}, {"dim": 0}),
        ("aten::_weight_norm", {"v": (4, 3), "g": (4, 1)}, {"dim": 2}),
        ("aten::_weight_norm_interface", {"v": (4, 3), "g": (1, 1)}, {}),
        ("aten::_weight_norm", {"v": (0,), "g": (0,)}, {}),
        ("aten::_weight_norm", {"g": (4, 1)}, {"v": 3}),
        ("aten::lstm.input", {"input": (1, 2, 3)},
         {"params": (Reference("in1"),) * 3, "has_biases": False, "num_layers": 100, "bidirectional": False}),
        ("aten::gru.input", {}, {"params": (), "has_biases": True, "num_layers": 0, "bidirectional": True}),
        ("aten::native_group_norm", {"input": (2, 4, 9)}, {"N": 2, "C": 4, "HxW": 10}),
        ("aten::native_group_norm", {"input": (2, 4, 9), "weight": (3,)}, {"N": 2, "C": 4, "HxW": 9}),
        ("aten::upsample_nearest1d", {"self": (1, 1, 4)}, {"output_size": (8,), "scales": 1e-30}),
        ("aten::upsample_bilinear2d", {"self": (1, 1, 4, 4)}, {"output_size": (8, 8), "scales_h": 2.0, "scales_w": 9}),
        ("aten::upsample_bicubic2d", {"self": (1, 1, 4, 4)}, {"output_size": (8, 8), "scales_w": float("nan")}),
    ],
)  # fmt: skip
def test_sizes_that_pytorch_does_not_look_at(target: str, sizes: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match="does not take tensors of these sizes"):
        require_matching_sizes(target, sizes, arguments)


def test_sizes_that_fit() -> None:
    require_matching_sizes("aten::_weight_norm", {"v": (4, 3), "g": (4, 1)}, {})
    require_matching_sizes(
        "aten::native_group_norm", {"input": (2, 4, 9), "bias": (4,)}, {"N": 2, "C": 4, "HxW": 9}
    )
    image = {"self": (1, 1, 4, 4)}
    require_matching_sizes(
        "aten::upsample_bilinear2d", image, {"output_size": (8, 10), "scales_h": 2.0, "scales_w": 2.6}
    )
    require_matching_sizes("aten::upsample_bilinear2d", image, {"output_size": (9, 9)})
    require_matching_sizes("aten::relu", {"self": (4,)}, {})


@pytest.mark.parametrize(
    "data",
    [
        [], "tuple", 3, {}, {"tuple": None}, {"tuple": {}}, {"set": []}, {"tuple": [], "list": []}, {"list": [0]},
        {"dict": [["a", None], ["a", None]]}, {"dict": [[True, None]]}, {"dict": [["a"]]}, {"dict": {"a": None}},
        {"dict": [[["a"], None]]}, {"collections.OrderedDict": []},
    ],
)  # fmt: skip
def test_structures_that_are_none(data: Any) -> None:
    with pytest.raises(TreeError):
        structure_from_json(data)
    deep: Any = None
    for _ in range(10_000):
        deep = {"tuple": [deep]}
    with pytest.raises(TreeError, match="nested containers"):
        structure_from_json(deep)


@pytest.mark.parametrize("text", ["\x1b[2Jcleared", "two\nlines", "\u202eturned"])
def test_texts_do_nothing_to_a_terminal(text: str, whole: Contents, tmp_path: pathlib.Path) -> None:
    for change in ({"notes": [text]}, {"nodes": [["n", "relu", {}, {}, [], "float32", text]]}):
        with pytest.raises(FileError, match="expected one printable line") as refused:
            load(written(whole, tmp_path / "text.engine", partial(_updated, change)), device="cpu")
        assert text not in str(refused.value)


def test_many_values_of_constants_are_too_much(whole: Contents, tmp_path: pathlib.Path) -> None:
    """Each alone is within its bounds; together they are not."""

    def change(graph: Any) -> None:
        for number in range(40):
            attributes = {"target": "aten::zeros", "arguments": {"size": [2**22]}}
            graph["nodes"].append([f"zeros{number}", "aten", {}, attributes, [2**22], "float32", ""])

    with pytest.raises(FileError, match="constant folding would compute"):
        load(written(whole, tmp_path / "large.engine", change), device="cpu")


def test_sizes_are_checked_for_each_batch(tmp_path: pathlib.Path) -> None:
    """A shape rule that is right for a few batch sizes, and wrong for another."""

    class Few(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.ops.aten.slice_copy(x, 0, 0, 4))

    engine = compile(Few(), torch.randn(2, 5))
    engine.save(tmp_path / "few.engine")
    contents = Contents.of(tmp_path / "few.engine")
    contents.graph["batches"] = [1, None]
    contents.graph["inputs"][0][1] = [{"$batch": 1}, 5]
    for node in contents.graph["nodes"]:
        node[4] = [{"$batch": 1}, 5]
    (tmp_path / "few.engine").write_bytes(contents.written())
    for device in ("cpu", "twin"):
        again = load(tmp_path / "few.engine", device=device)
        x = torch.randn(9, 5)
        with pytest.raises(
            GraphError, match=r"it returns torch.float32 \[4, 5\]; the graph declares .* \[9, 5\]"
        ):
            again(x)
    torch.testing.assert_close(again(x[:3]), torch.relu(x[:3]))


def test_false_sizes_do_not_reach_the_kernels(tmp_path: pathlib.Path) -> None:
    """Each size of every node is changed in turn: the twin, which lacks a GPU's bounds, is never launched."""
    layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Softmax(-1))
    compile(layers, torch.randn(2, 4)).save(tmp_path / "right.engine")
    contents = Contents.of(tmp_path / "right.engine")
    shapes = [node[4] for node in contents.graph["nodes"]] + [contents.graph["inputs"][0][1]]
    for shape in shapes:
        for position, right in enumerate(list(shape)):
            for false in (1, 2, 7, 100_000, 2**31, {"$batch": 3}):
                if false == right:
                    continue
                shape[position] = false
                (tmp_path / "false.engine").write_bytes(contents.written())
                with pytest.raises(FileError):
                    load(tmp_path / "false.engine", device="twin")
            shape[position] = right
    (tmp_path / "false.engine").write_bytes(contents.written())
    load(tmp_path / "false.engine", device="twin")


def test_every_size_and_type_of_every_kind_matters(whole: Contents, tmp_path: pathlib.Path) -> None:
    changed = Contents(whole.metadata, json.loads(whole.metadata["graph"]), whole.tensors)
    tried: set[tuple[str, str]] = set()
    for node in changed.graph["nodes"]:
        for position, right in enumerate(list(node[4])):
            node[4][position] = 6 if right != 6 else 12
            _refused(changed, tmp_path)
            node[4][position] = right
        right, node[5] = node[5], "int16" if node[5] != "int16" else "int32"
        _refused(changed, tmp_path)
        node[5] = right
        if node[1] == "aten":
            continue
        for role in list(node[2]):
            right = node[2].pop(role)
            signature = BY_NAME[node[1]].signature
            given = signature.role(role) if signature is not None else None
            if given is None or not (given.constant and given.optional):
                _refused(changed, tmp_path)
            node[2][role] = right
        for name in list(node[3]):
            if (node[1], name) in tried:
                continue
            tried.add((node[1], name))
            right = node[3][name]
            for false in ("?", -1, [0], [1, 2, 3], [-1, 1], [2**40, 1], {"$batch": 1}, float("nan")):
                if node[1] == "fake_quantize" and false == -1:
                    continue  # a code like any other
                node[3][name] = false
                _refused(changed, tmp_path)
            node[3][name] = right
    for name, tensor in whole.tensors.items():
        changed.tensors = {**whole.tensors, name: torch.cat([tensor, tensor])}
        if name != "b_order":  # it selects any number of channels, so its reader has another size
            _refused(changed, tmp_path)


def _refused(contents: Contents, folder: pathlib.Path) -> None:
    path = folder / "changed.engine"
    replaced(path, contents.written())
    with pytest.raises(FileError):
        load(path, device="cpu")


HEADERS: dict[str, Any] = {
    "overlapping": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                    "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
    "beyond the end": {"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}},
    "backwards": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
    "too large": {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}},
    "negative": {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
    "another size": {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
    "unknown type": {"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
    "not a number": {"a": {"dtype": "F32", "shape": [float("nan")], "data_offsets": [0, 8]}},
    "no tensors": {"a": 3},
    "a list": [1, 2, 3],
    "metadata": {"__metadata__": {"format": 3}},
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADERS)
def test_false_headers_are_refused(kind: str, tmp_path: pathlib.Path) -> None:
    header = json.dumps(HEADERS[kind]).encode()
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(FileError, match="not an Escalade engine file"):
        load(tmp_path / "f", device="cpu")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 100_000_001, 9, 0])
def test_false_header_lengths_are_refused(length: int, tmp_path: pathlib.Path) -> None:
    (tmp_path / "f").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(FileError, match="not an Escalade engine file"):
        load(tmp_path / "f", device="cpu")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "NaN", "[" * 100_000, '{"a":1,"a":2}', "9" * 5000, '{"nodes": []}', "\ud7ff"],
)
def test_graphs_that_are_none_are_refused(text: str, whole: Contents, tmp_path: pathlib.Path) -> None:
    import safetensors.torch

    from escalade.engine.file import _digest

    sha256 = _digest(text, "fp32", whole.tensors)
    metadata = {**whole.metadata, "graph": text, "sha256": sha256}
    (tmp_path / "f").write_bytes(safetensors.torch.save(whole.tensors, metadata))
    with pytest.raises(FileError, match="holds no valid network"):
        load(tmp_path / "f", device="cpu")


def test_other_files_are_refused(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in (
        tmp_path,
        tmp_path / "fifo",
        tmp_path / "loop",
        "/dev/null",
        "",
        tmp_path / ("n" * 300),
        "a\0b",
        None,
        3,
    ):
        with pytest.raises(FileError):
            load(place, device="cpu")  # type: ignore[arg-type]
    if os.geteuid():  # root reads everything
        (tmp_path / "closed").write_bytes(b"x")
        (tmp_path / "closed").chmod(0)
        with pytest.raises(FileError):
            load(tmp_path / "closed", device="cpu")


def test_a_captured_graph_is_sound(whole: Contents, tmp_path: pathlib.Path) -> None:
    """Captured graphs pass the checks of a file's graph, unless the reason that they cannot be saved is reported."""
    graph = compile(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)).graph
    check_graph(graph)
    with pytest.raises(EscaladeError, match="more than one value is named x"):
        graph.constants["x"] = torch.zeros(1)
        graph.inputs = (graph.inputs[0].__class__("x", graph.inputs[0].shape, "float32"), *graph.inputs[1:])
        check_graph(graph)
