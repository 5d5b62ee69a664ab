"""The perceptron on CUDA cores in one launch, one CTA per row."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config
from escalade.ops.mlp.problem import MlpProblem
from escalade.ops.mlp.rungs import chain
from escalade.ops.mlp.rungs.chain import ChainRung
from escalade.ops.mlp.rungs.gelu import gelu_constants, gelu_forms


@dataclass(frozen=True)
class FusedConfig(Config):
    threads: int
    """Threads per CTA, which has one row."""
    gelu: str
    """One of `gelu_forms`."""


_MOST_THREADS = 512


@dataclass(frozen=True)
class Fused(ChainRung[FusedConfig]):
    warp_reductions: bool = False
    vectorised: bool = False

    def shared_bytes(self, problem: MlpProblem) -> int:
        return 4 * (2 * _padded(chain.widest(problem.layers)) + _MOST_THREADS)

    def configs(self, problem: MlpProblem) -> tuple[FusedConfig, ...]:
        """Return configs with about one thread per output of the widest layer."""
        widest = max(layer.width_out for layer in problem.layers)
        suited = sorted((64, 128, 256, _MOST_THREADS), key=lambda threads: abs(threads - min(widest, 256)))
        return tuple(
            FusedConfig(threads, gelu) for gelu, threads in product(gelu_forms(problem.dtype), suited[:3])
        )

    def recipe(self, problem: MlpProblem, config: FusedConfig) -> Recipe:
        p = problem

        def vector(*lengths: int) -> int:
            return widest_vector(p.dtype, *lengths) if self.vectorised else 1

        layers = [chain.spell(p, number, vector(layer.features)) for number, layer in enumerate(p.layers)]
        program = Program.of(
            "mlp/fused.cu",
            constants=chain.constants(p, layers) | gelu_constants(config.gelu),
            problem=p,
            config=config,
            rung=self,
            width=_padded(chain.widest(p.layers)),
            vector_in=vector(p.features),
            vector_out=vector(p.outputs),
        )
        call = KernelCall(
            program,
            (p.batch, 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), *chain.parameters(p)),
            shared_bytes=self.shared_bytes(p),
            overlap=True,
        )
        return Recipe((call,))


def _padded(floats: int) -> int:
    """Round up to 16 bytes."""
    return 4 * blocks(floats, 4)


# Predictions for the spectral autoencoder at batch 512 in fp32: 62,464 multiply-adds per row, 119 KB of weights.
FUSED = Fused(
    "fused",
    "one launch, one CTA per row: intermediate values stay in shared memory",
    below="layers",
    # Nine launches with a tail of about 5 us each, 45 us; here one launch whose 512 CTAs, 4 per SM, wait for their
    # weights: 4 x 62,464 loads of 32 sectors per warp, some 8000 requests per SM at 0.5 per clock, 10 us.
    predicted_gain=4.0,
)
WARP_REDUCTIONS = Fused(
    "warp_reductions",
    "norms and the error by shuffles, one warp per group, instead of by a tree with a barrier per level",
    below="fused",
    # Five groups in sequence with 2 x 10 barriers of some 30 clocks each are 3000 of 18,000 clocks.
    predicted_gain=1.2,
    warp_reductions=True,
)
VECTORISED = Fused(
    "vectorised",
    "weights and activations read 16 bytes at a time, the products unrolled",
    below="warp_reductions",
    # A quarter of the loads, each of four times the sectors: half of the time.
    predicted_gain=2.0,
    warp_reductions=True,
    vectorised=True,
)
