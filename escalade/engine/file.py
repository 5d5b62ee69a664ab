"""Engines as files: a safetensors file with the weights, whose metadata holds the graph as JSON; and, if wanted, with
plans for cards and machine code.

No pickle, no Python code, nothing that is imported because a file names it: what is read back is data, checked as a
whole before any of it is used. The checksum tells damage; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

from escalade import parsing
from escalade.device.precompilation import thread_pool
from escalade.engine.aot import NOTHING, TENSOR, Carried, from_json
from escalade.engine.check import GraphError, check_graph
from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Batch, Graph, Input, Node, Reference
from escalade.engine.graph.trees import TreeError, structure_from_json, structure_to_json
from escalade.errors import EscaladeError

FORMAT = "escalade-engine"
VERSION = 4
READ = ("2", "3", "4")
"""The versions of the format that are read: this one and those before. The second has no plans and machine code."""
_WITHOUT_PARAMETERS = ("2", "3")
"""Versions whose files do not say what the model calls its arguments."""
_METADATA = ("format", "version", "dtype", "graph", "sha256")
_CARRIED = "carried"
"""The metadata of plans and machine code, where there are any."""
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


class FileError(EscaladeError):
    """A file that is no engine, or is damaged, or comes from a newer Escalade; an engine that no file can hold."""


def write(graph: Graph, dtype: str, path: str | os.PathLike[str], carried: Carried = NOTHING) -> None:
    """Saves the captured graph of an engine of a dtype, with what it is to carry for GPUs.

    The file is written beside its place and moved there, so that a reader never sees half of it. A link stays a link,
    permissions stay what they were, and what a failure leaves is the file that was there before.
    """
    place = _place(path)
    text, tensors = _contents(graph)
    brought = carried.to_json() if carried.plans else ""
    tensors |= carried.tensors()
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "dtype": dtype,
        "graph": text,
        **({_CARRIED: brought} if brought else {}),
        "sha256": _digest(text, dtype, tensors, brought),
    }
    temporary = place.with_name(f".escalade-{secrets.token_hex(8)}")
    try:
        if place.exists() and not place.is_file():
            raise FileError(f"{path} cannot be written: it is there, and is no file")
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        # As the file that is there has it, or the user's umask: what was for its owner's eyes stays so.
        mode = (place if place.exists() else temporary).stat().st_mode
        temporary.chmod(0o600)
        save_file(tensors, temporary, metadata)
        temporary.chmod(stat.S_IMODE(mode))
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, place)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:
        raise FileError(f"{path} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def fingerprint(graph: Graph, dtype: str) -> str:
    """A hash of what an engine computes: its captured graph, its weights and its dtype.

    It is the same whenever the same network is compiled; two files of it may differ, in the order of what they list.
    """
    text, tensors = _contents(graph)
    return _digest(text, dtype, tensors)


def read(path: str | os.PathLike[str], device: torch.device) -> tuple[Graph, str, Carried]:
    """The captured graph of a file, for an engine on that device, the engine's dtype, and what the file carries."""
    with reading(path, device) as found:
        return found


@contextmanager
def reading(path: str | os.PathLike[str], device: torch.device) -> Iterator[tuple[Graph, str, Carried]]:
    """What `read` gives, and when it is left the file is known to be whole: the hash of its weights takes longer than
    most that is done with them. Damage is what is said first, whatever has come of it."""
    metadata, tensors = _read(_place(path))
    brought = metadata.pop(_CARRIED, "")
    with thread_pool(1) as beside:
        digest = beside.submit(
            _digest, metadata.get("graph", ""), metadata.get("dtype", ""), tensors, brought
        )

        def require_whole() -> None:
            if metadata.get("sha256") != digest.result():
                raise FileError(f"{path} is damaged: its contents do not match its checksum")

        try:
            found = _network(metadata, tensors, brought, device)
        except (_Malformed, GraphError, TreeError) as refusal:
            require_whole()
            raise FileError(f"{path} holds no network: {refusal}") from refusal
        try:
            yield found
        except OperatorError as refusal:  # among what is computed from constants alone
            require_whole()
            raise FileError(f"{path} holds no network: {refusal}") from refusal
        except Exception:
            require_whole()
            raise
        require_whole()


