"""The command line. Each command gathers its options; what they do is in `bench`, `report` and `doctor`."""

from __future__ import annotations

import pathlib
import sys
from enum import StrEnum
from typing import Annotated

import typer

from escalade.errors import EscaladeError
from escalade.shown import shown

_LINES = "\n\t"
"""What a message may have in it: compilers' have lines."""
app = typer.Typer(
    name="escalade",
    help="Convolutional-network kernels for NVIDIA GPUs, as ladders: every rung verified, then timed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Device(StrEnum):
    cuda = "cuda"
    twin = "twin"


class EngineDevice(StrEnum):
    cuda = "cuda"
    cpu = "cpu"
    twin = "twin"


class NetworkDevice(StrEnum):
    cuda = "cuda"
    cpu = "cpu"


Operation = Annotated[str, typer.Argument(help="The operation, such as conv2d.", show_default=False)]
Problems = Annotated[
    list[str] | None,
    typer.Option("--problem", "-p", help="A problem such as 64to64_56_k3s1_b256; may be repeated."),
]
Rungs = Annotated[list[str] | None, typer.Option("--rung", "-r", help="Only this rung; may be repeated.")]
Dtypes = Annotated[
    list[str] | None, typer.Option("--dtype", "-t", help="fp32, tf32, fp16, bf16 or fp8; may be repeated.")
]
Layouts = Annotated[list[str] | None, typer.Option("--layout", "-l", help="nchw or nhwc; may be repeated.")]
Where = Annotated[
    Device | None,
    typer.Option(
        help="cuda, or twin: the kernels on the CPU. Without it: cuda if there is a GPU.", show_default=False
    ),
]

NetworkWhere = Annotated[
    NetworkDevice | None,
    typer.Option(
        help="cuda, or cpu: PyTorch's operators. Without it: cuda if there is a GPU.", show_default=False
    ),
]


def _version(asked: bool) -> None:
    if asked:
        from escalade import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it.")
    ] = False,
) -> None: ...


@app.command()
def doctor() -> None:
    """What is here: GPU, driver, compilers, versions, caches; what will and will not work, and what to do about it."""
    from escalade.commands.doctor import examine, show

    raise typer.Exit(show(examine()))


@app.command()
def ladder(
    operation: Operation,
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    device: Where = None,
    tune: Annotated[bool, typer.Option(help="Time every config of every rung, and keep the best.")] = False,
    ablate: Annotated[
        bool, typer.Option(help="Also time the rungs that offer it with one idea off at a time.")
    ] = False,
    crossover: Annotated[
        bool, typer.Option(help="Measure the sweep over filter sizes instead of the usual problems.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to measure each rung.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the records to this file too.")] = None,
    results: Annotated[
        pathlib.Path | None,
        typer.Option(help="File the records under this folder, as FOLDER/<gpu>/<workload>.jsonl."),
    ] = None,
) -> None:
    """The rungs of an operation, verified and then timed beside PyTorch and the card's ceilings."""
    from escalade.commands import ladder as commands

    options = commands.LadderOptions(
        operation, tuple(problem or ()), tuple(rung or ()), tuple(dtype or ()), tuple(layout or ()),
        device, tune, ablate, crossover, seconds, seed, json, results,
    )  # fmt: skip
    raise typer.Exit(commands.ladder(options))


@app.command()
def verify(
    operation: Annotated[
        str | None, typer.Argument(help="Without it: all operations.", show_default=False)
    ] = None,
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    device: Where = None,
    all_configs: Annotated[
        bool, typer.Option(help="Every config of every rung, not only the default.")
    ] = False,
    checks: Annotated[
        bool, typer.Option(help="On the twin: check every memory access, races and overruns.")
    ] = False,
    order: Annotated[int, typer.Option(help="On the twin: shuffle threads and blocks by this seed.")] = 0,
    late: Annotated[
        bool, typer.Option(help="On the twin: asynchronous operations as late as allowed.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the random inputs; a fresh one each time without it.", show_default=False),
    ] = None,
) -> None:
    """Every rung on every problem against the float64 reference. Fails if any result is wrong."""
    from escalade.commands import ladder as commands

    options = commands.VerifyOptions(
        operation, tuple(problem or ()), tuple(rung or ()), tuple(dtype or ()), tuple(layout or ()),
        device, all_configs, checks, order, late, seed,
    )  # fmt: skip
    raise typer.Exit(commands.verify(options))


@app.command()
def precompile(
    operation: Operation,
    arch: Annotated[str, typer.Option(help="The GPU architecture; an H100 or H200 is sm_90a.")] = "sm_90a",
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    tune: Annotated[bool, typer.Option(help="Every config, as `ladder --tune` needs them.")] = False,
    workers: Annotated[
        int | None, typer.Option(help="Processes; one a core without it.", show_default=False, min=1)
    ] = None,
) -> None:
    """Compile the kernels of an operation into the cache, in parallel. Needs no GPU."""
    from escalade.commands import ladder as commands

    which = commands.Which(
        operation, tuple(problem or ()), tuple(rung or ()), tuple(dtype or ()), tuple(layout or ())
    )
    raise typer.Exit(commands.precompile(which, arch, tune, workers))


