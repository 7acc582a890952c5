"""The verbs. Each module has one `run` function; no verb imports another.

A verb with a plan is a function of `PlanOptions` and of its own options. `with_plan_options` adds
the target and the options that all these verbs share to its command line.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from fivefold.api.bridging import is_foreign, target_or_options
from fivefold.api.checks import above as above
from fivefold.api.checks import asked_backend as asked_backend
from fivefold.api.checks import checkpoint_step as checkpoint_step
from fivefold.api.checks import one_of as one_of
from fivefold.api.checks import positive as positive
from fivefold.api.jobs import GivenJob
from fivefold.core import (
    JSON_SCHEMA,
    PRECISIONS,
    BadFile,
    FivefoldError,
    RankLost,
    parse_count,
    run_keys,
)
from fivefold.core import hardware as machines
from fivefold.core.layout import parse_zero
from fivefold.core.plan import PlanOptions, options_from, parse_settings, require_key, says_layout
from fivefold.verbs.options import OF_BRIDGES as OF_BRIDGES
from fivefold.verbs.options import SERVING as SERVING
from fivefold.verbs.options import SHARED, TARGET
from fivefold.verbs.options import BackendOption as BackendOption
from fivefold.verbs.options import BudgetOption as BudgetOption
from fivefold.verbs.options import FixOption as FixOption
from fivefold.verbs.options import ImbalanceOption as ImbalanceOption
from fivefold.verbs.options import KernelsOption as KernelsOption
from fivefold.verbs.options import MfuOption as MfuOption
from fivefold.verbs.options import MtbfOption as MtbfOption
from fivefold.verbs.options import ObjectiveOption as ObjectiveOption
from fivefold.verbs.options import OutputOption as OutputOption
from fivefold.verbs.options import PrecisionOption as PrecisionOption
from fivefold.verbs.options import RatioOption as RatioOption
from fivefold.verbs.options import RunOption as RunOption
from fivefold.verbs.options import RunPrecisionOption as RunPrecisionOption
from fivefold.verbs.options import StackOption as StackOption
from fivefold.verbs.options import SweepOption as SweepOption
from fivefold.verbs.options import TableOption as TableOption
from fivefold.verbs.options import TextbookOption as TextbookOption
from fivefold.verbs.options import TokensOption as TokensOption
from fivefold.verbs.options import WhatIfOption as WhatIfOption
from fivefold.verbs.options import WrittenOption as WrittenOption

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from fivefold.api.jobs import OnProgress, TaskProgress
    from fivefold.generate import TextPiece, TextTask


def with_plan_options(
    verb: Callable[..., None],
    default_target: str | None = None,
    look_up: Callable[[str], str] = str,
    group: tuple[str, Mapping[str, Any]] = ("", {}),
) -> Callable[..., None]:
    """The verb as a command with the target, the shared options and its own options.

    Without a `default_target` the target is required. `look_up` may replace the target. `group`:
    more options, which the verb gets as one mapping under a name.
    """
    no_default = inspect.Parameter.empty
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
    own = [parameter for parameter in own if parameter.name != group[0]]

    def run(**given: Any) -> None:
        shared = {name: given.pop(name) for name in SHARED}
        grouped = {name: given.pop(name) for name in group[1]}
        target = _options(look_up(given.pop("target")), shared, grouped.get("model"))
        verb(target, **given, **({group[0]: grouped} if grouped else {}))

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
            for name, annotation in (*SHARED.items(), *group[1].items())
        ),
        *(parameter.replace(kind=keyword) for parameter in own),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = verb.__doc__
    return run


def as_given(options: PlanOptions, command: typer.Context) -> GivenJob:
    """What the command line gives of a job; without a layout or a plan its layout is open."""
    names = {name for name, value in command.params.items() if value not in (None, False, [])}
    names |= _pairs(command.params["set"] or []).keys() & {*SHARED, "steps"}
    target: str = command.params["target"]
    closed = is_foreign(target) or says_layout(target)
    return GivenJob(options, frozenset(names), "layout" not in names and not closed)


def json_text(table: Mapping[str, Any], indent: int | None = None) -> str:
    """What --json prints: a table of docs/reference-json.md, with the version of its keys."""
    return json.dumps({"schema_version": JSON_SCHEMA, **table}, indent=indent)


def in_precision(options: PlanOptions, precision: str | None) -> PlanOptions:
    """The job in the precision that an option names, or as it is."""
    if precision is None:
        return options
    keys: dict[str, Any] = run_keys(one_of("precision", precision, PRECISIONS))
    return replace(options, **keys)


def tokens_of(option: str, given: str | int) -> int:
    """A number of tokens."""
    try:
        number = parse_count(str(given), option)
    except ValueError:
        hint = "give a whole number of tokens, such as 256, 500k or 1M"
        raise FivefoldError(f"--{option} {given}: {hint}") from None
    if number < 1:
        raise FivefoldError(f"--{option} {given}: give 1 token at least")
    return number


def known_machines() -> str:
    """The names of all presets."""
    return ", ".join(machines.presets())


def require_known(machine: str | None) -> None:
    """Refuse an unknown machine."""
    if machine is not None:
        machines.load(machine)


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
    other_names = names - {*allowed, "as_json"}
    if extras := sorted(name for name in other_names if typed(command, name)):
        word = "MODEL" if extras[0] == "target" else f"--{extras[0].replace('_', '-')}"
        raise FivefoldError(f"{word} has no effect with --{option}: leave one of them out")


def _options(target: str, shared: dict[str, Any], model: str | None) -> PlanOptions:
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
    return options_from(target_or_options(target, shared["gpus"], model), shared | settings.plan)


def _pairs(texts: list[str]) -> dict[str, str]:
    """Settings between spaces or commas, unless quotes are around these."""
    pairs: dict[str, str] = {}
    split = shlex.shlex(" ".join(texts), posix=True)
    split.whitespace, split.whitespace_split = ", \t\n", True
    split.commenters = split.escape = ""
    try:
        parts = list(split)
    except ValueError as error:
        raise BadFile("--set", [f"{error}; close the quotes"]) from error
    for word in parts:
        key, equals, value = word.partition("=")
        if not equals or not value:
            if equals:
                require_key(key)  # its name may be the mistake
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
    from fivefold.generate import run_ranks

    def on_each(piece: TextPiece) -> None:
        on_piece(piece)
        bar.advance(int(piece.written is not None))

    with progress_bar(title, len(task.requests), shown=len(task.requests) > 1) as bar:
        try:
            run_ranks(task, on_each, warn)
        except RankLost as lost:
            warn(lost.reason)
            raise typer.Exit(1) from lost
