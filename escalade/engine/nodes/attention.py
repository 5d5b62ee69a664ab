"""Attention: the products, the softmax between them, its bias and its mask as one node."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
import torch.nn.functional as F
from torch.utils import dlpack

from escalade.engine.graph.aten import has_rows
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import CAPTURE, FOLDED, AtenCall, Match, Operator, Tensors, match_aten
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.signature import (
    COUNT,
    EPSILON,
    FLAG,
    RESULT,
    Attributes,
    Role,
    Signature,
    SizeError,
    Sizes,
    one_of,
)
from escalade.engine.nodes.views import CHANNELS_LAST, Permute
from escalade.errors import UnsupportedError
from escalade.ops.attention import ATTENTION, ORDERS, AttentionProblem, at_of
from escalade.ops.base.dtypes import full_vector

OPERANDS = ("q", "k", "v")
_HEADS = Role((3, 16))
_BIAS_STEP = 8
"""Keys per row of a constant bias are padded to a multiple of this, so that rows are aligned."""


class Attention(Operator):
    """softmax(scale * q kᵀ + bias) v; q is [..., heads, queries, size], k and v [..., heads, keys, size].

    The result has the memory order `order`: `bqh` is [..., queries, heads, size]. Operands of three dimensions have no
    heads. A bias is [batch][heads][queries][keys], of which each may be 1, and the batch a divisor; rows of a constant
    are padded. In a plan, `q_at` and others have the offset and strides at which an operand is read from another value,
    and `q_of_pixels` is True if that is an image in NHWC.
    """

    name = "attention"
    signature = Signature(
        {**dict.fromkeys(OPERANDS, _HEADS), "bias": Role((4, 4), optional=True)},
        {
            "scale": EPSILON, "causal": FLAG, "order": one_of(*ORDERS), "size": COUNT, "keys": COUNT,
        },
    )  # fmt: skip
    values = (*OPERANDS, "bias")
    preferred_layout = "nchw"

    @match_aten("scaled_dot_product_attention", phases=(CAPTURE, FOLDED))
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        q, k, v = (call.value(name) for name in ("query", "key", "value"))
        mask, given, causal = call.value("attn_mask"), call("attn_mask"), call("is_causal", False)
        if q is None or k is None or v is None or {q, k, v} & graph.constants.keys():
            return None
        if call("dropout_p", 0.0) or (given is not None and causal):
            return None
        bias = None if mask is None else self._bias(node, mask, graph)
        if mask is not None and bias is None:
            return None
        return self.of(node, q, k, v, bias, call("scale"), graph, causal)

    @classmethod
    def of(
        cls,
        node: Node,
        q: str,
        k: str,
        v: str,
        bias: str | None,
        scale: float | None,
        graph: Graph,
        causal: bool,
    ) -> Node | None:
        """Return attention in place of a node that has its result; None if no node describes it."""
        shapes = [graph.shape_of(one) for one in (q, k, v)]
        queries, keys, values = shapes
        is_alike = all(shape[:-2] == queries[:-2] for shape in shapes) and queries[-1] == keys[-1]
        numbers = [size for shape in shapes for size in (shape[-2:] if len(shape) == 3 else shape[-3:])]
        if graph.typed or len(queries) < 3 or not is_alike or keys[-2] != values[-2]:
            return None
        if not all(type(size) is int for size in numbers):
            return None
        if any(graph.dtype_of(one) != graph.dtype_of(q) for one in (k, v)) or not node.is_floating:
            return None
        if scale is not None and scale < 0:
            return None
        size, count = keys[-1], keys[-2]
        assert isinstance(size, int) and isinstance(count, int)
        attributes = {
            "scale": size**-0.5 if scale is None else float(scale), "causal": causal, "size": size, "keys": count,
        }  # fmt: skip
        inputs = {"q": q, "k": k, "v": v, "bias": bias}
        if len(queries) == 3:
            return cls.instead_of(node, inputs, **attributes, order="bhq")
        made = cls.instead_of(node, inputs, **attributes, order="bqh")
        order = (*range(len(queries) - 3), len(queries) - 2, len(queries) - 3, len(queries) - 1)
        shape = tuple(node.shape[dim] for dim in order)
        name = graph.add(
            Node(f"{node.name}_rows", cls.name, made.inputs, made.attributes, shape, node.dtype, node.source)
        )
        return Permute.instead_of(node, {"x": name}, order=order)

    @staticmethod
    def _bias(node: Node, mask: str, graph: Graph) -> str | None:
        """Return a mask as a bias of four dimensions; None if it cannot be one."""
        sizes, keys = graph.shape_of(mask), AtenCall(node).value("key")
        assert keys is not None
        if mask in graph.constants:
            lead = sizes[:-3] if len(node.shape) == 4 else sizes[:-2]
            is_supported = len(sizes) <= 4 and all(size in (1, node.shape[0]) for size in lead)
            of_items = len(node.shape) == len(sizes) == 3  # operands without heads
            make = _additive_of_items if of_items else additive
            return graph.derive_constant(f"{node.name}_bias", mask, make) if is_supported else None
        whole = (*node.shape[:-1], graph.shape_of(keys)[-2])
        is_supported = len(sizes) == len(whole) == 4 and graph.dtype_of(mask).is_floating_point
        fits = all(size in (1, full) for size, full in zip(sizes, whole, strict=False))
        return mask if is_supported and fits else None

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        q, k, v = (self._operand(node, role, inputs[role]) for role in OPERANDS)
        bias = inputs.get("bias")
        if bias is not None:
            bias = bias[..., : a["keys"]].to(q.dtype)
            bias = bias.repeat(len(q) // len(bias), 1, 1, 1) if len(bias) > 1 else bias
        y = F.scaled_dot_product_attention(q, k, v, bias, is_causal=a["causal"], scale=a["scale"])
        return y.permute(ORDERS[a["order"]]).reshape(node.shape)  # type: ignore[arg-type]

    @staticmethod
    def _operand(node: Node, role: str, x: torch.Tensor) -> torch.Tensor:
        """Return an operand as [batch][heads][tokens][size]."""
        if f"{role}_at" in node.attributes:
            (offset, *strides) = node.attributes[f"{role}_at"]
            x = (x.permute(CHANNELS_LAST) if node.attributes[f"{role}_of_pixels"] else x).contiguous()
            sizes = _problem(node, {}).sizes(role)
            return x.as_strided(sizes, (*strides, 1), x.storage_offset() + offset)
        return x.unsqueeze(1) if x.dim() == 3 else x.reshape(-1, *x.shape[-3:])

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        *lead, queries, size = sizes["q"]
        keys, value_size = sizes["v"][-2:]
        order, heads = attributes["order"], lead[-1] if len(lead) > 1 else 1
        if attributes["size"] != size or attributes["keys"] != keys or (order == "bhq") != (len(lead) == 1):
            raise SizeError(
                f"q is {list(sizes['q'])} and v {list(sizes['v'])}, but attributes say {attributes}"
            )
        items, *bias = sizes.get("bias", (1, 1, 1, 1))
        fits = bias[0] in (1, heads) and bias[1] in (1, queries) and (bias[2] == 1 or bias[2] >= keys)
        if not fits or items < 1 or (prod(lead) // heads) % items:
            raise SizeError(f"bias is {[items, *bias]} for scores of {[*lead, queries, keys]}")
        result: Sizes = (*lead[:-1], queries, lead[-1], value_size)
        if order == "bhq":
            result = (*lead, queries, value_size)
        elif order == "qbh" and len(lead) == 2:
            result = (queries, *lead, value_size)
        return {"k": (*lead, keys, size), "v": (*lead, keys, value_size), RESULT: result}

    def lower(self, node: Node, forms: Forms) -> Lowered:
        bias = node.inputs.get("bias")
        sizes = {} if bias is None else {"bias": forms.sizes(bias)}
        problem = _problem(node, sizes, forms.dtype)
        for role in OPERANDS:
            if forms.value(node.inputs[role]).dtype != forms.value(node.name).dtype:
                raise UnsupportedError("operands of attention differ in dtype")
        return Lowered(ATTENTION, problem)


def _problem(node: Node, sizes: Mapping[str, Sizes], dtype: str = "fp32") -> AttentionProblem:
    """Return the problem of a node with fixed sizes, and a bias of these sizes."""
    a, shape = node.attributes, tuple(size for size in node.shape if isinstance(size, int))
    keys, order = a["keys"], a["order"]
    if order == "qbh":
        queries, batch, heads, value_size = shape
    elif order == "bqh":
        batch, queries, heads, value_size = prod(shape[:-3]), *shape[-3:]
    else:
        batch, heads, queries, value_size = shape[0], 1, *shape[-2:]
    bias = sizes.get("bias", ())
    row = bias[3] if bias else 0
    if bias:
        bias = (*bias[:3], min(row, keys))
    at = {f"{role}_at": a.get(f"{role}_at", ()) for role in OPERANDS}
    return AttentionProblem(
        batch, heads, queries, keys, a["size"], value_size, a["scale"], a["causal"], bias, row, **at, order=order,
        dtype=dtype,
    )  # fmt: skip


def additive(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as a bias of four dimensions with padded rows; where a boolean one is False, -inf."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
    mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
    padding = -mask.shape[-1] % _BIAS_STEP if mask.shape[-1] > 1 else 0
    return F.pad(mask, (0, padding)).contiguous()


def _additive_of_items(mask: torch.Tensor) -> torch.Tensor:
    """Return `additive` of a mask [batch][queries][keys]."""
    return additive(mask.unsqueeze(1))


def in_place(node: Node, role: str, view: torch.Tensor, layout: str, dtype: str) -> Node | None:
    """Return the node with one operand replaced by another value, of which that operand is a view.

    That value is stored in `layout`. None if its kernels cannot read these strides.
    """
    heads = view.unsqueeze(1) if view.dim() == 3 else view
    try:
        heads = heads.view(prod(heads.shape[:-3]), *heads.shape[-3:])
    except RuntimeError:  # batch items are not one stride apart
        return None
    strides = [
        stride if size > 1 else 0 for size, stride in zip(heads.shape[:3], heads.stride(), strict=False)
    ]
    at, offset = at_of((*strides, heads.stride(3)), full_vector(dtype)), int(heads.storage_offset())
    if at is None or offset % full_vector(dtype) or offset >= 2**31:
        return None
    return node.with_attributes(**{f"{role}_at": (offset, *at[1:]), f"{role}_of_pixels": layout == "nhwc"})


LSE_STEP = 32
"""PyTorch's memory-efficient kernels pad each row of logsumexps to a multiple of this."""
FLASH_STEP, BIAS_ROW = 8, 16
"""Elements per head, and keys per row of a bias, are padded to multiples of these for PyTorch's kernels."""


