"""Attention: softmax(scale * q kᵀ + bias) v per head, without storing the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Ints, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.accuracy import tf32_tolerance
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import ELEMENT_BYTES, MULTIPLIED, STORAGE, full_vector, multiplied_as
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Named, NamePattern, joined
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.base.switches import precision, round_to_tf32
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared.rows import LAYOUTS, check_fields

# --- the problem


MOST_SIZE = 128
"""Largest head: sums of 16 queries take half of a warp's registers."""
SIZE_STEP = 8
ORDERS = {"bhq": (0, 1, 2, 3), "bqh": (0, 2, 1, 3), "qbh": (2, 0, 1, 3)}
"""Memory orders of the result, by name: dimensions of [batch][heads][queries][size], outermost first."""
_NUMBERS = joined("x", r"\d+", int)
_Strides = tuple[int, int, int]


@dataclass(frozen=True)
class AttentionProblem(Named):
    """y = softmax(scale * q kᵀ + bias) v for each head of each batch item.

    q is [batch][heads][queries][size], k [batch][heads][keys][size], v [batch][heads][keys][value_size], or any other
    strides with contiguous heads. `tf32` means fp32 storage with TF32 products; the softmax is fp32. A query whose keys
    are all masked yields 0, as in `scaled_dot_product_attention`.
    """

    NAME: ClassVar = NamePattern(
        "attention",
        "{queries,keys}_h{heads}d{size}[v{value_size}]_b{batch}{causal?_causal}[_bias{bias}]"
        "[_row{bias_row}][_scale{scale}][_q{q_at}][_k{k_at}][_v{v_at}][_to{order:bhq|bqh|qbh}]",
        {"value_size": lambda problem: problem.size, "bias_row": lambda p: p.bias[3] if p.bias else 0},
        **dict.fromkeys(("bias", "q_at", "k_at", "v_at"), _NUMBERS),
    )

    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    value_size: int = 0
    """Elements per head of v and y; 0: `size`."""
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(size)."""
    causal: bool = False
    """Query i reads keys 0 to i."""
    bias: tuple[int, ...] = ()
    """Sizes of the bias: [batch][heads][queries][keys], each full or 1; a batch of any other size repeats. Empty
    without a bias."""
    bias_row: int = 0
    """Elements per row of the bias, which may be padded; 0: its keys."""
    q_at: tuple[int, ...] = ()
    """Offset, and strides of batch items, heads and tokens, in elements; empty: packed in this order."""
    k_at: tuple[int, ...] = ()
    v_at: tuple[int, ...] = ()
    order: str = "bhq"
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_size", self.value_size or self.size)
        if self.scale is not None and math.isclose(self.scale, self.size**-0.5, rel_tol=1e-7):
            object.__setattr__(self, "scale", None)
        sizes = {name: getattr(self, name) for name in ("heads", "queries", "keys", "size", "value_size")}
        check_fields("attention", self, MULTIPLIED, sizes)
        for name in ("size", "value_size"):
            size = sizes[name]
            if size % SIZE_STEP or not 2 * SIZE_STEP <= size <= MOST_SIZE:
                raise UnsupportedError(
                    f"{name} is {size}; attention supports heads of {2 * SIZE_STEP} to {MOST_SIZE} elements, in "
                    f"multiples of {SIZE_STEP}"
                )
        if self.scale is not None and not math.isfinite(self.scale):
            raise UnsupportedError(f"scale is {self.scale}: it must be finite")
        if self.order not in ORDERS:
            raise UnsupportedError(f"order is {self.order!r}; attention writes {', '.join(ORDERS)}")
        self._check_bias()
        for role in "qkv":
            at = getattr(self, f"{role}_at")
            if at and (len(at) != 4 or min(at) < 0 or max(at) >= 2**31):
                raise UnsupportedError(
                    f"{role}_at is {at}: it must be an offset and three strides, from 0 to 2^31 - 1"
                )
        self._check_reach()

    def _check_reach(self) -> None:
        """Reject strides and grids (CTAs of at least 8 queries) that exceed 32 bits."""
        for role in "qkvy":
            steps = zip(self.sizes(role), self.strides(role), strict=False)
            if any(step >= 2**31 for size, step in steps if size > 1):
                raise UnsupportedError(
                    f"{role} has strides {self.strides(role)}; attention supports strides below 2^31; split the batch"
                )
        if max(self.bias_strides) >= 2**31:
            raise UnsupportedError(f"bias has sizes {self.bias}; attention supports strides below 2^31")
        if self.batch * self.heads * ceil_div(self.queries, 8) >= 2**31:
            raise UnsupportedError(
                f"{self.batch} x {self.heads} heads of {self.queries} queries: attention counts CTAs in 32 bits; split "
                "the batch"
            )

    def _check_bias(self) -> None:
        if not self.bias:
            object.__setattr__(self, "bias_row", 0)
            return
        whole = (self.batch, self.heads, self.queries, self.keys)
        if len(self.bias) != 4 or any(
            size not in (1, full) for size, full in zip(self.bias[1:], whole[1:], strict=True)
        ):
            raise UnsupportedError(
                f"bias has sizes {self.bias}; each must be 1 or that of the scores, {whole}"
            )
        if self.bias[0] < 1:
            raise UnsupportedError(f"bias has {self.bias[0]} batch items; it must have at least 1")
        object.__setattr__(self, "bias_row", self.bias_row or self.bias[3])
        if self.bias_row < self.bias[3]:
            raise UnsupportedError(f"bias has rows of {self.bias[3]} keys, but bias_row is {self.bias_row}")

    @classmethod
    def packed(cls, batch: int, tokens: int, heads: int, size: int, **more: Any) -> Self:
        """Return self-attention that reads one projection [batch][tokens][3][heads][size] and writes rows of tokens."""
        each = heads * size
        at = [(part * each, tokens * 3 * each, size, 3 * each) for part in range(3)]
        return cls(
            batch, heads, tokens, tokens, size, q_at=at[0], k_at=at[1], v_at=at[2], order="bqh", **more
        )

    @property
    def factor(self) -> float:
        return self.size**-0.5 if self.scale is None else self.scale

    @property
    def scores(self) -> int:
        """Scores that are needed; a causal query has those of earlier keys."""
        skipped = min(self.queries, self.keys)
        return self.batch * self.heads * (
            self.queries * self.keys - (skipped * (skipped - 1) // 2 + skipped * (self.keys - skipped)
                                        if self.causal else 0)
        )  # fmt: skip

    @property
    def flops(self) -> int:
        """Two products, and per score: scale, maximum, difference, exponential, sum."""
        return self.scores * (2 * self.size + 2 * self.value_size + 5 + bool(self.bias))

    @property
    def bytes(self) -> int:
        per_head = self.queries * (self.size + self.value_size) + self.keys * (self.size + self.value_size)
        elements = self.batch * self.heads * per_head + (math.prod(self.bias) if self.bias else 0)
        return elements * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Sums over a head and over the keys, and exponentials of scores of about 8."""
        return 2.0**-24 * (8 + math.sqrt(1 + (self.size + self.keys) / 6))

    def sizes(self, role: str) -> tuple[int, int, int, int]:
        """Return the sizes of q, k, v or y in PyTorch's order."""
        tokens = self.queries if role in "qy" else self.keys
        return self.batch, self.heads, tokens, self.size if role in "qk" else self.value_size

    def strides(self, role: str) -> _Strides:
        """Return the strides of batch items, heads and tokens of q, k, v or y."""
        if role != "y" and getattr(self, f"{role}_at"):
            return getattr(self, f"{role}_at")[1:]
        sizes, found, step = self.sizes(role), {}, 1
        for dimension in reversed(ORDERS[self.order] if role == "y" else ORDERS["bhq"]):
            found[dimension] = step
            step *= sizes[dimension]
        return found[0], found[1], found[2]

    def offset(self, role: str) -> int:
        at = getattr(self, f"{role}_at")
        return at[0] if at else 0

    def extent(self, role: str) -> int:
        """Return the elements of q, k or v from the start of its buffer to its last element."""
        sizes = self.sizes(role)
        reach = sum((size - 1) * step for size, step in zip(sizes[:3], self.strides(role), strict=True))
        return self.offset(role) + reach + sizes[3]

    @property
    def bias_strides(self) -> tuple[int, int, int, int, int]:
        """Number of batch items of the bias, and its strides; 0 where it is broadcast."""
        if not self.bias:
            return 1, 0, 0, 0, 0
        items, heads, queries, _ = self.bias
        strides = heads * queries * self.bias_row, queries * self.bias_row, self.bias_row, 1
        batch, *others = (step * (size > 1) for step, size in zip(strides, self.bias, strict=True))
        return items, batch, *others  # type: ignore[return-value]


