"""Mutants of the passes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PASSES = "escalade/engine/passes/"
TESTS = "tests/engine/passes/"
TYPED = (TESTS + "test_typed.py",)


def _of(file: str, name: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(
        f"passes/{name}",
        f"{PASSES}{file}.py",
        old,
        new,
        tuple(TESTS + test for test in tests or ("test_passes.py",)),
    )


MUTANTS: tuple[Mutant, ...] = (
    _of(
        "keep_nchw",
        "nchw-for-images-that-are-given-in-nhwc",
        ' or graph.images != "nchw":',
        ":",
        "test_keep_nchw.py",
    ),
    _of(
        "keep_nchw",
        "nchw-with-weights-for-padded-channels",
        "if weight.shape[1] != channels:",
        "if False:",
        "test_keep_nchw.py",
    ),
    _of(
        "keep_nchw",
        "nchw-without-the-scale",
        'if "scale" not in node.inputs:',
        "if True:",
        "test_keep_nchw.py",
    ),
    _of(
        "prologues",
        "padding-folded-although-it-is-a-result",
        "if zeros is None or node.name in graph.outputs:",
        "if zeros is None:",
        "test_padding.py",
    ),
    _of(
        "prologues",
        "padding-folded-for-some-readers",
        "if len(layers) == len(users):",
        "if layers:",
        "test_padding.py",
    ),
    _of(
        "casts",
        "casts-lifted-whatever-their-type",
        "casts.setdefault((source, node.dtype), Cast",
        'casts.setdefault((source, ""), Cast',
        "test_typed.py",
    ),
    _of(
        "casts",
        "casts-lifted-although-they-are-results",
        " or source not in inputs or node.name in graph.outputs:",
        " or source not in inputs:",
        "test_typed.py",
    ),
    _of(
        "epilogues",
        "a-constant-is-added-on-the-way-out",
        "if side != rest and rest not in graph.constants and",
        "if side != rest and",
    ),
    _of("epilogues", "a-constant-is-an-operand", "        or rest in graph.constants\n", ""),
    _of(
        "epilogues",
        "an-operand-of-another-type",
        "len(types) == 1 and layer.shape",
        "layer.shape",
        "test_passes.py",
        "test_typed.py",
    ),
    _of(
        "epilogues",
        "a-term-of-another-type",
        "if graph.typed and len({graph.dtype_of(name) for name in (*node.inputs.values(), node.name)}) > 1:",
        "if False:",
        "test_typed.py",
    ),
    _of(
        "epilogues", "an-operand-of-other-sizes", "and layer.shape == node.shape == graph.shape_of(rest)", ""
    ),
    _of(
        "epilogues", "a-layer-with-other-readers", "        or graph.only_user(layer.name) is not node\n", ""
    ),
    _of(
        "epilogues",
        "a-function-before-a-layer-with-other-readers",
        " or graph.only_user(name) is not reader:",
        ":",
        "test_epilogues.py",
    ),
    _of(
        "epilogues",
        "padding-keeps-its-value-behind-a-function",
        "node.with_attributes(value=value) if",
        "node if",
        "test_epilogues.py",
    ),
    _of("epilogues", "padding-with-infinity", "if math.isfinite(value) else None", "", "test_epilogues.py"),
    _of(
        "epilogues",
        "functions-of-what-is-cut-off",
        'Pad2d.matches(node) and min(a["pads"]) >= 0:',
        "Pad2d.matches(node):",
        "test_epilogues.py",
    ),
    _of(
        "epilogues",
        "functions-of-rows-that-are-dropped",
        "return node if all(size >= before for size, before in sizes) else None",
        "return node",
        "test_epilogues.py",
    ),
    _of(
        "epilogues",
        "functions-before-an-interpolation",
        ' and a["mode"] in ("nearest", "nearest_exact")',
        "",
        "test_epilogues.py",
    ),
    _of(
        "epilogues",
        "functions-of-another-type",
        " or producer.dtype != reader.dtype",
        "",
        "test_epilogues.py",
    ),
    _of(
        "epilogues",
        "added-behind-an-activation",
        "activation_of(layer).is_identity\n        and ",
        "",
    ),
    _of(
        "simplify",
        "attributes-are-not-compared",
        "inputs, _key(node.attributes), node.shape",
        "inputs, node.shape",
    ),
    _of(
        "simplify",
        "random-numbers-are-drawn-once",
        "node.name in graph.outputs or is_random(node)",
        "node.name in graph.outputs",
    ),
    _of(
        "simplify",
        "two-results-in-one-tensor",
        "node.name in graph.outputs or is_random(node)",
        "is_random(node)",
    ),
    _of(
        "simplify",
        "random-numbers-are-constants",
        "if is_random(node) or node.depends_on_batch:",
        "if node.depends_on_batch:",
    ),
    _of(
        "simplify",
        "sums-of-constants-in-fp32",
        "x.double() if x.is_floating_point() else x",
        "x",
        "test_computed_weights.py",
    ),
    _of("channel_scale", "a-bias-is-not-scaled", ".double() * scale\n", ".double()\n"),
    _of(
        "channel_scale",
        "folded-into-a-layer-with-other-readers",
        "if layer is None or axis is None or graph.only_user(layer.name) is not node:",
        "if layer is None or axis is None:",
    ),
    _of(
        "channel_scale",
        "folded-behind-an-activation",
        "or not activation_of(layer).is_identity or",
        "or",
    ),
    _of("channel_scale", "weights-beyond-their-range", "if not is_finite(folded.to(storage)):", "if False:"),
    _of(
        "views",
        "permutes-composed-the-other-way",
        "tuple(first[dim] for dim in second)",
        "tuple(second[dim] for dim in first)",
        "test_layouts.py",
        "test_passes.py",
        "../nodes/test_operators.py",
    ),
    _of(
        "views",
        "permutes-of-other-orders-sink",
        "if len(orders) > 1:",
        "if len(orders) > 9:",
        "test_layouts.py",
        "test_passes.py",
        "../nodes/test_operators.py",
    ),
    _of(
        "merge_convs",
        "siblings-of-other-attributes",
        "            repr(sorted(node.attributes.items())),\n",
        "",
        "test_merge_parallel_convs.py",
    ),
    _of(
        "merge_convs",
        "siblings-begin-at-the-first-channel",
        "            offset += _channels(node)\n",
        "",
        "test_merge_parallel_convs.py",
    ),
    _of(
        "merge_convs",
        "siblings-of-other-images",
        '            node.inputs.get("x"),\n',
        "",
        "test_merge_parallel_convs.py",
    ),
    _of(
        "prologues",
        "a-prologue-that-others-read",
        " or graph.only_user(name) is not node:",
        ":",
        "test_prologues.py",
    ),
    _of(
        "pointwise",
        "numbers-of-all-but-the-first-element",
        "bool((constant == constant.flatten()[0]).all())",
        "True",
        "test_pointwise.py",
        "test_passes.py",
    ),
    _of(
        "pointwise",
        "a-result-is-joined",
        "if producer is None or name in graph.outputs or",
        "if producer is None or",
        "test_pointwise.py",
    ),
    _of(
        "pointwise",
        "what-was-rounded-stays-repeated",
        "return source if is_expansion else None",
        "return source if is_expansion and graph.dtype_of(source) is graph.dtype_of(name) else None",
        "test_pointwise.py",
    ),
    _of(
        "fuse_pools",
        "maxima-of-what-others-read",
        "if layer.name in graph.outputs or {node.name for node in readers_of(layer, graph)} - own:",
        "if False:",
        "test_fuse_max_pool.py",
    ),
    _of(
        "stacks",
        "stacked-along-another-dimension",
        "if same_dtype and dimension == dim and",
        "if same_dtype and",
        "test_stacks.py",
    ),
    _of(
        "stacks",
        "a-range-partly-in-front-reads-the-old-value",
        "or first + length <= write.first:",
        "or first < write.first:",
        "test_scatters.py",
    ),
    _of(
        "stacks",
        "a-range-within-what-was-written-begins-late",
        "first=first - write.first)",
        "first=first)",
        "test_scatters.py",
    ),
    _of(
        "fuse_pools",
        "a-mean-taken-before-what-others-read",
        "if graph.only_user(layer.name) is not node:",
        "if False:",
        "test_hoist_pool.py",
    ),
    _of("epilogues", "a-layer-is-added-to-itself", "if side != rest and rest not in", "if rest not in"),
    _of(
        "layout",
        "flattened-planes-are-reordered",
        'if layouts.get(node.inputs["x"]) != "nhwc":',
        "if False:",
    ),
    _of(
        "merge_convs",
        "siblings-with-and-without-a-bias",
        "            tuple(node.inputs),\n",
        "",
        "test_merge_parallel_convs.py",
    ),
)