class AttentionBias(Operator):
    """A bias [items][heads][queries][keys] as PyTorch's attention reads it: in the dtype of q, rows padded.

    Several items repeat up to the batch. With `masked`, numbers below the range of the dtype stay finite.
    """

    name = "attention_bias"
    preferred_layout = "nchw"

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        (bias,) = inputs.values()
        dtype = getattr(torch, node.dtype)
        if node.attributes["masked"]:
            bias = bias.clamp(min=torch.finfo(dtype).min)
        whole = bias.new_zeros(node.shape, dtype=dtype)  # type: ignore[arg-type]
        items, keys = bias.shape[0], bias.shape[3]
        whole.unflatten(0, (-1, items))[..., :keys].copy_(bias)
        return whole


class _PyTorchAttention(Operator):
    """Attention of a training step, by PyTorch's fused kernels, which store no scores.

    `kernel` is `flash`, or `efficient`, which takes a bias and fp32. A node has one result of the call.
    """

    preferred_layout = "nchw"
    values = (*OPERANDS, "bias", "gradient", "y", "logsumexp")
    reads_views = True

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        result = self.results(node, inputs)[node.attributes["result"]]
        assert result is not None
        return result

    def title(self, node: Node) -> str:
        return f"{node.attributes['kernel']} {self.name.replace('_', ' ')}"


