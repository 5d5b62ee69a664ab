"""`escalade bench calls`: the CPU time of operator calls, and PyTorch's."""

from __future__ import annotations

from typing import Annotated

import typer

from escalade.commands.options import Dtypes, InputSeed, RecordsFile, RecordsFolder, listed
from escalade.commands.progress import status


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Calls: conv2d, conv2d_relu, conv2d_autocast, conv2d_of_an_image, max_pool2d, avg_pool2d, upsample2d, "
            "relu, add_relu, linear, batch_norm_training, batch_norm, mse_loss, cross_entropy, mlp. Without any: all.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtypes = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds to time each system.")] = 0.05,
    seed: InputSeed = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
) -> None:
    """Time the CPU overhead of an operator call against PyTorch's, with and without gradients. Needs a GPU."""
    from escalade.commands.running import Run
    from escalade.commands.selection import check_names, require_gpu
    from escalade_bench.calls import STORAGE, chosen, measure
    from escalade_bench.campaign.units import Session
    from escalade_bench.report.pages.records import calls_table

    device = require_gpu("calls are timed on a GPU")
    wanted, dtypes = chosen(tuple(names or ())), listed(dtype)
    check_names("dtype", dtypes, tuple(STORAGE))
    run = Run(device, json, results)
    with status(run.console) as say:
        for call in wanted.values():
            for one in (each for each in call.layouts if not dtypes or each in dtypes):
                for records in measure(call, one, Session(device, seconds, seed), say):
                    run.keep(records)
    run.show([calls_table(run.records, "Host time per call")])
    run.end()
