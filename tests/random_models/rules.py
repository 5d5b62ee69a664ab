"""Statements of random networks, by theme. A rule writes one, over values that fit, or skips."""

from __future__ import annotations

from math import prod

import torch

from tests.random_models.draft import Draft, Rule, Skip, Value

# --- layers


def conv(d: Draft) -> str:
    x = d.image()
    c, k = x.size[0], d.one(d.sizes.channels)
    kernel = d.one((1, 3, 3, 3, 2))
    options = [f"padding={kernel // 2}"]
    match d.random.randrange(7):
        case 0:
            options = [*options, "stride=2"]
        case 1:
            options = ["padding=2", "dilation=2"]
        case 2:
            k, options = c, [*options, f"groups={c}"]
        case 3:
            groups = d.one([g for g in (2, 4) if c % g == 0])
            k, options = c, [*options, f"groups={groups}"]
        case 4:
            options = [*options, "bias=False"]
    made = f"nn.Conv2d({c}, {k}, {kernel}, {', '.join(options)})"
    return f"{d.module(made)}({x})"


def transposed(d: Draft) -> str:
    x = d.image()
    kernel, stride = d.one(((2, 2), (3, 1), (3, 2), (4, 2)))
    sizes = f"{x.size[0]}, {d.one(d.sizes.channels)}, {kernel}"
    made = f"nn.ConvTranspose2d({sizes}, stride={stride}, padding={kernel // 3})"
    return f"{d.module(made)}({x})"


def conv1d(d: Draft) -> str:
    x = d.rank(2)
    return f"{d.module(f'nn.Conv1d({x.size[0]}, {d.one(d.sizes.channels)}, 3, padding=1)')}({x})"


def linear(d: Draft) -> str:
    x = d.rank(1, 2, 3)
    layer = d.module(f"nn.Linear({x.size[-1]}, {d.one(d.sizes.features)}, bias={d.one((True, True, False))})")
    return f"{layer}({x})"


def linear_of_channels(d: Draft) -> str:
    x = d.image()
    layer = d.module(f"nn.Linear({x.size[0]}, {d.one(d.sizes.channels)})")
    return f"{layer}({x}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"


def batch_norm(d: Draft) -> str:
    x = d.rank(1, 3)
    made = f"nn.BatchNorm{'1d' if len(x.size) == 1 else '2d'}({x.size[0]})"
    return f"{d.module(made)}({x})"


def norm(d: Draft) -> str:
    x = d.rank(1, 2, 3)
    if len(x.size) == 3 and d.random.random() < 0.6:
        c = x.size[0]
        groups = d.one([g for g in (1, 2, 4, c) if c % g == 0])
        made = d.one((f"nn.GroupNorm({groups}, {c})", f"nn.InstanceNorm2d({c}, affine=True)"))
        return f"{d.module(made)}({x})"
    size = d.one((x.size[-1], list(x.size)))
    return f"{d.module(f'nn.LayerNorm({size})')}({x})"


ACTIVATIONS = (
    "F.relu({})", "F.silu({})", "F.gelu({})", "torch.sigmoid({})", "torch.tanh({})", "F.leaky_relu({}, 0.1)",
    "F.hardswish({})", "F.elu({})", "F.relu6({})", "F.softplus({})", "{}.clamp(-0.5, 1.5)", "{}.abs()", "{}.square()",
    "{} * torch.sigmoid({})", "torch.exp(-{}.abs())", "torch.sqrt({}.square() + 1)", "F.mish({})",
)  # fmt: skip


def activation(d: Draft) -> str:
    x = d.pick(lambda v: v.is_float)
    return d.one(ACTIVATIONS).replace("{}", str(x))


def prelu(d: Draft) -> str:
    x = d.image()
    return f"{d.module(f'nn.PReLU({x.size[0]})')}({x})"


# --- pools and sizes


def pool(d: Draft) -> str:
    x = d.image()
    return d.one((
        f"F.max_pool2d({x}, 2)", f"F.max_pool2d({x}, 3, 2, 1)", f"F.avg_pool2d({x}, 2)", f"F.max_pool2d({x}, 3, 1, 1)",
        f"F.avg_pool2d({x}, 3, 1, 1, count_include_pad=False)", f"F.adaptive_avg_pool2d({x}, 1)",
        f"F.adaptive_avg_pool2d({x}, (3, 2))", f"F.adaptive_max_pool2d({x}, 2)", f"{x}.mean((2, 3))",
        f"{x}.amax((2, 3), keepdim=True)", f"F.max_pool2d({x}, 2, ceil_mode=True)",
    ))  # fmt: skip


