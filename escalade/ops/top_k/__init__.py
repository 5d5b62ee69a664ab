"""The likeliest classes: `top_k` is the operator, `TopK` the operation with its ladder."""

from escalade.ops.top_k.ladder import TopK
from escalade.ops.top_k.op import top_k
from escalade.ops.top_k.problem import TopKProblem

__all__ = ["TopK", "TopKProblem", "top_k"]
