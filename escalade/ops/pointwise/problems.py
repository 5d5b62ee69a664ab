"""The problems of pointwise: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.pointwise.problem import PointwiseProblem

PROBLEMS = tuple(
    map(
        PointwiseProblem.parse,
        (
            "802816[silu(x)]",
            "51380224[silu(x)]",
            "51380224[hardswish(x)]",
            "51380224[x+0.1*a]",
            "802816x64[x*a+b](a:0,1;b:0,1)",
            "256x3136x64[x*sigmoid(a)](a:64,0,1)",
            "16384x3136[relu(x*a)](a:1,0)",
            "205520896[gelu(x)]",
        ),
    )
)
"""Activations of ResNet-50's sizes at batch 256, a scaled residual, factors by channel, by image and by plane."""

SMALL_PROBLEMS = tuple(
    map(
        PointwiseProblem.parse,
        (
            "1[silu(x)]",
            "9001[x*sigmoid(x)]",
            "4099[where(x>a,x,0.1*a)]",
            "37x64[x*a+b](a:0,1;b:0,1:fp32)",
            "3x49x16[x*sigmoid(a)](a:16,0,1)",
            "24x49[relu(x)*a](a:1,0)",
            "5x7x3[x+a](a:0,3,1)",
            "2x24x16[x+a](a:384,1,24)",
            "6x10x8[x+where(a,b,1)](a:80,8,1:uint8;b:0,0,0)",
            "33x40[t=x+a;t,t*t](a:40,1)",
        ),
    )
)