def pool_with_indices(d: Draft) -> str:
    x = d.pick(lambda v: len(v.size) == 3 and v.lead > 0 and v.is_float and v.is_exact)
    return f"NEW, NEW_i = F.max_pool2d({x}, 2, return_indices=True)"


def unpool(d: Draft) -> str:
    x = d.pick(lambda v: len(v.size) == 3 and v.lead > 0 and v.is_float and v.is_exact)
    pooled = f"NEW_p, NEW_i = F.max_pool2d({x}, 2, return_indices=True)"
    return f"{pooled}\nNEW = F.max_unpool2d(NEW_p, NEW_i, 2, output_size={x}.shape[2:])"


def resize(d: Draft) -> str:
    x = d.image()
    if prod(x.size) > 4096:
        raise Skip
    return d.one((
        f"F.interpolate({x}, scale_factor=2)", f"F.interpolate({x}, size=(6, 6), mode='bilinear')",
        f"F.interpolate({x}, scale_factor=2, mode='bilinear', align_corners=True)", f"F.pad({x}, (1, 0, 2, 1))",
        f"F.pad({x}, (1, 1, 1, 1), mode='reflect')", f"F.interpolate({x}, size=(5, 3))", f"F.pad({x}, (-1, 0, 0, -1))",
        f"F.pixel_unshuffle({x}, 2)", f"F.pixel_shuffle({x}, 2)", f"torch.roll({x}, (1, -1), (2, 3))", f"{x}.flip(3)",
    ))  # fmt: skip


# --- concatenations, views and slices


def _like(d: Draft, x: Value) -> Value:
    return d.pick(lambda v: v.lead == x.lead and v.size == x.size and v.is_float)


def join(d: Draft) -> str:
    x = d.rank(1, 2, 3)
    if d.random.random() < 0.4:
        same = _like(d, x)
        return d.one((
            f"torch.cat([{x}, {same}])", f"torch.cat([{same}, {x}], -1)", f"torch.stack([{x}, {same}], 1).sum(1)",
            f"torch.cat([{x}, {same}, {x}], 1)",
        ))  # fmt: skip
    if len(x.size) == 3 and d.random.random() < 0.3:
        return f"torch.cat([{x}, F.relu({x})[:, :, :1]], 2)"
    other = d.pick(lambda v: v.is_float and v.lead == x.lead and v.size[1:] == x.size[1:])
    return d.one((f"torch.cat([{x}, {other}], 1)", f"torch.cat([{other}[:, :1], {x}, {other}], 1)"))


def combine(d: Draft) -> str:
    x = d.rank(1, 2, 3)
    y = d.pick(lambda v: v.is_float and v.lead == x.lead)
    if y.size != x.size:
        rank = len(x.size) - len(y.size)
        y_text = f"{y}[(...,) + (None,) * {rank}]" if rank > 0 else str(y)
    else:
        y_text = str(y)
    return d.one((
        f"{x} + {y_text}", f"{x} * {y_text}", f"{x} - 0.5 * {y_text}", f"torch.maximum({x}, {y_text})",
        f"F.relu({x} + {y_text})", f"{x} / ({y_text}.abs() + 1)",
    ))  # fmt: skip


def gate(d: Draft) -> str:
    x = d.image()
    layer = d.module(f"nn.Conv2d({x.size[0]}, {x.size[0]}, 1)")
    return f"{x} * torch.sigmoid({layer}({x}.mean((2, 3), keepdim=True))).expand_as({x})"


def part(d: Draft) -> str:
    x = d.pick(lambda v: v.is_float and v.lead > 0 and len(v.size) >= 1 and v.size[0] >= 2)
    c = x.size[0]
    rows: tuple[str, ...] = (f"{x}[:, :-1]",)
    if len(x.size) >= 2:
        rows = (f"{x}[:, :, -1:]", f"{x}[..., ::2]", f"{x}[:, :, 1:]", f"{x}[..., 0]", f"{x}.narrow(-1, 0, 1)",
                f"{x}[..., :-1]", f"{x}.select(2, -1)")  # fmt: skip
    return d.one((
        f"{x}[:, -1:]", f"{x}[:, : {max(1, c // 2)}]", f"{x}[:, {c // 2} :]", f"{x}[:, 1:-1]", f"{x}[:, ::2]",
        f"NEW, NEW_b = {x}.chunk(2, 1)", f"NEW, NEW_b = {x}.split([1, {c - 1}], 1)", f"{x}[:, 0]",
        f"{x}.index_select(1, torch.tensor([{c - 1}, 0]{d.device(x)}))", *rows, *rows,
    ))  # fmt: skip