def _network(
    metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor], brought: str, device: torch.device
) -> tuple[Graph, str, Carried]:
    if set(metadata) != set(_METADATA):
        raise _Malformed(f"its metadata are {_listed(metadata)}")
    carried = _carried(brought, tensors)
    constants = {
        name: tensor for name, tensor in tensors.items() if not brought or not name.startswith(TENSOR)
    }
    names_arguments = metadata["version"] not in _WITHOUT_PARAMETERS
    graph = _graph_from_json(_parsed(metadata["graph"], names_arguments), constants)
    if not names_arguments:
        graph.parameters = _taken_by_name(graph)
    check_graph(graph)
    return elsewhere(graph, device), metadata["dtype"], carried


def elsewhere(graph: Graph, device: torch.device) -> Graph:
    """Return the captured graph with its constants on another device."""
    # Weights that two names share stay shared, and are copied once.
    distinct = {id(tensor): tensor for tensor in graph.constants.values()}
    moved = {key: tensor.to(device) for key, tensor in distinct.items()}
    return replace(graph, constants={name: moved[id(tensor)] for name, tensor in graph.constants.items()})


def _carried(text: str, tensors: Mapping[str, torch.Tensor]) -> Carried:
    if not text:
        return NOTHING
    try:
        return from_json(text, tensors)
    except ValueError as error:
        raise _Malformed(str(error)) from error


class _Malformed(EscaladeError):
    """Data that is not in the file's form."""


def _place(path: str | os.PathLike[str]) -> pathlib.Path:
    """The file that a path leads to, links followed."""
    try:
        return pathlib.Path(os.path.realpath(pathlib.Path(path)))
    except (TypeError, ValueError, OSError) as error:
        raise FileError(f"{path!r} is no path of a file: {error}") from error