# --- the reference


def random_inputs(problem: AttentionProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Return normal deviates; keys a little longer, so that weights differ."""
    inputs = {}
    for role in "qkv":
        is_packed = not getattr(problem, f"{role}_at")
        sizes = problem.sizes(role) if is_packed else (problem.extent(role),)
        inputs[role] = draw.normal(*sizes, scale=1.5 if role == "k" else 1.0)
    if problem.bias:
        inputs["bias"] = draw.normal(*problem.bias[:3], problem.bias_row)
    return {name: tensor.to(STORAGE[problem.dtype]) for name, tensor in inputs.items()}


def empty_output(problem: AttentionProblem, device: torch.device) -> torch.Tensor:
    sizes = problem.sizes("y")
    ordered = [sizes[dimension] for dimension in ORDERS[problem.order]]
    return torch.empty(ordered, dtype=STORAGE[problem.dtype], device=device)


def operands(problem: AttentionProblem, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v as PyTorch has them."""
    found = (
        inputs[role].as_strided(
            problem.sizes(role),
            (*problem.strides(role), 1),
            inputs[role].storage_offset() + problem.offset(role),
        )
        for role in "qkv"
    )
    return next(found), next(found), next(found)


def mask_of(problem: AttentionProblem, inputs: Tensors) -> torch.Tensor | None:
    """Return the sum of all score masks: the bias, and -inf where a causal query reads nothing."""
    p, found = problem, inputs.get("bias")
    if found is not None:
        found = found[..., : p.bias[3]]
        found = found.repeat(ceil_div(p.batch, p.bias[0]), 1, 1, 1)[: p.batch] if p.bias[0] > 1 else found
    if p.causal:
        like = inputs["q"]
        later = torch.full((p.queries, p.keys), -torch.inf, dtype=like.dtype, device=like.device).triu(1)
        found = later if found is None else found + later
    return found


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Compute with PyTorch what `scaled_dot_product_attention` fuses."""
    return weights_of(q, k, mask, scale) @ v


def weights_of(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Return the softmax of the scores; zeros for a query whose keys are all masked."""
    scores = q @ k.mT * scale
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)