def view(d: Draft) -> str:
    x = d.rank(1, 2, 3)
    offered = [
        f"{x}.flatten(1)",
        f"{x}.unsqueeze(1)",
        f"{x}.contiguous()",
        f"{x}.reshape(-1, {prod(x.size)})",
    ]
    if len(x.size) == 3:
        c, h, w = x.size
        offered += [
            f"{x}.permute(0, 2, 3, 1)", f"{x}.flatten(2)", f"{x}.flatten(2).transpose(1, 2)", f"{x}.transpose(2, 3)",
            f"{x}.permute(0, 3, 2, 1)", f"{x}.reshape(-1, {h}, {w * c})", f"{x}.mT", f"{x}.view({x}.shape[0], {c}, -1)",
        ]  # fmt: skip
        if c % 2 == 0:
            offered += [
                f"{x}.view(-1, 2, {c // 2}, {h}, {w}).transpose(1, 2).flatten(1, 2)",
                f"{x}.reshape({x}.shape[0], 2, {c // 2}, {h * w}).mT", f"{x}.reshape(-1, {c // 2}, {h * w}).mT",
                f"{x}.reshape({x}.shape[0], 2, {c // 2}, {h * w}).permute(0, 3, 1, 2).flatten(2)",
                f"{x}.flatten(2).mT.reshape({x}.shape[0], {h}, {w}, 2, -1).permute(0, 3, 4, 1, 2).flatten(1, 2)",
            ]  # fmt: skip
    if len(x.size) == 2:
        offered += [f"{x}.transpose(1, 2)", f"{x}.unsqueeze(-1)", f"{x}.unsqueeze(2)"]
    if len(x.size) == 1:
        offered += [f"{x}[:, :, None, None].expand(-1, -1, 3, 2)", f"{x}.unsqueeze(1).repeat(1, 4, 1)"]
    return d.one(offered)


# --- in place, shared, typed


def in_place(d: Draft) -> str:
    x = d.rank(1, 2, 3)
    last = x.size[-1]
    return d.one((
        f"NEW = {x}.clone()\nNEW[:, :1] = 0.5", f"NEW = {x} * 2\nNEW.relu_()",
        f"NEW = {x}.clone()\nNEW.add_({x}, alpha=0.5)",
        f"NEW = {x}.clone()\nNEW[:, 0] += 1", f"NEW = {x} + 1\nNEW_w = NEW[..., :1]\nNEW_w.mul_(2)",
        f"NEW = torch.zeros_like({x})\nNEW[..., {last // 2}:] = {x}[..., {last // 2}:]",
        f"NEW = ({x} - 1).contiguous()\nNEW_w = NEW.flatten(1)\nNEW_w[:, ::2].clamp_(min=0)",
        f"NEW = F.relu({x}, inplace=False).add_(0.25)",
        f"NEW = {x}.new_zeros({x}.shape)\nNEW.copy_({x})\nNEW[:, -1:].zero_()",
    ))  # fmt: skip


def shared(d: Draft) -> str:
    """Reuse of an existing module; or one used twice at once."""
    x = d.image()
    c = x.size[0]
    layer = d.module(f"nn.Conv2d({c}, {c}, {d.one((1, 3))}, padding='same')")
    return d.one((
        f"{layer}(F.relu({layer}({x})))", f"{layer}({x}) + {layer}(F.relu({x}))",
        f"torch.cat([{layer}({x}), {layer}({x}[:, :, :1]).expand_as({x})])",
    ))  # fmt: skip


def cast(d: Draft) -> str:
    x = d.pick(lambda v: v.is_float)
    return d.one((
        f"{x}.half().float()", f"{x}.float()", f"{x}.to(torch.bfloat16).float() + {x}",
        f"F.relu({x}.half()).float()", f"({x}.half() * 2).float()",
    ))  # fmt: skip


def double(d: Draft) -> str:
    x = d.pick(lambda v: v.is_float)
    return f"({x}.double() * 0.5 + 1).float()"