def _read(path: pathlib.Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The metadata, and tensors in memory of their own: who writes to the file later changes no engine.

    Of a file that is no engine, which may be large, no tensor is read.
    """
    try:
        if not path.is_file():
            what = "it is there, and is no file" if path.exists() else "there is nothing of that name"
            raise FileError(f"there is no file {path}: {what}")
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            _require_format(path, metadata)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return metadata, tensors
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise FileError(f"{path} is not an engine that Escalade has saved, or is damaged: {error}") from error


def _require_format(path: pathlib.Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise FileError(f"{path} is not an engine that Escalade has saved")
    if metadata.get("version") not in READ:
        raise FileError(
            f"{path} has version {metadata.get('version')!r} of the file format; this Escalade reads versions "
            f"{READ[0]} to {READ[-1]}. Compile the model again and save it"
        )


def _contents(graph: Graph) -> tuple[str, dict[str, torch.Tensor]]:
    """What a file holds of a graph: its text, and its constants."""
    captured = graph.copy()
    captured.remove_dead_code()
    try:
        check_graph(captured)
        tensors, shared = _distinct(captured.constants)
        return json.dumps(_graph_to_json(captured, shared)), tensors
    except (GraphError, TreeError) as error:
        raise FileError(f"this engine cannot be saved: {error}") from error


def _distinct(constants: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Weights that a model uses twice are written once; the second result says under which name."""
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in constants.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in seen:
            shared[name] = seen[key]
            continue
        seen[key] = name
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, shared


def _digest(graph: str, dtype: str, tensors: Mapping[str, torch.Tensor], carried: str = "") -> str:
    digest = hashlib.sha256(f"{dtype}\n{graph}{carried}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _graph_to_json(graph: Graph, shared: Mapping[str, str]) -> dict[str, Any]:
    return {
        "inputs": [[given.name, _to_json(given.shape), given.dtype] for given in graph.inputs],
        "nodes": [
            [
                node.name, node.op, dict(node.inputs), _to_json(node.attributes), _to_json(node.shape), node.dtype,
                node.source,
            ]
            for node in graph
        ],
        "constants": {name: shared.get(name, name) for name in graph.constants},
        "outputs": list(graph.outputs),
        "structure": structure_to_json(graph.structure),
        "arguments": structure_to_json(graph.arguments),
        "parameters": list(graph.parameters),
        "output_types": list(graph.output_types),
        "batches": list(graph.batches),
        "ranges": dict(graph.ranges),
        "notes": graph.notes,
    }  # fmt: skip


def _taken_by_name(graph: Graph) -> tuple[str, ...]:
    """The names of arguments that are tensors in order, and that older files have for the inputs alone."""
    given, _ = pytree.tree_unflatten(range(len(graph.inputs)), graph.arguments)
    is_plain = given == tuple(range(len(given)))
    return tuple(entry.name for entry in graph.inputs[: len(given)]) if is_plain else ()


def _parsed(text: str, names_arguments: bool) -> dict[str, Any]:
    try:
        data = parsing.parse_unique(text)
    except ValueError as error:
        raise _Malformed(f"its graph is no JSON: {error}") from error
    return _record(
        data, "graph",
        {
            "inputs": list, "nodes": list, "constants": dict, "outputs": list, "structure": object, "arguments": object,
            "output_types": list, "batches": list, "ranges": dict, "notes": list,
            **({"parameters": list} if names_arguments else {}),
        },
    )  # fmt: skip


def _record(data: Any, what: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """An object with just these fields, each of its type."""
    if type(data) is not dict or data.keys() != fields.keys():
        raise _Malformed(f"a {what} has {_listed(fields)}")
    for (name, kind), value in zip(fields.items(), (data[name] for name in fields), strict=True):
        _require(isinstance(value, kind), f"{name} of a {what} is no {kind.__name__}")
    return data


def _row(data: Any, what: str, kinds: tuple[type, ...]) -> list[Any]:
    """A list with just these items."""
    if type(data) is not list or len(data) != len(kinds):
        raise _Malformed(f"a {what} is a list of {len(kinds)}")
    for value, kind in zip(data, kinds, strict=True):
        _require(type(value) is kind, f"a {what} has a {type(value).__name__} for a {kind.__name__}")
    return data


def _texts(values: Iterable[Any], what: str) -> list[str]:
    """The values as texts that a terminal can show."""
    found = list(values)
    for value in found:
        _require(type(value) is str and value.isprintable(), f"{what} is {value!r}; it is a text of one line")
    return found


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise _Malformed(sentence)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _graph_from_json(data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Graph:
    nodes = [_node_from_json(entry) for entry in data["nodes"]]
    _require(len({node.name for node in nodes}) == len(nodes), "two nodes have the same name")
    stored = _texts(data["constants"].values(), "a constant's tensor")
    _require(
        set(stored) == tensors.keys(),
        f"its constants are not its tensors: {_listed(set(stored) ^ tensors.keys())}",
    )
    _texts(data["ranges"], "a value with a range")
    _require(len(data["batches"]) == 2, "its batches are not the least and the largest")
    return Graph(
        inputs=tuple(_input_from_json(entry) for entry in data["inputs"]),
        nodes={node.name: node for node in nodes},
        constants={name: tensors[found] for name, found in zip(data["constants"], stored, strict=True)},
        outputs=tuple(_texts(data["outputs"], "an output")),
        structure=structure_from_json(data["structure"]),
        arguments=structure_from_json(data["arguments"]),
        parameters=tuple(_texts(data.get("parameters", ()), "what the model calls an argument")),
        output_types=tuple(_texts(data["output_types"], "the type of an output")),
        batches=(data["batches"][0], data["batches"][1]),
        ranges=data["ranges"],
        notes=_texts(data["notes"], "a note"),
        is_trusted=False,
    )


def _input_from_json(entry: Any) -> Input:
    name, shape, dtype = _row(entry, "input", (str, list, str))
    return Input(name, _from_json(shape), dtype)


def _node_from_json(entry: Any) -> Node:
    name, op, inputs, attributes, shape, dtype, source = _row(
        entry, "node", (str, str, dict, dict, list, str, str)
    )
    _texts((name, *inputs.values(), source), "what a node is called or reads")
    found = _from_json(attributes)
    _require(type(found) is dict, f"node {name} has {found!r} for attributes")
    return Node(name, op, inputs, found, _from_json(shape), dtype, source)


_WORDS = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout))
}
"""What is a name among the arguments of PyTorch's operators."""


def _to_json(value: Any) -> Any:
    match value:
        case Batch(times):
            return {"$batch": times}
        case Reference(role):
            return {"$value": role}
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {key: _to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [_to_json(item) for item in value]
        case torch.device():
            return {"$device": str(value)}
        case torch.dtype() | torch.memory_format() | torch.layout():
            return {"$torch": str(value).removeprefix("torch.")}
    raise FileError(f"a plan argument of type {type(value).__name__} cannot be saved: {value!r}")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _from_json(item) for key, item in value.items()}
    ((word, item),) = value.items() if len(value) == 1 else ((_listed(value), None),)
    if word == "$batch" and type(item) is int:
        return Batch(item)
    if word == "$value" and type(item) is str:
        return Reference(item)
    if word == "$device" and type(item) is str and _DEVICE.fullmatch(item):
        return torch.device(item)
    if word == "$torch" and type(item) is str and item in _WORDS:
        return _WORDS[item]
    raise _Malformed(f"{word} of {item!r} is nothing that a graph can hold")
