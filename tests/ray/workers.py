"""Workers that fail in several ways, and a driver that is killed; in a separate module, which workers import."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from escalade_apps.ray import Job, Network, Predictor
from escalade_apps.ray.jobs import connected
from tests.ray.networks import PATIENCE

OVER = 4
"""The shard at which it happens."""


class Killed(Predictor):
    """Its process is killed at a shard, once: a file beside the network's records that."""

    def __call__(self, rows: Mapping[str, np.ndarray]) -> Any:
        marker = pathlib.Path(self.network.weights).with_name("killed")
        if rows["shard"][0] == OVER and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(rows)


class Stuck(Predictor):
    """It never finishes a shard."""

    def __call__(self, rows: Mapping[str, np.ndarray]) -> Any:
        if rows["shard"][0] == OVER:
            time.sleep(2 * PATIENCE)
        return super().__call__(rows)


def main(address: str, images: str, results: str, network: str, shard: str) -> None:
    """A driver that is killed while a worker processes a shard, and all before it are done."""
    signal.alarm(PATIENCE)
    job = Job(
        [images], results, Network.read(network),
        workers=1, batch=10, top=1, shard=int(shard), form="csv", predictor=Stuck,
    )  # fmt: skip
    with connected(address):
        for part in job.run():
            if part.shard == OVER - 1:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