def exact(problem: AttentionProblem, inputs: Tensors) -> torch.Tensor:
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    y = written_out(*operands(problem, wide), mask_of(problem, wide), problem.factor)
    return y.permute(ORDERS[problem.order])


def peer(problem: AttentionProblem, inputs: Tensors) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype. The CPU has no TF32: there operands are rounded here."""
    if problem.dtype == "tf32" and not inputs["q"].is_cuda:
        inputs = {name: one if name == "bias" else round_to_tf32(one) for name, one in inputs.items()}
    q, k, v = operands(problem, inputs)
    is_causal = problem.causal and not problem.bias
    mask = None if is_causal else mask_of(problem, inputs)
    with precision(problem.dtype):
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=problem.factor)
    return y.permute(ORDERS[problem.order])


# --- rungs


def launch_arguments(problem: AttentionProblem, scale: float) -> tuple[Argument, ...]:
    itemsize = ELEMENT_BYTES[problem.dtype]
    given = (Buffer(role, problem.offset(role) * itemsize) for role in "qkv")
    shape = Ints.of("attention/attention.cuh", "AttentionShape", problem=problem)
    return (*given, Buffer("bias", optional=True), Buffer("y"), float(scale), shape)


class Naive(ThreadsRung[AttentionProblem]):
    threads = (128, 256, 64)

    def recipe(self, problem: AttentionProblem, config: ThreadsConfig) -> Recipe:
        program = Program.of("attention/naive.cu", problem=problem)
        grid = ceil_div(math.prod(problem.sizes("y")), config.threads)
        return launch(program, grid, config.threads, *launch_arguments(problem, problem.factor))


def _refuses_misaligned(rung: str, problem: AttentionProblem, elements: int) -> str | None:
    """Return why a rung with vector accesses does not support the problem."""
    numbers = [number for role in "qkv" for number in (problem.offset(role), *problem.strides(role))]
    if math.gcd(*numbers) % elements == 0:
        return None
    return f"{rung} reads {elements} elements at once; offsets and strides must be multiples of that"


@dataclass(frozen=True)
class OnlineConfig(Config):
    threads: int
    lanes: int
    """Lanes per query."""
    keys: int
    """Keys per tile."""


ONLINE_RATE = 0.25
"""Share of the fp32 rate that `online` reaches: one load from smem per four multiply-adds."""
CTA_LATENCY, TILE_LATENCY, KEY_LATENCY = 1500, 500, 50
"""Clocks that only other CTAs hide, guesses: of a CTA, its first loads and the store; of a tile of `mma`, barrier,
shuffles and products that depend on each other; of a key of `online`, its dot product and exponential."""


class Online(Rung[AttentionProblem, OnlineConfig]):
    def supports(self, problem: AttentionProblem) -> str | None:
        return _refuses_misaligned(self.name, problem, 4)

    def configs(self, problem: AttentionProblem) -> tuple[OnlineConfig, ...]:
        lanes = max(1, ceil_div(problem.size + problem.value_size, 32))
        lanes = min(8, 1 << (lanes - 1).bit_length())
        offered = [OnlineConfig(threads, lanes, 32) for threads in (128, 64, 256)]
        return (*offered, OnlineConfig(128, 2 * lanes if lanes < 8 else 4, 32))

    def recipe(self, problem: AttentionProblem, config: OnlineConfig) -> Recipe:
        program = Program.of("attention/online.cu", problem=problem, config=config, blocks_per_sm=0)
        tiles = ceil_div(problem.queries, config.threads // config.lanes)
        grid = tiles * problem.batch * problem.heads
        return launch(program, grid, config.threads, *launch_arguments(problem, problem.factor))

    def estimate(self, problem: AttentionProblem, config: OnlineConfig) -> float:
        rows = ceil_div(problem.queries, config.threads // config.lanes) * (config.threads // config.lanes)
        padded = problem.scores * rows / problem.queries * (2 * problem.size + 2 * problem.value_size + 40)
        waiting = (CTA_LATENCY + problem.keys * KEY_LATENCY) / self.card.rates.clock
        working = max(waiting, padded / (ONLINE_RATE * self.card.rates.fp32))
        return self.card.rates.launch_us + max(working, self.card.transfer_us(problem.bytes))


@dataclass(frozen=True)
class MmaConfig(Config):
    pair_warps: int
    """Warps per head of a batch item, with 16 queries each."""
    pairs: int
    """Heads of batch items per CTA."""
    keys: int
    """Keys per tile."""

    @property
    def rows(self) -> int:
        return 16 * self.pair_warps

    @property
    def threads(self) -> int:
        return 32 * self.pair_warps * self.pairs


WARP_ROWS = 16
MOST_WARPS = 8
MMA_RATE = 0.45
"""Share of the rate of mma.sync that its products reach, between the exponentials."""
EXPONENTIALS, LANES, SHARED_RATE = 16, 128, 128
"""Exponentials, multiplications and bytes of shared memory, each per clock and SM."""
ENOUGH_WARPS = 12
"""Warps per SM that keep its tensor cores busy between exponentials."""
MOST_REGISTERS = 230


class Mma(Rung[AttentionProblem, MmaConfig]):
    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.dtype == "fp32":
            return f"{self.name} multiplies on tensor cores, in fp16, bf16 or TF32; online takes fp32"
        return _refuses_misaligned(self.name, problem, full_vector(problem.dtype))

    def configs(self, problem: AttentionProblem) -> tuple[MmaConfig, ...]:
        """Return the tiles that fit into registers and shared memory, the lowest estimate first."""
        p, most = problem, ceil_div(problem.queries, WARP_ROWS)
        whole, half = (ceil_div(ceil_div(p.keys, parts), 16) * 16 for parts in (1, 2))
        offered = [
            MmaConfig(warps, pairs, keys)
            for keys in sorted({32, 64, 128, whole, half})
            if keys <= min(128, whole) and self._registers(p, keys) <= MOST_REGISTERS
            for warps in sorted({min(most, warps) for warps in (1, 2, 4, MOST_WARPS)})
            for pairs in (1, 2, 4, 8)
            if pairs == 1 or (warps == most and pairs * warps <= MOST_WARPS and pairs <= p.batch * p.heads)
        ]
        fitting = [one for one in offered if self._shared_bytes(p, one) <= self.card.shared_bytes]
        return tuple(sorted(fitting, key=lambda config: self.estimate(p, config))[:12])

    def recipe(self, problem: AttentionProblem, config: MmaConfig) -> Recipe:
        p = problem
        program = Program.of(
            "attention/mma.cu", problem=p, config=config, one_tile=config.keys >= p.keys,
            bias_pairs=p.bias_strides[4] == 1 and p.bias_row % 2 == 0, blocks_per_sm=0,
        )  # fmt: skip
        grid = ceil_div(p.queries, config.rows) * ceil_div(p.batch * p.heads, config.pairs)
        scale = p.factor if p.bias else p.factor * math.log2(math.e)
        arguments = launch_arguments(p, scale)
        return launch(program, grid, config.threads, *arguments, shared_bytes=self._shared_bytes(p, config))

    def tolerance(self, problem: AttentionProblem, peer_error: float) -> float:
        return tf32_tolerance(problem.dtype, problem.size, super().tolerance(problem, peer_error))

    @staticmethod
    def _registers(problem: AttentionProblem, keys: int) -> int:
        """Estimate the registers per thread: scores, queries and biases; with several tiles also the sums at once."""
        wide = ELEMENT_BYTES[problem.dtype] // 2
        biases = keys // 4 * wide if problem.bias else 0
        rest = 20 if keys >= problem.keys else 60 + problem.value_size // 2
        return keys // 2 + problem.size // 4 * wide + biases + rest

    @staticmethod
    def _shared_bytes(problem: AttentionProblem, config: MmaConfig) -> int:
        itemsize = ELEMENT_BYTES[problem.dtype]
        key = (2 * ceil_div(problem.size * itemsize, 32) + 1) * 16
        value = (problem.value_size * itemsize // 16 | 1) * 16
        stages = 1 if config.keys >= problem.keys else 2
        return config.pairs * (config.rows * max(key, value) + stages * config.keys * (key + value))

    def estimate(self, problem: AttentionProblem, config: MmaConfig) -> float:
        """Estimate from the busiest SM: products and exponentials, reads of smem, copies from L2, or latency."""
        p, rates, itemsize = problem, self.card.rates, ELEMENT_BYTES[problem.dtype]
        tiles, wide = ceil_div(p.keys, config.keys), ceil_div(p.size, 16) * 16 + p.value_size
        read = (tiles + 1) / 2 if p.causal else tiles
        rows, keys = config.pairs * config.rows, read * config.keys
        working = rows * keys * (wide * itemsize / 2 / (MMA_RATE * rates.mma_products) + 1 / EXPONENTIALS)
        if tiles > 1:  # sums are rescaled
            working += rows * read * p.value_size / LANES
        shared = rows / WARP_ROWS * keys * wide * itemsize / SHARED_RATE
        copied = (rows + config.pairs * keys) * wide + (rows * keys if p.bias else 0)
        copying = copied * itemsize / rates.copies.loads
        ctas = ceil_div(p.queries, config.rows) * ceil_div(p.batch * p.heads, config.pairs)
        per_sm = ceil_div(ctas, self.card.multiprocessors)
        resident = min(
            self.card.resident_blocks(self._shared_bytes(p, config)), 2048 // config.threads,
            self.card.registers // (config.threads * self._registers(p, config.keys)),
        )  # fmt: skip
        warps = max(1, min(resident, per_sm)) * config.threads // 32
        busy = min(1.0, 0.4 + 0.6 * warps / ENOUGH_WARPS)
        waiting = ceil_div(per_sm, max(1, resident)) * (CTA_LATENCY + read * TILE_LATENCY)
        return self.card.microseconds(max(per_sm * max(working / busy, shared, copying), waiting), p.bytes)


# Predictions are for the first stage of Swin-T at batch 32 in fp16, 6,144 heads of 49 tokens with a bias of 0.9 MB: 58
# MB in, 19 MB out, 18 us at copy rate; 0.9 G multiply-adds.
NAIVE = Naive("naive", "one thread per output, in three passes over the keys", None, None)
ONLINE = Online(
    "online",
    "keys and values in shared memory, one pass over them with an online softmax; a query in the registers of a few "
    "lanes",
    below="naive",
    # naive: 45 G multiply-adds with two loads each, 2.8 G warp requests, at half a request per clock and SM 24 ms.
    # online: with the padding of 49 rows to 64, 2.5 GFLOP and as many other instructions at 15 TFLOP/s: 0.25 ms.
    predicted_gain=100.0,
)
MMA = Mma(
    "mma",
    "flash attention on tensor cores: both products by mma.sync, scores and weights in registers, tiles of keys by "
    "cp.async",
    below="online",
    # 64 x 64 scores per head, 25 M: 191 k per SM, at 17 per clock for the products (45% of the rate: 8) and 16 for the
    # exponentials: 20 us; memory 18 us, of which most overlaps.
    predicted_gain=10.0,
)

# --- the operation


# Attention without a bias is one kernel of PyTorch's too. With many keys that is FlashAttention, whose wgmma runs at
# twice the rate of mma.sync; few keys leave it bound by its setup. With a bias PyTorch takes a slower kernel. In fp32,
# CUDA cores win for few keys only. Assumed, not measured: a measurement of a step decides first.
MOST_KEYS = 256
MOST_FP32_KEYS = 64


class AttentionOperation(Operation[AttentionProblem]):
    name = "attention"
    problem = AttentionProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("attention", (NAIVE, ONLINE, MMA))
    problems = (
        AttentionProblem.packed(2048, 49, 3, 32, bias=(64, 3, 49, 49), bias_row=56),
        AttentionProblem.packed(64, 49, 3, 32, bias=(64, 3, 49, 49), bias_row=56),
        AttentionProblem.packed(32, 49, 24, 32, bias=(1, 24, 49, 49), bias_row=56),
        AttentionProblem.packed(128, 64, 4, 48),
        AttentionProblem.packed(32, 197, 12, 64),
        AttentionProblem.packed(1, 197, 12, 64),
        AttentionProblem(32, 8, 64, 256, 64, order="bqh"),
        AttentionProblem.packed(8, 1024, 16, 64, causal=True),
    )
    """Windows of Swin-T's first stage at batch 32 and 1 and of its last stage, a mobile transformer, ViT-B, attention
    to other tokens, and a language model's."""
    small_problems = (
        AttentionProblem(1, 2, 49, 49, 16, bias=(1, 2, 49, 49)),
        AttentionProblem.packed(4, 9, 2, 32, bias=(2, 2, 9, 9), bias_row=16),
        AttentionProblem.packed(1, 21, 2, 64),
        AttentionProblem(1, 3, 5, 83, 16, value_size=40, scale=0.3, order="bqh"),
        AttentionProblem(3, 1, 37, 37, 24, causal=True, order="qbh"),
        AttentionProblem(1, 2, 20, 150, 48, value_size=24, causal=True, bias=(1, 1, 20, 1)),
        AttentionProblem(2, 1, 1, 1, 16),
        AttentionProblem(1, 1, 17, 33, 128, value_size=16, bias=(1, 1, 1, 33), scale=-0.2),
        AttentionProblem(1, 1, 3, 140, 80, value_size=128),
    )
    """Small problems: windows whose bias repeats, packed projections, heads that are no multiple of a k-step, odd
    numbers of tokens, one and several tiles of keys, every broadcast of a bias, causal, every order of the result."""
    dtypes = MULTIPLIED
    layouts = LAYOUTS

    def preferred(self, problem: AttentionProblem) -> tuple[str, ...]:
        return ("online", "naive") if problem.dtype == "fp32" else ("mma", "online", "naive")

    def left_to_pytorch(self, problem: AttentionProblem) -> str | None:
        most = MOST_FP32_KEYS if problem.dtype == "fp32" else MOST_KEYS
        if problem.keys <= most or (problem.bias and problem.dtype != "fp32"):
            return None
        return f"beyond {most} keys PyTorch's attention should be faster; there are {problem.keys}"


