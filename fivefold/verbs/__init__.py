"""The verbs. Each module has one `run` function; no verb imports another.

A verb with a plan is a function of `PlanOptions` and of its own options. `with_plan_options` adds
the target and the options that all these verbs share to its command line.
"""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fivefold.api.checks import above as above
from fivefold.api.checks import asked_backend as asked_backend
from fivefold.api.checks import checkpoint_step as checkpoint_step
from fivefold.api.checks import one_of as one_of
from fivefold.api.checks import positive as positive
from fivefold.core import machine as machines
from fivefold.core.errors import BadFile, FivefoldError, RankLost, UnknownName
from fivefold.core.layout import parse_zero
from fivefold.core.plan import PlanOptions, options_from
from fivefold.core.precision import PRECISIONS
from fivefold.core.settings import parse_settings
from fivefold.core.splits import CONTEXT_KINDS

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from fivefold.api.jobs import OnProgress, TaskProgress
    from fivefold.generate.text_ranks import TextTask
    from fivefold.generate.writer import TextPiece

TARGET = Annotated[
    str,
    typer.Argument(help="Model preset, Hugging Face config.json, or plan.toml.", metavar="MODEL"),
]


def _option(kind: Any, help: str, *names: str) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=help, show_default=False)]


SHARED: dict[str, Any] = {
    "layout": _option(
        str, 'Degrees, as in "dp=2x2 tp=2 pp=2 cp=2 ep=2 etp=1"; dp=RxS is replicate x shard.'
    ),
    "machine": _option(str, "Machine preset (h100, gb200, …) or TOML file."),
    "gpus": _option(int, "Number of GPUs; with a layout, the product of its degrees."),
    "zero": _option(str, "ZeRO stage 0 to 3, or FSDP's name for it (default 3; 1 with pp > 1)."),
    "gather": _option(
        str, "How often ZeRO-3 gathers weights: step or microbatch (default step with pp > 1)."
    ),
    "grad_dtype": _option(
        str, "Dtype in which gradients are accumulated and reduced: fp32 or bf16 (default fp32)."
    ),
    "unit_size": _option(
        float, "MB of weights in a flat unit (default: a block; small ones joined up to 25)."
    ),
    "prefetch": _option(int, "Blocks that ZeRO-3 gathers ahead; 0: none (default 1)."),
    "schedule": _option(str, "Pipeline schedule by name, auto, or a file (default 1f1b)."),
    "chunks": _option(int, "Stages on each pipeline rank (default: the schedule's minimum)."),
    "stage_layers": _option(str, 'Layers of each stage, as in "7,8,8,7" (default: by cost).'),
    "microbatches": _option(int, "Microbatches per step (default: the smallest legal ≥ 2·pp)."),
    "microbatch_size": _option(int, "Sequences in a microbatch (default 1)."),
    "seq": _option(int, "Tokens in a sequence (default: 8192 or the model's maximum)."),
    "batch": _option(int, "Global batch in sequences (default: dp × microbatches × size)."),
    "context": _option(str, f"Context kind: {', '.join(CONTEXT_KINDS)}."),
    "recompute": _option(
        str, "Recompute: none, selective, full[:K], modules as in norm+mlp; some stages: full@0-1."
    ),
    "balance": _option(
        str, "Load balancing of experts: aux, aux-seq, aux-global, z, bias, capacity:C, none; a+b."
    ),
    "ep_nodes": _option(
        int, "Nodes of an ep group; each gets a token once (default: the machine's)."
    ),
    "tp_keep": _option(
        str, "Input that column GEMMs save: shard (gathered again in backward) or gathered."
    ),
    "tp_overlap": _option(
        int, "Tensor collectives beside matmuls: 0 none, 1 in backward, K in K chunks (default 1)."
    ),
    "fp8": _option(str, "What shares a scale in fp8: tensorwise (default), blockwise or mxfp8."),
    "fp8_wgrad": _option(str, "Operands of weight gradients in fp8: fp8 or bf16 (default fp8)."),
    "fp8_gradients": _option(
        str, "Format of gradients in fp8: e4m3 or e5m2 (default e5m2; e4m3 if in blocks)."
    ),
    "fp8_matmul": _option(
        str, "Where a GPU has no units for fp8: emulated multiplies the rounded values (slow)."
    ),
    "fp8_skip": _option(str, "First and last layers that fp8 leaves in bf16 (default 0+0)."),
    "sp": _option(bool, "Turn sequence parallelism off.", "--no-sp"),
    "packed": _option(bool, "Pack documents, with document masks.", "--packed"),
    "set": _option(
        list[str], 'Any key of plan, training or model: "layers=4 lr=3e-4 zero=1".', "--set"
    ),
}