@app.command()
def tune(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Networks of escalade.models, such as resnet18; with --problem, the operation that it is of.",
            show_default=False,
        ),
    ] = None,
    problem: Problems = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    batch: Annotated[str, typer.Option(help="Batch sizes of networks, separated by commas.")] = "1,8,32,256",
    table: Annotated[
        pathlib.Path | None,
        typer.Option(help="The table to fill; yours for this GPU without it.", show_default=False),
    ] = None,
    again: Annotated[bool, typer.Option(help="Measure anew what the table already has.")] = False,
    sweep: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Instead: time every candidate of so many random convolutions into the file --out, which is "
            "gone on with if it is there.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random convolutions.")] = 0,
    judge: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Instead: how the choices that need no measurement compare with the best of such a file. Fails if any "
            "takes more than twice as long. Needs no GPU.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[pathlib.Path, typer.Option(help="Where --sweep writes.")] = pathlib.Path("sweep.jsonl"),
) -> None:
    """Measure every rung and config for the steps of networks, or for problems, and remember the fastest.

    Entries are saved as they are found: a run that is stopped goes on where it was when it is started again.
    """
    from escalade.commands import tune as commands

    instead = sum((sweep is not None, judge is not None))
    if instead > 1 or (instead and (names or problem)):
        raise typer.BadParameter("--sweep, --judge and what is to be tuned exclude each other")
    if judge is not None:
        raise typer.Exit(commands.judge(judge))
    if sweep is not None:
        raise typer.Exit(commands.sweep_into(out, sweep, seed))
    options = commands.TuneOptions(
        tuple(names or ()), tuple(problem or ()), tuple(dtype or ("fp16",)), tuple(layout or ("nhwc",)),
        _numbers("--batch", _listed([batch])), table, again,
    )  # fmt: skip
    raise typer.Exit(commands.tune(options))


@app.command()
def bench(
    workload: Annotated[
        str,
        typer.Argument(
            help="resnet18, resnet34, resnet50, lenet or spectral_autoencoder.", show_default=False
        ),
    ],
    batch: Annotated[
        list[str] | None,
        typer.Option(
            "--batch", "-b", help="Batch sizes such as 1,8,32; may be repeated.", show_default=False
        ),
    ] = None,
    dtype: Dtypes = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="torch-eager, torch-graph, torch-compile (90 s a batch), jax; all, none. Without it: the quick ones.",
            show_default=False,
        ),
    ] = None,
    parts: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these: accuracy, batches; phases, stream (ResNets); op-times, stream (lenet); score, training "
            "(spectral_autoencoder). Without it: the usual ones.",
            show_default=False,
        ),
    ] = None,
    device: NetworkWhere = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to measure each system.")] = 0.3,
    phases: Annotated[bool, typer.Option(help="One image from the naive kernels to the engine.")] = True,
    stream: Annotated[
        bool, typer.Option(help="Also uint8 images from host memory, as a part of its own.")
    ] = False,
    size: Annotated[
        int | None,
        typer.Option(help="Of the images, for ResNets; 224 without it.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights and images.")] = 0,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the records to this file too.")] = None,
    results: Annotated[
        pathlib.Path | None,
        typer.Option(help="File the records under this folder, as FOLDER/<gpu>/<workload>.jsonl."),
    ] = None,
    plot: Annotated[pathlib.Path | None, typer.Option(help="Draw the figures into this .png file.")] = None,
) -> None:
    """A network beside its peers, in one run: verified, then timed for every batch size and dtype."""
    from escalade.commands import bench as commands

    options = commands.BenchOptions(
        workload, _numbers("--batch", _listed(batch)), _listed(dtype), _listed(peers), _listed(parts), device,
        seconds, phases, stream, size, seed, json, results, plot,
    )  # fmt: skip
    raise typer.Exit(commands.bench(options))


@app.command()
def layers(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Sets of layers: resnet18, resnet50, stem, depthwise, untuned; or convolutions such as "
            "64to64_56_k3s1_b256_bias+relu.",
            show_default=False,
        ),
    ],
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", "-b", help="Batch sizes such as 32,256; 256 without it.", show_default=False),
    ] = None,
    dtype: Dtypes = None,
    direction: Annotated[
        str, typer.Option("--direction", "-d", help="forward, input_gradient or weight_gradient.")
    ] = "forward",
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="cudnn-graph (the best plan of cuDNN; needs nvidia-cudnn-frontend), torch, torch-compile ("
            "tens of seconds a layer); none. Without it: the first two.",
            show_default=False,
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(help="Search the fastest config of all preferred rungs, instead of what a call takes."),
    ] = False,
    device: Where = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to measure each system.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the records to this file too.")] = None,
    results: Annotated[
        pathlib.Path | None,
        typer.Option(help="File the records under this folder, as FOLDER/<gpu>/layers.jsonl."),
    ] = None,
) -> None:
    """Single convolutions beside their peers, in one run: verified, then timed in turns, layer by layer."""
    from escalade.commands import layers as command

    options = command.LayerOptions(
        tuple(names), _numbers("--batch", _listed(batch)), _listed(dtype), direction, _listed(peers), tune, device,
        seconds, seed, json, results,
    )  # fmt: skip
    raise typer.Exit(command.layers(options))


