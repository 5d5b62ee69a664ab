"""Nearly valid engine files: changed bytes, or a changed graph with a new checksum."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import torch

from tests.engine.files import Contents

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63 - 1, 2**63, -(2**63), 10**40, 0.5, -1.5, math.nan, math.inf, 1e308,
    "", "x", "y", "tanh", "in0", "in7", "../x", "a\nb", "\x1b[2J", [], [0], [1, -1], [[]], [None], {}, {"a": 1},
    {"$batch": 1}, {"$batch": 0}, {"$batch": -2}, {"$batch": 2**62}, {"$batch": "x"}, {"$value": "in0"},
    {"$value": "in9"}, {"$value": 3}, {"$device": "cpu"}, {"$device": "meta"}, {"$device": "cuda:99999"},
    {"$torch": "float16"}, {"$torch": "int64"}, {"$torch": "quint8"}, {"$torch": "sparse_coo"}, {"$torch": "load"},
    {"$torch": "float32", "$batch": 1}, {"$": 1}, {"tuple": [None]}, {"list": [None]}, {"dict": [["a", None]]},
    {"dict": [["a", None], ["a", None]]}, {"dict": [[None, None]]}, {"builtins.eval": [None]},
)  # fmt: skip
WORDS = (
    "conv2d", "linear", "relu", "add", "softmax", "reshape", "aten", "stem", "mlp", "convert", "quantise", "normalise",
    "float32", "float16", "int64", "bool", "uint8", "complex64", "float8_e4m3fn", "quint8", "load", "aten::cat",
    "aten::relu", "aten::add.Tensor", "aten::add.out", "aten::add_.Tensor", "aten::zeros", "aten::empty.memory_format",
    "aten::arange", "aten::repeat", "aten::expand", "aten::view", "aten::as_strided", "aten::from_file", "aten::save",
    "aten::set_.source_Tensor", "aten::resize_", "aten::rand_like", "aten::unbind.int", "aten::_fft_c2r", "aten::max",
    "aten::where", "aten::mean", "aten::t", "prims::mul", "higher_order::cond", "os::system", "aten::__class__",
)  # fmt: skip


def mutated_bytes(whole: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, truncated, removed or inserted."""
    data = bytearray(whole)
    place = draw.randrange(len(data)) if draw.random() < 0.7 else draw.randrange(min(16, len(data)))
    match draw.randrange(5):
        case 0:
            data[place] ^= 1 << draw.randrange(8)
        case 1:
            data[place] = draw.randrange(256)
        case 2:
            del data[place:]
        case 3:
            del data[place : place + draw.randint(1, 40)]
        case 4:
            data[place:place] = draw.randbytes(draw.randint(1, 40))
    return bytes(data)


def mutated_contents(contents: Contents, draw: random.Random) -> Contents:
    """One or two changes: mostly in the graph, sometimes in the tensors or the dtype."""
    graph = json.loads(contents.metadata["graph"])
    changed = Contents(dict(contents.metadata), graph, dict(contents.tensors))
    for _ in range(draw.choice((1, 1, 1, 2))):
        match draw.randrange(10):
            case 0:
                _change_tensor(changed, draw)
            case 1:
                _change_reference(changed, draw)
            case _:
                _change_graph(changed, draw)
    if draw.random() < 0.02:
        changed.metadata["dtype"] = draw.choice(("fp16", "bf16", "fp8", "int4", ""))
    return changed


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in the tree with each of its keys."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield data, key
        yield from _places(value)


def _change_graph(contents: Contents, draw: random.Random) -> None:
    places = list(_places(contents.graph))
    if not places:
        return
    parent, key = draw.choice(places)
    value = parent[key]
    match draw.randrange(8):
        case 0:
            del parent[key]
        case 1:
            parent[key] = copy.deepcopy(draw.choice(ODD))
        case 2 if isinstance(parent, list):
            parent.insert(draw.randint(0, len(parent)), copy.deepcopy(value))
        case 2 | 3 if isinstance(parent, dict):
            parent[draw.choice(("extra", "$batch", "x", "stride", "result"))] = copy.deepcopy(value)
        case 4:
            other, place = draw.choice(places)
            parent[key], other[place] = other[place], parent[key]
        case _ if type(value) is int:
            parent[key] = draw.choice((value + 1, value - 1, value * 2, -value, 0, 2**40))
        case _ if type(value) is float:
            parent[key] = draw.choice((value * 2, -value, 0.0, math.inf, math.nan, 3))
        case _ if type(value) is str:
            strings = [place[at] for place, at in places if isinstance(place[at], str)]
            parent[key] = draw.choice((draw.choice(WORDS), draw.choice(strings)))
        case _ if isinstance(value, list) and value:
            draw.shuffle(value)
        case _:
            parent[key] = copy.deepcopy(draw.choice(ODD))


def _change_reference(contents: Contents, draw: random.Random) -> None:
    """A node reads another value, or moves to another position."""
    nodes = contents.graph.get("nodes")
    if not isinstance(nodes, list) or len(nodes) < 2:
        return
    if draw.random() < 0.5:
        one, two = draw.sample(range(len(nodes)), 2)
        nodes[one], nodes[two] = nodes[two], nodes[one]
        return
    names = [node[0] for node in nodes if isinstance(node, list) and node] + list(contents.tensors)
    node = draw.choice(nodes)
    if isinstance(node, list) and len(node) > 2 and isinstance(node[2], dict) and node[2]:
        node[2][draw.choice(list(node[2]))] = draw.choice(names)


def _change_tensor(contents: Contents, draw: random.Random) -> None:
    if not contents.tensors:
        return
    name = draw.choice(list(contents.tensors))
    tensor = contents.tensors[name]
    match draw.randrange(7):
        case 0:
            contents.tensors[name] = tensor.reshape(-1)[: draw.randint(0, tensor.numel())].clone()
        case 1:
            contents.tensors[name] = tensor.unsqueeze(draw.randint(0, tensor.dim())).contiguous()
        case 2:
            dtypes = (torch.float16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)
            contents.tensors[name] = tensor.to(draw.choice(dtypes))
        case 3:
            contents.tensors[name] = torch.cat([tensor.unsqueeze(0), tensor.unsqueeze(0)])
        case 4:
            contents.tensors[name] = torch.full_like(tensor, 99)
        case 5:
            contents.tensors[f"{name}_more"] = tensor.clone()
        case 6:
            del contents.tensors[name]
