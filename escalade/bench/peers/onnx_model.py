"""A network as an ONNX model, for systems that read one: exported by PyTorch, its norms folded before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from escalade.bench.peers.catalogue import Peer, peer_of
from escalade.bench.peers.network import Unavailable, tensors

INPUT = "x"
"""How the model calls what goes in."""


def require(system: str) -> Peer:
    """The peer of that name, if all that it needs is installed; else `Unavailable`."""
    peer = peer_of(system)
    if peer.refusal:
        raise Unavailable(f"{system} {peer.refusal}")
    return peer


def exported(model: nn.Module, x: torch.Tensor) -> bytes:
    """The model for an input of just this size and type; what it computes in between is of that type too."""
    program: Any = torch.onnx.export(model, (x,), input_names=[INPUT], dynamo=True, verbose=False)
    return bytes(program.model_proto.SerializeToString())


def results_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Memory for the results, as ONNX has them: dense, in PyTorch's order of dimensions."""
    with torch.no_grad():
        return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in tensors(model(x))]