ATTENTION = AttentionOperation()

# --- the PyTorch operator


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    *,
    causal: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q kᵀ + bias) v, as `torch.nn.functional.scaled_dot_product_attention`.

    Operands are [batch, heads, tokens, size], and read in place if their heads are contiguous; `bias` is added to the
    scores, or if it is boolean, selects the keys that a query reads. The result has the tokens' rows contiguous, as
    the next linear layer reads them. `tf32` allows TF32 products for fp32 tensors; `rung` selects a rung by name.
    """
    return OPERATOR(q, k, v, bias, scale, causal, tf32, rung)


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> CallPlan:
    vector = full_vector(multiplied_as(q, tf32))
    (batch, heads, queries, size), (_, _, keys, value_size) = q.shape, v.shape

    def problem() -> AttentionProblem:
        sizes = () if bias is None else (*[1] * (4 - bias.dim()), *bias.shape)
        if bias is not None and sizes[0] not in (1, batch):
            raise UnsupportedError(f"bias has {sizes[0]} batch items; it must have 1 or {batch}, as q")
        q_at, k_at, v_at = (at_of(operand.stride(), vector) or () for operand in (q, k, v))
        return AttentionProblem(
            batch, heads, queries, keys, size, value_size, scale, causal, sizes, 0, q_at, k_at, v_at, "bqh",
            multiplied_as(q, tf32),
        )  # fmt: skip

    return CallPlan(
        ATTENTION,
        lambda: q.new_empty((batch, queries, heads, value_size)),
        problem,
        {**dict.fromkeys("qkv", partial(_operand, vector)), "bias": partial(_additive, dtype=q.dtype)},
        finish=_by_heads,
    )


def _operand(vector: int, given: torch.Tensor) -> torch.Tensor:
    """Return an operand with the strides that it has if kernels can read them."""
    return given.contiguous() if at_of(given.stride(), vector) is None else given


def at_of(strides: Sequence[int], elements: int) -> tuple[int, ...] | None:
    """Return the position of an operand with these strides in PyTorch's order; None if kernels need a packed copy."""
    *outer, inner = strides
    if inner != 1 or min(outer) < 0 or max(outer) >= 2**31 or any(step % elements for step in outer):
        return None
    return (0, *outer)