def compare(d: Draft) -> str:
    x = d.pick(lambda v: v.is_float and v.is_exact and v.lead > 0)
    return d.one((
        f"({x} > 0.25).float()", f"({x} > 0).to({x}.dtype) * {x}", f"torch.where({x} > 0, {x}, 0.5 * {x})",
        f"{x}.masked_fill({x} < 0, 0.5)", f"({x} * 4).long()", f"(({x} * 2).long() == 1).float()", f"{x} >= 0.5",
        f"{x}.argmax(1)", f"({x} * 8).round()",
    ))  # fmt: skip


def masked(d: Draft) -> str:
    m = d.pick(lambda v: v.dtype == torch.bool and v.lead > 0)
    if len(m.size) == 2 and d.random.random() < 0.7:
        x = d.pick(lambda v: v.is_float and v.lead == m.lead and v.size[1:] == m.size)
        return d.one((f"{x}.masked_fill({m}.unsqueeze(1), 0.0)", f"torch.where({m}[:, None], {x}, -{x})"))
    return d.one((
        f"(~{m}).float()", f"{m}.cumsum(1)", f"(~{m}).cumsum(-1, dtype=torch.float32)", f"{m}.long()",
        f"{m} & ~{m}.flip(1)",
    ))  # fmt: skip


# --- PyTorch's own operators


def by_pytorch(d: Draft) -> str:
    x = d.rank(1, 2, 3)
    return d.one((
        f"{x}.cumsum(1) * 0.25", f"{x}.sort(-1).values", f"{x}.sort(1, descending=True)[0]", f"{x}.cumsum(-1) * 0.25",
        f"torch.tril({x})" if len(x.size) > 1 else f"{x}.logsumexp(1, keepdim=True)", f"{x}.topk(1, 1).values",
        f"F.normalize({x}, dim=1)", f"{x}.cummax(1)[0]", f"torch.logcumsumexp({x} * 0.5, -1)",
        f"{x}.std(1, keepdim=True)",
        f"{x}.norm(dim=1, keepdim=True)", f"torch.lerp({x}, {x}.flip(1), 0.25)", f"torch.diff({x}, dim=-1)",
        f"torch.einsum('b...,b...->b...', {x}, {x})",
    ))  # fmt: skip


def reduce(d: Draft) -> str:
    x = d.rank(1, 2, 3)
    dim = d.one((1, -1))
    return d.one((
        f"{x}.mean({dim}, keepdim=True)", f"{x}.sum({dim}) * 0.25", f"{x}.amax({dim})", f"F.softmax({x}, {dim})",
        f"F.log_softmax({x}, {dim})", f"{x}.amin({dim}, keepdim=True)", f"{x}.var({dim}, keepdim=True)",
    ))  # fmt: skip


def positions(d: Draft) -> str:
    """Positional encodings as in detectors, from a mask that is all false."""
    x = d.image()
    c, h, w = x.size
    mask = f"NEW_m = torch.zeros({x}.shape[0], {h}, {w}, dtype=torch.bool{d.device(x)})"
    axis = d.one((1, 2))
    last = ("NEW_y[:, -1:, :]", "NEW_y[:, :, -1:]")[axis - 1]
    lines = [
        mask,
        f"NEW_y = (~NEW_m).cumsum({axis}, dtype=torch.float32)",
        f"NEW_y = NEW_y / ({last} + 1e-6) * 6.283185307179586",
    ]
    match d.random.randrange(4):
        case 0:
            lines.append(f"NEW = {x} + NEW_y.unsqueeze(1)")
        case 1:
            lines += [f"NEW_t = 100 ** (torch.arange({c}, dtype=torch.float32{d.device(x)}) / {c})",
                      "NEW_p = NEW_y[..., None] / NEW_t", f"NEW = {x} + NEW_p.sin().permute(0, 3, 1, 2)"]  # fmt: skip
        case 2:
            lines += [
                "NEW_p = torch.stack((NEW_y.sin(), NEW_y.cos()), 3).flatten(3)",
                f"NEW = torch.cat([{x}, NEW_p.permute(0, 3, 1, 2)[:, :, :{h}, :{w}]], 1)",
            ]
        case _:
            lines.append(f"NEW = torch.cat([{x}, torch.cos(NEW_y)[:, None]], 1)")
    return "\n".join(lines)


