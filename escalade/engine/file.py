"""Engine files: safetensors with the weights, the graph as JSON in the metadata, and optionally plans and machine code.

A file contains no pickles and no Python code, and nothing is imported because a file names it. Its data is validated as
a whole before any of it is used. The checksum detects damage; it is not a signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
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
from escalade.engine.aot import CODE_PREFIX, NO_ARTIFACTS, AotArtifacts, from_json
from escalade.engine.check import GraphError, check_graph
from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Batch, Graph, Input, Node, Reference
from escalade.engine.graph.trees import TreeError, structure_from_json, structure_to_json
from escalade.engine.nodes.signature import is_real
from escalade.errors import EscaladeError

FORMAT = "escalade-engine"
VERSION = 6
READ = ("2", "3", "4", "5", "6")
"""Format versions that can be read. Version 2 has no plans and machine code."""
_WITHOUT_PARAMETERS = ("2", "3")
"""Versions whose files do not store the names of the model's arguments."""
_WITHOUT_WEIGHTS = ("2", "3", "4")
"""Versions whose files do not store the names of the model's weights."""
_WITHOUT_MEANS = ("2", "3", "4", "5")
"""Versions whose files do not store the means of channels."""
_METADATA = ("format", "version", "dtype", "graph", "sha256")
_ARTIFACTS_KEY = "carried"
"""Metadata key of plans and machine code, absent if there are none."""
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


class FileError(EscaladeError):
    """A file that is not an engine, is damaged, or is from a newer Escalade; or an engine that cannot be saved."""


