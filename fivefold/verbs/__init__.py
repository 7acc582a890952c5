"""The verbs: wiring only. Each module has one `run`; no verb imports another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer

from fivefold.core.errors import BadFile, FivefoldError, UnknownName
from fivefold.core.layout import parse_zero
from fivefold.core.plan import Wishes, wishes_from
from fivefold.core.settings import sort_out

# The option set that every verb with a plan shares, spelled and defaulted alike.
#
# A verb is a function of `Wishes` and of its own options; `with_plan_options` gives its command
# line the target and the shared options, and hands it the wishes.


Number = TypeVar("Number", int, float)

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
    "gpus": _option(int, "Number of GPUs, to be equal to the layout's product."),
    "zero": _option(str, "ZeRO stage 0 to 3, or FSDP's name for it (default 3; 1 with pp > 1)."),
    "gather": _option(
        str, "How often ZeRO-3 gathers weights: step or microbatch (default step with pp > 1)."
    ),
    "schedule": _option(str, "Pipeline schedule by name, auto, or a file (default 1f1b)."),
    "chunks": _option(int, "Stages on each pipeline rank (default: the schedule's minimum)."),
    "stage_layers": _option(str, 'Layers of each stage, as in "7,8,8,7" (default: by cost).'),
    "microbatches": _option(int, "Microbatches a step (default: the smallest legal ≥ 2·pp)."),
    "microbatch_size": _option(int, "Sequences in a microbatch (default 1)."),
    "seq": _option(int, "Tokens in a sequence (default: 8192 or the model's most)."),
    "batch": _option(int, "Global batch in sequences (default: dp × microbatches × size)."),
    "context": _option(str, "Context kind: ring, zigzag, allgather, ulysses, hybrid."),
    "recompute": _option(str, "Recompute: none, selective, full, or full:K."),
    "balance": _option(
        str, "Rules for experts' load: aux, aux-seq, aux-global, z, bias, capacity:C, none; a+b."
    ),
    "ep_nodes": _option(
        int, "Nodes of an ep group; a token is sent once to each (default: the machine's)."
    ),
    "tp_keep": _option(
        str, "What split products keep: shard (gathered again in backward) or gathered."
    ),
    "sp": _option(bool, "Without sequence parallelism.", "--no-sp"),
    "packed": _option(bool, "Pack documents, with document masks.", "--packed"),
    "set": _option(
        list[str], 'Any key of plan, training or model: "layers=4 lr=3e-4 zero=1".', "--set"
    ),
}


def with_plan_options(
    verb: Callable[..., None],
    default_target: str | None = None,
    look_up: Callable[[str], str] = str,
) -> Callable[..., None]:
    """The verb as a command with the target, the shared options and then its own.

    Without a `default_target` the target must be given; `look_up` may find another behind its name.
    """
    no_default = inspect.Parameter.empty
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]

    def run(**given: Any) -> None:
        shared = {name: given.pop(name) for name in SHARED}
        verb(_wishes(look_up(given.pop("target")), shared), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            "target", keyword, default=default_target or no_default, annotation=TARGET
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


def one_of(option: str, given: str, known: tuple[str, ...]) -> str:
    """A word that an option knows."""
    if given not in known:
        raise UnknownName(f"--{option}", given, known)
    return given


def above(option: str, given: Number, low: Number) -> Number:
    """A number in an option's range."""
    if not low < given < 1e9:
        raise FivefoldError(f"--{option} {given}: give a number above {low} and below 1e9")
    return given


def _wishes(target: str, shared: dict[str, Any]) -> Wishes:
    """What the command line says, in the types of `Wishes`."""
    if shared["zero"] is not None:
        shared["zero"] = parse_zero(shared["zero"])
    shared["sp"] = False if shared["sp"] else None
    said = sort_out(_pairs(shared["set"] or []))
    shared |= {"set": said.model or None, "train": said.train or None}
    twice = [key for key in said.plan if shared.get(key) is not None]
    if twice:
        raise BadFile("--set", [f"{key} is said twice: leave one out" for key in twice])
    return wishes_from(target, shared | said.plan)


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in " ".join(texts).replace(",", " ").split():
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise BadFile("--set", [f"{word!r} is no setting: write key=value, such as layers=4"])
        pairs[key] = value
    return pairs


@contextmanager
def progress_bar(words: str) -> Iterator[Callable[[float], None] | None]:
    """One progress bar, where somebody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(words), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(words, total=1.0)
        yield lambda share: progress.update(task, completed=share)
