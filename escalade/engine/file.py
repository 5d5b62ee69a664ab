"""Engines as files: a safetensors file with the weights, whose metadata holds the graph as JSON.

No pickle, no Python code: what is read back is data, checked against a hash before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from escalade.engine.engine import MOST_PLANS, Engine
from escalade.engine.graph import Batch, Graph, Input, Node, Reference
from escalade.errors import EscaladeError

FORMAT = "escalade-engine"
VERSION = 1


class FileError(EscaladeError):
    """A file that is no engine, or is damaged, or comes from a newer Escalade."""


def save(engine: Engine, path: str | os.PathLike[str]) -> None:
    """Written beside its place and moved there, so that a reader never sees half of it."""
    path = pathlib.Path(path)
    tensors, shared = _distinct(engine.graph.constants)
    graph = json.dumps(_graph_to_json(engine.graph, shared))
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "dtype": engine.dtype,
        "graph": graph,
        "sha256": _digest(graph, engine.dtype, tensors),
    }
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error}") from error
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


def load(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None, plans: int = MOST_PLANS
) -> Engine:
    """The engine of a file; on the GPU if there is one, unless a device is named ("cpu", "twin", "cuda:1")."""
    metadata, tensors = _read(pathlib.Path(path))
    if metadata.get("format") != FORMAT:
        raise FileError(f"{path} is not an engine that Escalade has saved")
    if metadata.get("version") != str(VERSION):
        raise FileError(
            f"{path} has version {metadata.get('version')} of the file format; this Escalade reads version {VERSION}"
        )
    if metadata.get("sha256") != _digest(metadata.get("graph", ""), metadata.get("dtype", ""), tensors):
        raise FileError(f"{path} is damaged: its contents do not match its checksum")
    graph = _graph_from_json(json.loads(metadata["graph"]), tensors)
    where = device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    return Engine(graph, metadata["dtype"], where, plans)


def _read(path: pathlib.Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    if not path.is_file():
        raise FileError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{path} is not an engine that Escalade has saved, or is damaged: {error}") from error


def _distinct(constants: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Weights that a model uses twice are written once; the second result says under which name."""
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[int, Any, Any], str] = {}
    for name, tensor in constants.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in seen:
            shared[name] = seen[key]
            continue
        seen[key] = name
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, shared


def _digest(graph: str, dtype: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(f"{dtype}\n{graph}".encode())
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
        "structure": graph.structure,
        "arguments": graph.arguments,
        "output_types": list(graph.output_types),
        "batches": list(graph.batches),
        "ranges": dict(graph.ranges),
        "notes": graph.notes,
    }  # fmt: skip


def _graph_from_json(data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Graph:
    nodes = (
        Node(name, op, inputs, _from_json(attributes), _from_json(shape), dtype, source)
        for name, op, inputs, attributes, shape, dtype, source in data["nodes"]
    )
    return Graph(
        inputs=tuple(Input(name, _from_json(shape), dtype) for name, shape, dtype in data["inputs"]),
        nodes={node.name: node for node in nodes},
        constants={name: tensors[stored] for name, stored in data["constants"].items()},
        outputs=tuple(data["outputs"]),
        structure=data["structure"],
        arguments=data["arguments"],
        output_types=tuple(data["output_types"]),
        batches=(data["batches"][0], data["batches"][1]),
        ranges=data.get("ranges", {}),
        notes=list(data["notes"]),
    )


_TYPES = (torch.dtype, torch.memory_format, torch.layout, torch.device)


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
    if set(value) == {"$batch"}:
        return Batch(value["$batch"])
    if set(value) == {"$value"}:
        return Reference(value["$value"])
    if set(value) == {"$device"}:
        return torch.device(value["$device"])
    if set(value) == {"$torch"}:
        found = getattr(torch, value["$torch"], None)
        if not isinstance(found, _TYPES):
            raise FileError(f"torch.{value['$torch']} is nothing that a plan can hold")
        return found
    return {key: _from_json(item) for key, item in value.items()}