def write(
    graph: Graph, dtype: str, path: str | os.PathLike[str], artifacts: AotArtifacts = NO_ARTIFACTS
) -> None:
    """Save the captured graph of an engine, with its dtype and artifacts for GPUs.

    The file is written under a temporary name in the same folder and then renamed, so that readers never see half of it
    and a failure leaves the previous file. Symbolic links and permissions are kept.
    """
    target = _resolve(path)
    text, tensors = _contents(graph)
    artifacts_json = artifacts.to_json() if artifacts.plans else ""
    tensors |= artifacts.tensors()
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "dtype": dtype,
        "graph": text,
        **({_ARTIFACTS_KEY: artifacts_json} if artifacts_json else {}),
        "sha256": _digest(text, dtype, tensors, artifacts_json),
    }
    temporary = target.with_name(f".escalade-{os.urandom(8).hex()}")
    try:
        if target.exists() and not target.is_file():
            raise FileError(f"{path} cannot be written: it exists and is not a regular file")
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        # Keep the permissions of the file being replaced; a new file gets the umask's.
        mode = (target if target.exists() else temporary).stat().st_mode
        temporary.chmod(0o600)
        save_file(tensors, temporary, metadata)
        temporary.chmod(stat.S_IMODE(mode))
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:
        raise FileError(f"{path} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def fingerprint(graph: Graph, dtype: str) -> str:
    """Return a hash of what an engine computes: its captured graph, weights and dtype.

    Compiling the same network again gives the same hash, although the files may differ in the order of their entries.
    """
    text, tensors = _contents(graph)
    return _digest(text, dtype, tensors)


def read(path: str | os.PathLike[str], device: torch.device) -> tuple[Graph, str, AotArtifacts]:
    """Return the captured graph of a file with constants on `device`, the engine's dtype, and the artifacts."""
    with reading(path, device) as found:
        return found


@contextmanager
def reading(path: str | os.PathLike[str], device: torch.device) -> Iterator[tuple[Graph, str, AotArtifacts]]:
    """Yield what `read` returns, and verify the checksum by the end of the block, in a thread.

    Hashing the weights takes longer than most of what is done with them. If the file is damaged, that is the error
    raised, whatever else failed because of it.
    """
    metadata, tensors = _read(_resolve(path))
    artifacts_json = metadata.pop(_ARTIFACTS_KEY, "")
    with thread_pool(1) as pool:
        digest = pool.submit(
            _digest, metadata.get("graph", ""), metadata.get("dtype", ""), tensors, artifacts_json
        )

        def require_whole() -> None:
            if metadata.get("sha256") != digest.result():
                raise FileError(f"{path} is damaged: its contents do not match its checksum")

        try:
            found = _network(metadata, tensors, artifacts_json, device)
        except (_Malformed, GraphError, TreeError) as error:
            require_whole()
            raise FileError(f"{path} holds no valid network: {error}") from error
        try:
            yield found
        except OperatorError as error:  # raised by constant folding
            require_whole()
            raise FileError(f"{path} holds no valid network: {error}") from error
        except Exception:
            require_whole()
            raise
        require_whole()


def _network(
    metadata: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    artifacts_json: str,
    device: torch.device,
) -> tuple[Graph, str, AotArtifacts]:
    if set(metadata) != set(_METADATA):
        raise _Malformed(f"its metadata are {_listed(metadata)}")
    artifacts = _read_artifacts(artifacts_json, tensors)
    constants = {
        name: tensor
        for name, tensor in tensors.items()
        if not artifacts_json or not name.startswith(CODE_PREFIX)
    }
    names_arguments = metadata["version"] not in _WITHOUT_PARAMETERS
    names_weights = metadata["version"] not in _WITHOUT_WEIGHTS
    has_means = metadata["version"] not in _WITHOUT_MEANS
    graph = _graph_from_json(_parsed(metadata["graph"], names_arguments, names_weights, has_means), constants)
    if not names_arguments:
        graph.parameters = _parameters_from_inputs(graph)
    check_graph(graph)
    return to_device(graph, device), metadata["dtype"], artifacts


def to_device(graph: Graph, device: torch.device) -> Graph:
    """Return the captured graph with its constants on another device."""
    # Weights that two names share stay shared, and are copied once.
    distinct = {id(tensor): tensor for tensor in graph.constants.values()}
    moved = {key: tensor.to(device) for key, tensor in distinct.items()}
    return replace(graph, constants={name: moved[id(tensor)] for name, tensor in graph.constants.items()})


def _read_artifacts(text: str, tensors: Mapping[str, torch.Tensor]) -> AotArtifacts:
    if not text:
        return NO_ARTIFACTS
    try:
        return from_json(text, tensors)
    except ValueError as error:
        raise _Malformed(str(error)) from error


class _Malformed(EscaladeError):
    """Data that does not follow the file format."""


def _resolve(path: str | os.PathLike[str]) -> pathlib.Path:
    try:
        return pathlib.Path(os.path.realpath(pathlib.Path(path)))
    except (TypeError, ValueError, OSError) as error:
        raise FileError(f"{path!r} is not a valid path: {error}") from error


def _read(path: pathlib.Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the metadata, and copies of the tensors: safetensors maps the file, which may be written later.

    No tensor is read from a file that is not an engine, which may be large.
    """
    try:
        if not path.is_file():
            raise FileError(f"{path} {'is not a regular file' if path.exists() else 'does not exist'}")
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            _require_format(path, metadata)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return metadata, tensors
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise FileError(f"{path} is not an Escalade engine file, or is damaged: {error}") from error


def _require_format(path: pathlib.Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise FileError(f"{path} is not an Escalade engine file")
    if metadata.get("version") not in READ:
        raise FileError(
            f"{path} has file format version {metadata.get('version')!r}; this Escalade reads versions {READ[0]} to "
            f"{READ[-1]}. Compile the model again and save it"
        )


def _contents(graph: Graph) -> tuple[str, dict[str, torch.Tensor]]:
    """Return a graph as JSON, and its distinct constants."""
    captured = graph.copy()
    captured.remove_dead_code()
    try:
        check_graph(captured)
        tensors, shared = _distinct(captured.constants)
        return json.dumps(_graph_to_json(captured, shared)), tensors
    except (GraphError, TreeError) as error:
        raise FileError(f"this engine cannot be saved: {error}") from error


def _distinct(constants: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the distinct constants, and for each duplicate the name it is stored under."""
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


def _digest(graph: str, dtype: str, tensors: Mapping[str, torch.Tensor], artifacts: str = "") -> str:
    digest = hashlib.sha256(f"{dtype}\n{graph}{artifacts}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _graph_to_json(graph: Graph, shared: Mapping[str, str]) -> dict[str, Any]:
    return {
        "inputs": [[entry.name, _to_json(entry.shape), entry.dtype] for entry in graph.inputs],
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
        "means": {name: list(means) for name, means in graph.means.items()},
        "notes": graph.notes,
        "weights": {
            "names": {name: key for name, key in graph.weight_names.items() if name in graph.constants},
            "derived": {name: of for name, (of, _) in graph.derived.items() if name in graph.constants},
            "fixed": sorted(graph.fixed_weights),
            "state": None if graph.state_shapes is None else _to_json(graph.state_shapes),
        },
    }  # fmt: skip


def _parameters_from_inputs(graph: Graph) -> tuple[str, ...]:
    """Derive the names of positional arguments from the inputs, for files of versions that do not store them."""
    positional, _ = pytree.tree_unflatten(range(len(graph.inputs)), graph.arguments)
    is_plain = positional == tuple(range(len(positional)))
    return tuple(entry.name for entry in graph.inputs[: len(positional)]) if is_plain else ()


def _parsed(text: str, names_arguments: bool, names_weights: bool, has_means: bool) -> dict[str, Any]:
    try:
        data = parsing.parse_unique(text)
    except ValueError as error:
        raise _Malformed(f"its graph is not valid JSON: {error}") from error
    return _record(
        data, "graph",
        {
            "inputs": list, "nodes": list, "constants": dict, "outputs": list, "structure": object, "arguments": object,
            "output_types": list, "batches": list, "ranges": dict, "notes": list,
            **({"parameters": list} if names_arguments else {}), **({"weights": dict} if names_weights else {}),
            **({"means": dict} if has_means else {}),
        },
    )  # fmt: skip


def _record(data: Any, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Check that `data` is an object with exactly these fields and types."""
    if type(data) is not dict or data.keys() != fields.keys():
        raise _Malformed(f"a {what} needs the fields {_listed(fields)}")
    for (name, kind), value in zip(fields.items(), (data[name] for name in fields), strict=True):
        _require(isinstance(value, kind), f"{name} of a {what} is not a {getattr(kind, '__name__', kind)}")
    return data


def _row(data: Any, what: str, kinds: tuple[type, ...]) -> list[Any]:
    """Check that `data` is a list with items of exactly these types."""
    if type(data) is not list or len(data) != len(kinds):
        raise _Malformed(f"a {what} must be a list of {len(kinds)}")
    for value, kind in zip(data, kinds, strict=True):
        _require(type(value) is kind, f"a {what} has a {type(value).__name__}; expected a {kind.__name__}")
    return data


def _texts(values: Iterable[Any], what: str) -> list[str]:
    """Check that all values are strings that are safe to print on a terminal."""
    found = list(values)
    for value in found:
        _require(
            type(value) is str and value.isprintable(), f"{what} is {value!r}; expected one printable line"
        )
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
        f"its constants do not match its tensors: {_listed(set(stored) ^ tensors.keys())}",
    )
    _texts(data["ranges"], "a value with a range")
    _require(len(data["batches"]) == 2, "its batches are not a minimum and a maximum")
    return Graph(
        inputs=tuple(_input_from_json(entry) for entry in data["inputs"]),
        nodes={node.name: node for node in nodes},
        constants={name: tensors[found] for name, found in zip(data["constants"], stored, strict=True)},
        outputs=tuple(_texts(data["outputs"], "an output")),
        structure=structure_from_json(data["structure"]),
        arguments=structure_from_json(data["arguments"]),
        parameters=tuple(_texts(data.get("parameters", ()), "an argument's name")),
        output_types=tuple(_texts(data["output_types"], "the dtype of an output")),
        batches=(data["batches"][0], data["batches"][1]),
        ranges=data["ranges"],
        means=_means_from_json(data.get("means", {})),
        notes=_texts(data["notes"], "a note"),
        is_trusted=False,
        **_weights_from_json(data.get("weights", {"names": {}, "derived": {}, "fixed": [], "state": None})),
    )


def _means_from_json(data: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    _texts(data, "a value with means")
    for name, means in data.items():
        _require(type(means) is list and all(map(is_real, means)), f"the means of {name} are {means!r}")
    return {name: tuple(means) for name, means in data.items()}


def _weights_from_json(data: Any) -> dict[str, Any]:
    """Return the fields of a graph that describe the model's weights."""
    fields = {"names": dict, "derived": dict, "fixed": list, "state": dict | None}
    found = _record(data, "list of weights", fields)
    state = found["state"]
    _texts(
        (*found["names"], *found["names"].values(), *found["derived"], *found["derived"].values()), "a weight"
    )
    _texts((*found["fixed"], *(state or ())), "a weight")
    for shape in (state or {}).values():
        _require(
            type(shape) is list and all(type(size) is int and size >= 0 for size in shape),
            f"a weight has the shape {shape!r}",
        )
    return {
        "weight_names": found["names"],
        "derived": {name: (source, None) for name, source in found["derived"].items()},
        "fixed_weights": frozenset(found["fixed"]),
        "state_shapes": None if state is None else {name: tuple(shape) for name, shape in state.items()},
    }


def _input_from_json(entry: Any) -> Input:
    name, shape, dtype = _row(entry, "input", (str, list, str))
    return Input(name, _from_json(shape), dtype)


def _node_from_json(entry: Any) -> Node:
    name, op, inputs, attributes, shape, dtype, source = _row(
        entry, "node", (str, str, dict, dict, list, str, str)
    )
    _texts((name, *inputs.values(), source), "a name in a node")
    found = _from_json(attributes)
    _require(type(found) is dict, f"node {name} has {found!r} for attributes")
    return Node(name, op, inputs, found, _from_json(shape), dtype, source)


_WORDS = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout))
}
"""Dtypes, memory formats and layouts of PyTorch by name, as they occur in operator arguments."""


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
    raise _Malformed(f"{word} of {item!r} is not a valid value in a graph")
