"""Random networks, written as PyTorch code, run through the kernels and compared with PyTorch in float64.

`python -m tests.random_models --seeds 0:50 --device twin --dtype fp16` runs many; `--show` prints their code.
"""