BackendOption = Annotated[
    str | None,
    typer.Option(
        help="Backend of collectives between GPUs: nccl or gloo (default: nccl if every rank has "
        "its own GPU or NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share one, else gloo).",
        show_default=False,
    ),
]

# Options of `plan`: how to search, and questions beside the search.
FixOption = Annotated[
    str | None, typer.Option(help='Values that a search must use: "tp=8 zero=1 schedule=zb-v".')
]
TokensOption = Annotated[
    float | None, typer.Option(help="Tokens of the full run, for days and GPU-hours.")
]
ObjectiveOption = Annotated[
    str, typer.Option(help="Best by: tokens (per second), gpus (fewest), gpu-hours (fewest).")
]
WhatIfOption = Annotated[
    str | None, typer.Option(help='Compare with a changed job: "gpus=2x", "machine=gb200".')
]
PrecisionOption = Annotated[str | None, typer.Option(help=f"Estimate in {', '.join(PRECISIONS)}.")]
KernelsOption = Annotated[
    str, typer.Option(help="compiled, eager or graphs: what blocks save, how they launch.")
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the plan as TOML.")
]
StackOption = Annotated[
    str | None,
    typer.Option(help="Price other people's software: nemo, torchtitan, a file."),
]
ImbalanceOption = Annotated[
    float | None, typer.Option(help="Load of the fullest expert over the mean; 1 is balanced.")
]
SweepOption = Annotated[
    str | None, typer.Option(help="Curves: seq=4k..1m, gpus=8..16384, tp=1..8, or tp.")
]
TableOption = Annotated[
    str | None, typer.Option(help="zero3-or-pipeline, data-or-model or memory.")
]
RunOption = Annotated[
    str | None, typer.Option("--run", help="A great run by name, beside our estimate of it.")
]
TextbookOption = Annotated[
    bool, typer.Option("--textbook", help="The textbook's formulas with their numbers.")
]
BudgetOption = Annotated[
    str | None,
    typer.Option(help='Compute-optimal size and tokens: "1e24" FLOPs or "512 h100 30 days".'),
]
RatioOption = Annotated[float, typer.Option(help="Tokens per active parameter, for --budget.")]
MfuOption = Annotated[float, typer.Option(help="Share of the peak that --budget assumes of GPUs.")]


def with_plan_options(
    verb: Callable[..., None],
    default_target: str | None = None,
    look_up: Callable[[str], str] = str,
) -> Callable[..., None]:
    """The verb as a command with the target, the shared options and its own options.

    Without a `default_target` the target is required. `look_up` may replace the target.
    """
    no_default = inspect.Parameter.empty
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]

    def run(**given: Any) -> None:
        shared = {name: given.pop(name) for name in SHARED}
        verb(_options(look_up(given.pop("target")), shared), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            "target",
            keyword,
            default=no_default if default_target is None else default_target,
            annotation=TARGET,
        ),
        *(
            inspect.Parameter(name, keyword, default=None, annotation=annotation)
            for name, annotation in SHARED.items()
        ),
        *(each.replace(kind=keyword) for each in own),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = verb.__doc__
    return run


def known_machines() -> str:
    """The names of all presets."""
    return ", ".join(machines.presets())


def require_known(machine: str | None) -> None:
    """Refuse an unknown machine with a list of all known ones."""
    if machine is None:
        return
    try:
        machines.load(machine)
    except UnknownName as error:
        if known_machines() in str(error):
            raise
        raise FivefoldError(f"{error} known machines: {known_machines()}") from error