@app.command()
def explain(
    model: Annotated[
        str,
        typer.Argument(help="A model such as resnet18, or the file of a saved engine.", show_default=False),
    ],
    batch: Annotated[int, typer.Option("--batch", "-b", help="The batch size to plan for.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", "-t", help="fp32, tf32, fp16 (the default), bf16 or fp8.", show_default=False
        ),
    ] = None,
    device: NetworkWhere = None,
    time: Annotated[bool, typer.Option("--time", help="Time each step by itself, on the GPU.")] = False,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the plan to this file too.")] = None,
) -> None:
    """The plan of a network: each step, the kernel chosen and why, its least cost, what falls back to PyTorch."""
    from escalade.commands import bench as commands

    raise typer.Exit(commands.explain(commands.ExplainOptions(model, batch, dtype, device, time, json)))


def _listed(given: list[str] | None) -> tuple[str, ...]:
    """`-b 1,8 -b 32` is three values; what is given and has none is a mistake, not the usual ones."""
    found = tuple(part.strip() for text in given or () for part in text.split(",") if part.strip())
    if given and not found:
        raise typer.BadParameter(f"{given[0]!r} names nothing; leave the option out for the usual ones")
    return found


def _numbers(option: str, given: tuple[str, ...]) -> tuple[int, ...]:
    for text in given:
        if not text.isdecimal():
            raise typer.BadParameter(f"{text!r} is no whole number", param_hint=option)
    return tuple(int(text) for text in given)


@app.command()
def classify(
    images: Annotated[
        list[pathlib.Path], typer.Argument(help="Image files, and folders of them.", show_default=False)
    ],
    weights: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--weights",
            "-w",
            help="A ResNet's .safetensors, .pth or .pt file, named as torchvision or timm do.",
        ),
    ] = None,
    labels: Annotated[
        pathlib.Path | None, typer.Option(help="The names of the classes: one a line, or a .json list.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", "-t", help="fp32, tf32, fp16, bf16 or fp8 (ranges from the first batch)."),
    ] = "fp16",
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Images at a time.")] = 32,
    device: Annotated[
        EngineDevice | None,
        typer.Option(
            help="cuda, cpu (PyTorch's operators) or twin (the kernels on the CPU: slow). "
            "Without it: cuda if there is a GPU, else cpu.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes to show for an image.")] = 5,
    mean: Annotated[
        tuple[float, float, float] | None,
        typer.Option(
            help="Of red, green and blue, from 0 to 1. Without it: ImageNet's, or 0 for a CIFAR network."
        ),
    ] = None,
    std: Annotated[
        tuple[float, float, float] | None,
        typer.Option(help="Their standard deviations. Without it: ImageNet's, or 1 for a CIFAR network."),
    ] = None,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the results to this file too.")] = None,
    csv: Annotated[pathlib.Path | None, typer.Option(help="Write the results to this file too.")] = None,
) -> None:
    """What is on images, by a ResNet whose weights you have. Fails at the end if an image could not be read."""
    from escalade.commands import classify as images_to_classes

    options = images_to_classes.Options(
        tuple(images), weights, labels, dtype, batch, device, top, mean, std, json, csv
    )
    raise typer.Exit(images_to_classes.classify(options))


@app.command()
def tables(
    check: Annotated[bool, typer.Option(help="Change nothing; fail if a table is out of date.")] = False,
    results: Annotated[pathlib.Path, typer.Option(help="Where the records are.")] = pathlib.Path("results"),
    root: Annotated[pathlib.Path, typer.Option(help="The folder of README.md and docs.")] = pathlib.Path("."),
) -> None:
    """The tables of README.md and docs/ladder.md, and the ladder plot, from the records in results/."""
    from escalade.report import tables as generated

    generated.require_records(results)
    if check:
        stale = generated.stale(results, root)
        for path in stale:
            typer.echo(f"{path} is not what results/ says; run: escalade tables")
        raise typer.Exit(1 if stale else 0)
    for path in generated.write(results, root):
        typer.echo(f"wrote {path}")


def main() -> None:
    """The entry point: an error that Escalade raises on purpose is one sentence, not a traceback."""
    try:
        app()
    except EscaladeError as error:
        typer.echo(f"escalade: {shown(error, keep=_LINES)}", err=True)
        sys.exit(1)