def constant(d: Draft) -> str:
    x = d.rank(1, 2, 3)
    last, first = x.size[-1], x.size[0]
    grid = f"torch.arange({last}{d.device(x)})"
    ones = ", 1" * (len(x.size) - 1)
    match d.random.randrange(3):
        case 0:
            return d.one(("{} + {}", "{} * {}[-1:]")).format(x, d.buffer(f"torch.rand({last})"))
        case 1:
            return f"{x} + {d.buffer(f'torch.rand(1, {first}{ones})')}"
    return d.one((
        f"{x} + {grid} / {last}", f"{x} + torch.linspace(-1, 1, {last}{d.device(x)})",
        f"{x} * torch.full_like({x}, 0.5)", f"{x} + torch.zeros({x}.shape[0], {first}{ones}{d.device(x)})",
        f"{x}.masked_fill({grid} % 2 == 0, 0.0)", f"{x}[..., {grid}.flip(0)]",
        f"{x} * torch.ones({x}.shape[0], 1{ones}{d.device(x)})",
    ))  # fmt: skip


def attention(d: Draft) -> str:
    x = d.rank(2)
    width = x.size[-1]
    layer = d.module(f"nn.Linear({width}, {3 * width})")
    lines = f"NEW_q, NEW_k, NEW_v = {layer}({x}).chunk(3, -1)"
    if d.random.random() < 0.5:
        return f"{lines}\nNEW = F.softmax(NEW_q @ NEW_k.transpose(1, 2) / {width**0.5:.4f}, -1) @ NEW_v"
    return f"{lines}\nNEW = F.scaled_dot_product_attention(NEW_q, NEW_k, NEW_v)"


def pixel_attention(d: Draft) -> str:
    """Attention between the pixels of an image, as models write it in PyTorch's order of dimensions."""
    x = d.image()
    c, h, w = x.size
    layer = d.module(f"nn.Conv2d({c}, {3 * c}, 1)")
    lines = f"NEW_q, NEW_k, NEW_v = (NEW_p.flatten(2) for NEW_p in {layer}({x}).chunk(3, 1))\n"
    scores = f"torch.softmax(NEW_q.mT @ NEW_k * {c**-0.5:.4f}, -1)"
    return lines + d.one((
        f"NEW = ({scores} @ NEW_v.mT).mT.reshape({x}.shape)", f"NEW = (NEW_v @ {scores}.mT).view_as({x}) + {x}",
        f"NEW = torch.einsum('bij,bcj->bci', {scores}, NEW_v).unflatten(2, ({h}, {w}))",
        f"NEW = torch.einsum('bci,bcj->bij', NEW_q, NEW_k.softmax(-1)) * {1 / h:.4f}",
        "NEW = torch.einsum('bcn,bdn->bcd', NEW_k.softmax(-1), NEW_v)",
    ))  # fmt: skip


def contraction(d: Draft) -> str:
    """Sums of products with weights over some of the dimensions."""
    x = d.rank(2, 3)
    first, last = x.size[0], x.size[-1]
    weight = d.buffer(f"torch.randn({first}, 4) * {first**-0.5:.4f}")
    rest = "hw"[: len(x.size) - 1]
    columns = d.buffer(f"torch.randn(4, {last}) * {last**-0.5:.4f}")
    return d.one((
        f"{x}.movedim(1, -1) @ {weight}", f"torch.einsum('bc{rest},cd->bd{rest}', {x}, {weight})",
        f"torch.tensordot({x}, {weight}.to({x}.dtype), dims=((1,), (0,)))", f"{columns} @ {x}.mT",
    ))  # fmt: skip


def residual(d: Draft) -> str:
    x = d.image()
    c = x.size[0]
    first, second = (
        d.module(f"nn.Conv2d({c}, {c}, 3, padding=1, bias=False)"),
        d.module(f"nn.BatchNorm2d({c})"),
    )
    return f"F.relu({x} + {second}({first}({x})))"


RULES: dict[str, tuple[Rule, ...]] = {
    "weights": (conv, conv, linear, residual, conv1d),
    "layers": (conv, conv, conv, linear, batch_norm, norm, activation, pool, residual),
    "resizing": (transposed, resize, pool),
    "joins": (join, combine, combine, gate),
    "parts": (part,),
    "views": (view, linear_of_channels),
    "in place": (in_place,),
    "shared": (shared, prelu),
    "types": (cast, compare, masked, double),
    "pytorch": (by_pytorch, pool_with_indices, unpool),
    "reductions": (reduce,),
    "positions": (positions,),
    "constants": (constant,),
    "tokens": (attention, pixel_attention, linear, norm, conv1d, view),
    "contractions": (contraction, pixel_attention, view),
}
