"""Layer normalisation of rows: `layer_norm` is the operator, `LayerNorm` the operation with its ladder."""

from escalade.ops.layer_norm.op import layer_norm
from escalade.ops.layer_norm.operation import LAYER_NORM, LayerNorm
from escalade.ops.layer_norm.problem import LayerNormProblem

__all__ = ["LAYER_NORM", "LayerNorm", "LayerNormProblem", "layer_norm"]