def _additive(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a packed bias; False becomes -inf."""
    if bias is None:
        return None
    if bias.dtype == torch.bool:
        return torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill_(~bias, -torch.inf)
    return bias.contiguous()


def _by_heads(y: torch.Tensor) -> torch.Tensor:
    return y.transpose(1, 2)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    q, k, v, bias, scale, causal = (*inputs, None, None, False)[:6]
    ctx.save_for_backward(q, k, v, bias)
    ctx.scale, ctx.causal = scale, causal


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Recompute the weights, and leave all products to PyTorch; there are only forward kernels."""
    q, k, v, bias = ctx.saved_tensors
    scale = q.shape[-1] ** -0.5 if ctx.scale is None else ctx.scale
    mask = None if bias is None else _additive(bias, q.dtype)
    if ctx.causal:
        later = q.new_full((q.shape[2], k.shape[2]), -torch.inf).triu(1)
        mask = later if mask is None else mask + later
    weights = weights_of(q, k, mask, scale)
    of_weights = gradient @ v.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_bias = None
    if bias is not None and bias.is_floating_point():
        of_bias = of_scores.sum_to_size(bias.shape)
    return (
        of_scores @ k * scale,
        of_scores.mT @ q * scale,
        weights.mT @ gradient,
        of_bias,
        None,
        None,
        None,
        None,
    )


OPERATOR = define_planned(
    "attention",
    _plan,
    "q: N H Q S, k: N H K S, v: N H K V, bias: * of q|bool",
    setup=_setup,
    backward=_backward,
    autocast=True,
)