def with_machine(options: PlanOptions, as_json: bool) -> PlanOptions:
    """A search with its machine: asks for one on a terminal, and refuses elsewhere."""
    if options.machine is not None:
        return options
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise FivefoldError(
            f"--gpus {options.gpus} without a machine or a layout: add --machine NAME, one of "
            f'{known_machines()} or a TOML file; or give --layout "dp={options.gpus}"'
        )
    question = f"machines: {known_machines()}\nwhich one has the GPUs [h100]: "
    typer.echo(question, err=True, nl=False)
    machine = sys.stdin.readline().strip() or "h100"
    require_known(machine)
    return replace(options, machine=machine)


def typed(command: typer.Context, name: str) -> bool:
    """Whether the option is on the command line, and not just its default."""
    source = command.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def only_with(command: typer.Context, option: str, allowed: Collection[str]) -> None:
    """Refuse what has no effect beside an option."""
    names: set[str] = set(command.params)
    rest = names - {*allowed, "as_json"}
    if more := sorted(each for each in rest if typed(command, each)):
        word = "MODEL" if more[0] == "target" else f"--{more[0].replace('_', '-')}"
        raise FivefoldError(f"{word} has no effect with --{option}: leave one of them out")


def _options(target: str, shared: dict[str, Any]) -> PlanOptions:
    """The command line as `PlanOptions`."""
    if shared["zero"] is not None:
        shared["zero"] = parse_zero(shared["zero"])
    shared["sp"] = False if shared["sp"] else None
    if shared["gpus"] is not None:
        above("gpus", shared["gpus"], 0)
    settings = parse_settings(_pairs(shared["set"] or []))
    shared |= {"set": settings.model or None, "train": settings.train or None}
    twice = [key for key in settings.plan if shared.get(key) is not None]
    if twice:
        raise BadFile("--set", [f"{key} is given twice: leave one out" for key in twice])
    return options_from(target, shared | settings.plan)


def _pairs(texts: list[str]) -> dict[str, str]:
    """Settings between spaces or commas, unless quotes are around these."""
    pairs: dict[str, str] = {}
    split = shlex.shlex(" ".join(texts), posix=True)
    split.whitespace, split.whitespace_split = ", \t\n", True
    split.commenters = split.escape = ""
    try:
        words = list(split)
    except ValueError as error:
        raise BadFile("--set", [f"{error}; close the quotes"]) from error
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise BadFile("--set", [f"{word!r} is no setting: write key=value, such as layers=4"])
        pairs[key] = value
    return pairs


class ProgressBar(NamedTuple):
    """What a long task calls: `advance` adds to the progress, `update` sets it."""

    advance: Callable[[float], None]
    update: Callable[[float], None]


@contextmanager
def progress_bar(
    title: str, total: float = 1.0, *columns: ProgressColumn, shown: bool = True
) -> Iterator[ProgressBar]:
    """A progress bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        *(TextColumn(title), BarColumn(), *(columns or (TimeElapsedColumn(),))),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    ) as progress:
        task = progress.add_task(title, total=total)
        yield ProgressBar(
            partial(progress.advance, task), lambda done: progress.update(task, completed=done)
        )


@contextmanager
def shown_progress(title: str, shown: bool = True) -> Iterator[OnProgress]:
    """A progress bar from the first report on: until then ranks may be forked, without the thread
    that draws it."""
    with ExitStack() as stack:
        bars: list[ProgressBar] = []

        def on_progress(now: TaskProgress) -> None:
            if not bars:
                bar = progress_bar(title, now.total, shown=shown)
                bars.append(stack.enter_context(bar))
            bars[0].update(now.done)

        yield on_progress


def warn(why: str) -> None:
    """Say what is wrong, though it goes on."""
    typer.echo(f"fivefold: {why}", err=True)


def write_texts(task: TextTask, title: str, on_piece: Callable[[TextPiece], None]) -> None:
    """Run the ranks of a generator, and pass on what they write."""
    from fivefold.generate.text_ranks import run_ranks

    def on_each(piece: TextPiece) -> None:
        on_piece(piece)
        bar.advance(int(piece.written is not None))

    with progress_bar(title, len(task.requests), shown=len(task.requests) > 1) as bar:
        try:
            run_ranks(task, on_each, warn)
        except RankLost as lost:
            warn(lost.reason)
            raise typer.Exit(1) from lost