class AttentionForward(_PyTorchAttention):
    """y = softmax(scale * q kᵀ + bias) v of [batch][heads][tokens][size]; second result: logsumexps of the scores.

    The bias is that of an `AttentionBias`; its batch, heads or queries may be 1.
    """

    name = "attention_forward"

    def results(self, node: Node, inputs: Tensors) -> tuple[torch.Tensor | None, ...]:
        a, (q, k, v) = node.attributes, (inputs[role] for role in OPERANDS)
        bias = _expanded_bias(inputs.get("bias"), q, k)
        if q.device.type == "cpu":
            scores = _scores(q, k, bias, a["scale"])
            sums = scores.logsumexp(-1)
            y = (scores - sums.unsqueeze(-1)).exp() @ v.to(scores.dtype)
            padding = -q.shape[-2] % LSE_STEP if a["kernel"] == "efficient" else 0
            return y.to(q.dtype), F.pad(sums, (0, padding))
        q, k, v, value_size = *map(_padded_rows, (q, k, v)), v.shape[-1]
        if a["kernel"] == "flash":
            y, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=a["scale"])
        else:
            y, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, bias, True, scale=a["scale"]
            )
        return y[..., :value_size], sums


class AttentionBackward(_PyTorchAttention):
    """Gradients of q, k and v of an `AttentionForward`, and that of its bias, if any.

    `of_bias` is `full`, for a gradient of each score, `summed`, for their sum over the batch in fp32, or empty.
    """

    name = "attention_backward"

    def results(self, node: Node, inputs: Tensors) -> tuple[torch.Tensor | None, ...]:
        a, (gradient, y, q, k, v) = node.attributes, (inputs[r] for r in ("gradient", "y", *OPERANDS))
        bias, sums = _expanded_bias(inputs.get("bias"), q, k), inputs["logsumexp"]
        if q.device.type == "cpu":
            found = _gradients(gradient, (q, k, v), bias, y, sums[..., : q.shape[-2]], a["scale"])
        else:
            found = self._by_kernels(node, bias, gradient, y, sums, q, k, v)
        sizes = q.shape[-1], k.shape[-1], v.shape[-1]
        *own, of_scores = (*(one[..., :size] for one, size in zip(found, sizes, strict=False)), found[3:])
        if not a["of_bias"]:
            return tuple(own)
        summed = a["of_bias"] == "summed"
        return (*own, of_scores[0].sum(0, keepdim=True, dtype=torch.float32) if summed else of_scores[0])

    @staticmethod
    def _by_kernels(
        node: Node, bias: torch.Tensor | None, gradient: torch.Tensor, y: torch.Tensor, sums: torch.Tensor,
        *operands: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        scale, aten = node.attributes["scale"], torch.ops.aten
        gradient, y, q, k, v = map(_padded_rows, (gradient, y, *operands))
        # Unread without dropout.
        if node.attributes["kernel"] == "flash":
            seed, offset = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in ((2,), ()))
            return aten._scaled_dot_product_flash_attention_backward(
                gradient, q, k, v, y, sums, None, None, q.shape[-2], k.shape[-2], 0.0, False, seed, offset,
                scale=scale,
            )  # fmt: skip
        seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
        if q.is_cuda:
            # Gradients of operands in one storage, as the arena is for all, would share one as well, and not be dense.
            k = dlpack.from_dlpack(dlpack.to_dlpack(k))
        wanted = [True, True, True, bool(node.attributes["of_bias"])]
        return aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, bias, y, sums, seed, offset, 0.0, wanted, scale=scale
        )


def _expanded_bias(bias: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    if bias is None:
        return None
    rows = bias if has_rows(bias) else bias.contiguous()
    return rows[..., : k.shape[-2]].expand(*q.shape[:-1], k.shape[-2])


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    """Return rows that PyTorch's kernels can read: contiguous, aligned, and multiples of `FLASH_STEP` long."""
    if x.shape[-1] % FLASH_STEP:
        return F.pad(x, (0, -x.shape[-1] % FLASH_STEP))
    return x if has_rows(x) else x.contiguous()


def _scores(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    scores = q.float() @ k.float().mT * scale
    return scores if bias is None else scores + bias


def _gradients(
    gradient: torch.Tensor,
    operands: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    y: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v and the scores plus bias."""
    q, k, v = (one.float() for one in operands)
    weights = (_scores(q, k, bias, scale) - sums.unsqueeze(-1)).exp()
    gradient, y = gradient.float(), y.float()
    of_scores = weights * (gradient @ v.mT - (gradient * y).sum(-1, keepdim=True))
    found = of_scores @ k * scale, of_scores.mT @ q * scale, weights.mT @ gradient, of_scores
    return tuple(one.to(operands[0].dtype) for one in found)
