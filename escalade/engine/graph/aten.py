"""Allowlist of PyTorch operators in engine files: those that only compute new tensors from others.

Loading a file runs operators (constants are folded), and calling its engine runs the rest. None of them may access
files, call Python, write to its arguments, expose uninitialized memory, or draw random numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from escalade.engine.graph.graph import Reference
from escalade.errors import UnsupportedError

Sizes = Mapping[str, tuple[int, ...]]
_TARGET = re.compile(r"(\w+)::(\w+)(?:\.(\w+))?")
_TENSORS = ("Tensor", "List[Tensor]")
_UNBOUNDED = re.compile(r"mvlgamma|.*polynomial.*")
"""Pointwise operators whose work grows with a numeric argument."""

# Operators that read any strides on every device: they iterate over strides or make their own dense copies. Vendor
# variants leave that copy to their caller, as do most inner operators (`native_group_norm_backward`). 3-D pools reject
# an unbatched operand in NHWC, and fractional ones ignore the strides of indices.
_ANY_STRIDES = re.compile(
    r"(?!cudnn|miopen|mkldnn|.*pool3d|fractional).*(conv|pool|upsample|batch_norm|dropout).*"
    r"|cat|stack|flip|roll|repeat|constant_pad_nd|where|index|index_select|index_put|gather|slice_scatter|select_scatter"
    r"|clone|contiguous|copy|to|_to_copy|reshape|full_like|ones_like|zeros_like|new_full|new_ones|new_zeros|fill|zero"
    r"|mm|bmm|addmm|baddbmm|matmul|linear|mv|dot|einsum"
    r"|sum|nansum|mean|prod|amax|amin|all|any|max|min|argmax|argmin|var|std|var_mean|std_mean|linalg_vector_norm|norm"
    r"|group_norm|layer_norm|instance_norm|rms_norm|softmax|log_softmax|_softmax|_log_softmax|cumsum|cumprod|sort|topk"
)


_BY_STRIDES = frozenset(
    "view view_as_real view_as_complex as_strided as_strided_copy as_strided_scatter".split()
)
"""Operators whose result depends on their operand's strides, though most of them return views."""
_ATTENTION = re.compile(r"aten::_scaled_dot_product_(flash|efficient|cudnn)_attention\w*")
_ATTENTION_RANK, _VECTOR_BYTES = 4, 16


class OperatorError(UnsupportedError):
    """A PyTorch operator is missing, not allowed, or does not accept its arguments."""


def resolve_operator(target: str) -> torch._ops.OpOverload:
    """Return the operator with a name such as `aten::cat` or `aten::add.Tensor`."""
    match = _TARGET.fullmatch(target)
    packet = getattr(getattr(torch.ops, match[1]), match[2], None) if match else None
    operator = getattr(packet, match[3] or "default", None) if match else None
    if not isinstance(operator, torch._ops.OpOverload) or operator.name() != target:
        raise OperatorError(
            f"this PyTorch ({torch.__version__}) has no operator {target}, which the model uses; install the version "
            "and the libraries that the model was saved with"
        )
    return operator


def require_pure(target: str, arguments: Mapping[str, Any]) -> torch._ops.OpOverload:
    """Return the operator with a name; raise if a file may not contain it with these arguments."""
    operator = resolve_operator(target)
    reason = _impurity(operator, arguments)
    if reason is not None:
        raise OperatorError(f"{target} {reason}; a file holds operators that compute new tensors from others")
    return operator


