"""The likeliest classes: `top_k` is the operator, `TopK` the operation with its ladder."""

from escalade.ops.top_k.op import top_k
from escalade.ops.top_k.operation import TOP_K, TopK
from escalade.ops.top_k.problem import TopKProblem

__all__ = ["TOP_K", "TopK", "TopKProblem", "top_k"]