def _impurity(operator: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> str | None:
    """Describe why a file may not contain an operator; None if it may."""
    schema = operator._schema
    in_place = schema.is_mutable
    name = schema.name.removeprefix("aten::")
    base = name[:-1] if in_place and name.endswith("_") else name
    if not (base in _PURE_OPERATORS or base in RANDOM_UNLESS or _is_pointwise(base)):
        return "is none of the operators that Escalade knows to be pure"
    if any(argument.is_out for argument in schema.arguments):
        return "writes to one of its arguments"
    if in_place and not (
        name.endswith("_") and written_arguments(operator) == [schema.arguments[0].name] == ["self"]
    ):
        return "writes to one of its arguments"
    if in_place and not isinstance(arguments.get("self"), Reference):
        return "writes to something else than a tensor"
    if not _returns_tensors(operator):
        return "returns something else than tensors"
    if is_random_call(operator, arguments):
        return "draws random numbers"
    if updates_statistics(arguments):
        return "updates running statistics"
    if arguments.get("pin_memory") or arguments.get("generator") is not None:
        return "has a pin_memory or generator argument"
    return None


def bound_arguments(
    operator: torch._ops.OpOverload, positional: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, without defaults."""
    names = [argument.name for argument in operator._schema.arguments]
    return dict(zip(names, positional, strict=False)) | dict(keywords)


def written_arguments(operator: torch._ops.OpOverload) -> list[str]:
    """Return the names of the arguments that an operator writes to."""
    arguments = operator._schema.arguments
    return [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]


def updates_statistics(arguments: Mapping[str, Any]) -> bool:
    """Return True for a normalization that updates running statistics, a mutation that its schema does not declare."""
    is_training = arguments.get("training") or arguments.get("use_input_stats")
    return bool(is_training) and arguments.get("running_mean") is not None


def _returns_tensors(operator: torch._ops.OpOverload) -> bool:
    returns = operator._schema.returns
    return bool(returns) and all(str(result.type) in _TENSORS for result in returns)


def takes_any_layout(operator: torch._ops.OpOverload) -> bool:
    """Return True if an operator is known to compute the same for operands of any strides.

    Some ATen operators ignore strides, since autograd or a composite operator passes them dense tensors. Operators of
    other libraries may ignore them too, unless tagged `flexible_layout`.
    """
    if operator.namespace != "aten":
        return torch.Tag.flexible_layout in operator.tags
    name = operator._schema.name.removeprefix("aten::")
    if name in _BY_STRIDES:
        return False
    is_view = any(result.alias_info is not None for result in operator._schema.returns)
    is_iterated = is_view or torch.Tag.pointwise in operator.tags
    return is_iterated or _ANY_STRIDES.fullmatch(name) is not None


def takes_rows(operator: torch._ops.OpOverload) -> bool:
    """Return True for attention and its gradient: they read the rows of their operands at any distance."""
    return _ATTENTION.fullmatch(operator._schema.name) is not None


def has_rows(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's rows are contiguous, at addresses that allow vector accesses."""
    if tensor.dim() != _ATTENTION_RANK or tensor.stride(-1) != 1:
        return False
    steps = [step for size, step in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1]
    distances = (*steps, tensor.storage_offset())
    return all(steps) and not any(step * tensor.itemsize % _VECTOR_BYTES for step in distances)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return a tensor's dimensions from outermost to innermost; None if contiguous, or if elements overlap."""
    if tensor.is_contiguous() or any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return None
    for dimensions, named in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dimensions and tensor.is_contiguous(memory_format=named):
            return (0, *range(2, dimensions), 1)
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    return None if order == tuple(range(tensor.dim())) else order


def to_memory_order(tensor: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """Return the tensor, copied if needed, dense in this order of dimensions."""
    if order is None:
        return tensor.contiguous()
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(*order).contiguous().permute(*inverse)


def side_effect(operator: torch._ops.OpOverload) -> str | None:
    """Describe why an engine cannot run an operator of another library; None if it can."""
    if operator._schema.is_mutable:
        return "writes to one of its arguments"
    return None if _returns_tensors(operator) else "returns something else than tensors"


@cache
def _is_pointwise(base: str) -> bool:
    """Return True if PyTorch tags an operator as pointwise, and its work per element is bounded."""
    packet = getattr(torch.ops.aten, base, None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    is_pointwise = any(torch.Tag.pointwise in overload.tags for overload in overloads)
    return is_pointwise and not _UNBOUNDED.fullmatch(base)


def require_matching_sizes(target: str, sizes: Sizes, arguments: Mapping[str, Any]) -> None:
    """Check sizes of tensors, by argument, for operators that do not check them themselves."""
    name = target.removeprefix("aten::").split(".")[0]
    check = next((test for pattern, test in _SIZE_CHECKS.items() if re.fullmatch(pattern, name)), None)
    try:
        is_valid = check is None or check(sizes, arguments)
    except (KeyError, TypeError):  # a number in place of a tensor
        is_valid = False
    if not is_valid:
        raise OperatorError(f"{target} does not take tensors of these sizes with these arguments")


def reject_trapping_division(operator: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> None:
    """Reject integer division of the smallest number by -1 on the CPU, which kills the process by SIGFPE on x86.

    Which operators PyTorch itself protects depends on its version.
    """
    name = operator._schema.name.removeprefix("aten::").removesuffix("_")
    if name not in _DIVISIONS or (name in ("div", "divide") and not arguments.get("rounding_mode")):
        return
    dividend, divisor = arguments.get("self"), arguments.get("other")
    tensors = [value for value in (dividend, divisor) if isinstance(value, torch.Tensor)]
    if (
        not tensors
        or any(tensor.device.type != "cpu" for tensor in tensors)
        or dividend is None
        or divisor is None
    ):
        return
    dtype = torch.result_type(dividend, divisor)
    if dtype not in (torch.int64, torch.int32):
        return
    least = torch.iinfo(dtype).min
    smallest = [_contains(value, least, dtype) for value in (dividend, divisor)]
    if any(smallest) if name in _COMMON_DIVISORS else smallest[0] and _contains(divisor, -1, dtype):
        raise OperatorError(f"{operator.name()} of {least} by -1 has no result of type {dtype}")


def _contains(value: Any, number: int, dtype: torch.dtype) -> bool:
    if isinstance(value, torch.Tensor):
        return bool((value.to(dtype) == number).any())
    return int(value) == number


_COMMON_DIVISORS = frozenset(("gcd", "lcm"))
_DIVISIONS = _COMMON_DIVISORS | frozenset(("div", "divide", "floor_divide", "fmod", "remainder"))
"""Operators that divide integers `self` by `other`, or by a common divisor."""


def _norms_fit(sizes: Sizes, arguments: Mapping[str, Any]) -> bool:
    """Require one norm `g` per slice of `v` along `dim`."""
    whole, lengths, dimension = sizes["v"], sizes["g"], arguments.get("dim", 0)
    if not -len(whole) <= dimension < len(whole) or not math.prod(whole):  # PyTorch divides by it
        return False
    return lengths == tuple(size if axis == dimension % len(whole) else 1 for axis, size in enumerate(whole))


def _groups_fit(sizes: Sizes, arguments: Mapping[str, Any]) -> bool:
    x, (batch, channels, pixels) = sizes["input"], (arguments[key] for key in ("N", "C", "HxW"))
    per_channel = all(sizes.get(role, (channels,)) == (channels,) for role in ("weight", "bias"))
    return x[:2] == (batch, channels) and math.prod(x[2:]) == pixels and per_channel


def _scales_fit(sizes: Sizes, arguments: Mapping[str, Any]) -> bool:
    """Require scales to match the output size, since PyTorch uses both."""
    scales = [arguments.get(key) for key in ("scales_d", "scales_h", "scales_w", "scales")]
    output_size = arguments.get("output_size")
    if output_size is None or all(scale is None for scale in scales):
        return True
    used = [scale for scale in scales if scale is not None]
    images = list(zip(sizes["self"][2:], output_size, used, strict=False))
    return len(images) == len(used) == len(output_size) and all(
        abs(size * scale - out) <= 1 for size, out, scale in images
    )


def _layers_fit(sizes: Sizes, arguments: Mapping[str, Any]) -> bool:
    """Require the number of weights that PyTorch reads for a recurrent network, with or without projections."""
    layers = arguments["num_layers"] * (2 if arguments["bidirectional"] else 1)
    each = 4 if arguments["has_biases"] else 2
    return layers > 0 and len(arguments["params"]) in (layers * each, layers * (each + 1))


_SIZE_CHECKS = {
    "lstm|gru|rnn_relu|rnn_tanh": _layers_fit,
    "_weight_norm(_interface)?": _norms_fit,
    "native_group_norm": _groups_fit,
    "_?upsample_.*": _scales_fit,
}


def is_random_call(operator: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    switch = RANDOM_UNLESS.get(operator._schema.name.removeprefix("aten::").removesuffix("_"))
    bound = {argument.name: argument.default_value for argument in operator._schema.arguments}
    bound |= arguments
    return switch not in bound or isinstance(bound[switch], Reference) or bool(bound[switch])


RANDOM_UNLESS = {
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), "train"),
    **dict.fromkeys(("lstm", "gru", "rnn_relu", "rnn_tanh"), "train"),
    "rrelu": "training",
    "scaled_dot_product_attention": "dropout_p",
}
"""Operators that draw random numbers unless this argument is false or zero."""

_PURE_OPERATORS = frozenset(
    """
    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh divide fix floor_divide glu greater greater_equal
    hardswish isclose isin less less_equal log_sigmoid log_sigmoid_forward multiply negative not_equal polar complex
    celu elu hardsigmoid hardtanh leaky_relu selu
    prelu _prelu_kernel rms_norm _fused_rms_norm special_digamma special_erf special_erfc special_erfinv special_exp2
    special_expit special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_log1p
    special_logit special_ndtr special_polygamma special_psi special_round special_sinc
    special_xlogy subtract __and__ __or__

    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d
    max_unpool3d

    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution conv_tbc
    _convolution_mode im2col col2im

    batch_norm instance_norm group_norm native_group_norm layer_norm native_layer_norm renorm norm linalg_vector_norm
    linalg_matrix_norm linalg_norm frobenius_norm norm_except_dim _weight_norm _weight_norm_interface

    linear bilinear matmul linalg_matmul mm bmm mv dot vdot inner outer ger addmm addmv addbmm baddbmm addr
    _addmm_activation einsum tensordot kron linalg_multi_dot chain_matmul linalg_vecdot linalg_cross cross cdist
    _cdist_forward _euclidean_dist pdist pairwise_distance cosine_similarity dist

    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler affine_grid_generator
    pixel_shuffle pixel_unshuffle channel_shuffle

    softmax _softmax _safe_softmax log_softmax _log_softmax special_softmax special_log_softmax logsumexp
    special_logsumexp logcumsumexp _logcumsumexp

    all any amax amin aminmax _aminmax argmax argmin argsort count_nonzero cummax cummin cumprod cumsum cov corrcoef
    diff kthvalue mean median mode msort nanmean nanmedian nanquantile nansum prod quantile sort std std_mean sum
    sum_to_size topk trace trapezoid trapz cumulative_trapezoid var var_mean bucketize searchsorted histc

    alias atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cat chunk column_stack concat
    concatenate constant_pad_nd contiguous detach diag diag_embed diagflat diagonal diagonal_scatter dsplit dstack
    expand expand_as flatten flip fliplr flipud hsplit hstack meshgrid moveaxis movedim narrow numpy_T mT mH adjoint
    matrix_H pad _pad_circular _pad_enum permute pixel_shuffle ravel reflection_pad1d reflection_pad2d
    reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape
    reshape_as roll rot90 row_stack select select_scatter slice slice_scatter split split_with_sizes squeeze stack
    swapaxes swapdims t take take_along_dim tensor_split tile transpose tril triu unbind unflatten unfold
    unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze view view_as _unsafe_view _reshape_copy vsplit vstack
    alias_copy detach_copy diagonal_copy expand_copy narrow_copy permute_copy select_copy slice_copy split_copy
    split_with_sizes_copy squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy view_copy
    lift lift_fresh lift_fresh_copy

    embedding gather index index_add index_copy index_fill
    index_put index_reduce index_select masked_scatter put scatter scatter_add scatter_reduce one_hot

    to _to_copy type_as copy fill zero conj resolve_conj resolve_neg real imag view_as_real view_as_complex
    _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short

    arange full full_like ones ones_like zeros zeros_like new_full new_ones new_zeros eye linspace logspace
    scalar_tensor tril_indices triu_indices bartlett_window blackman_window hamming_window hann_window kaiser_window
    fft_fftfreq fft_rfftfreq vander linalg_vander

    fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft
    fft_rfft2 fft_rfftn fft_fftshift fft_ifftshift stft istft

    det inverse linalg_cholesky linalg_cholesky_ex linalg_det linalg_eigh linalg_inv linalg_inv_ex linalg_matrix_exp
    linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd matrix_exp

    lstm_cell gru_cell rnn_relu_cell rnn_tanh_cell

    mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits
    soft_margin_loss
    """.split()
)
"""Pure operators that PyTorch does not tag as pointwise. Excluded are those that expose uninitialized memory (`empty`)
or memory outside of a tensor (`as_strided`, `set_`, `resize_`), and inner ones that leave checks of sizes and indices
to their caller (`_unsafe_index`, `_fft_c2r`, `embedding_bag`)."""
