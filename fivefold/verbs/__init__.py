"""The verbs. Each module has one `run` function; no verb imports another.

A verb with a plan is a function of `PlanOptions` and of its own options. `with_plan_options` adds
the target and the options that all these verbs share to its command line.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

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
    tables,
)
from fivefold.core import hardware as machines
from fivefold.core.layout import parse_zero
from fivefold.core.plan import (
    PlanOptions,
    options_from,
    parse_settings,
    plan_keys,
    require_key,
    says_layout,
)
from fivefold.terminal import long_name
from fivefold.verbs.options import FP8 as FP8
from fivefold.verbs.options import PACKED as PACKED
from fivefold.verbs.options import SHARED, TARGET
from fivefold.verbs.options import BackendOption as BackendOption
from fivefold.verbs.options import HeadroomKey as HeadroomKey
from fivefold.verbs.options import ImbalanceKey as ImbalanceKey
from fivefold.verbs.options import Key as Key
from fivefold.verbs.options import PrecisionOption as PrecisionOption
from fivefold.verbs.options import RunPrecisionOption as RunPrecisionOption

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from fivefold.api.jobs import OnProgress, TaskProgress
    from fivefold.generate import TextPiece, TextTask


def with_plan_options(
    verb: Callable[..., None],
    default_target: str | None = None,
    look_up: Callable[[str], str] = str,
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., None]:
    """The verb as a command with the target, the shared options and its own options.

    Parameters that are annotated as a `Key` are given with `--set`. Without a `default_target` the
    target is required. `look_up` may replace the target. `flags`: keys of a plan that are options
    of this command.
    """
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
    keys = {param.name: param for param in own if _key_of(param) is not None}
    shared = {**SHARED, **flags}

    def run(command: typer.Context, **params: Any) -> None:
        plan_params = {name: params.pop(name) for name in shared}
        pairs = _pairs(plan_params.pop("set") or [])
        own_keys = _parsed({key: pairs.pop(key) for key in [*pairs] if key in keys}, keys)
        command.params |= {key: param.default for key, param in keys.items()} | own_keys
        command.meta[_SET] = {*pairs, *own_keys}
        options = _options(look_up(params.pop("target")), plan_params, pairs, own_keys.get("model"))
        if any(param.name == "command" for param in own):
            params["command"] = command
        verb(options, **params, **own_keys)

    keyword = inspect.Parameter.KEYWORD_ONLY
    no_default = inspect.Parameter.empty
    default = no_default if default_target is None else default_target
    parameters = [
        inspect.Parameter("command", keyword, annotation=typer.Context),
        inspect.Parameter("target", keyword, default=default, annotation=TARGET),
        *(
            inspect.Parameter(name, keyword, default=None, annotation=annotation)
            for name, annotation in shared.items()
        ),
        *(param.replace(kind=keyword) for param in own if param.name not in (*keys, "command")),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {param.name: param.annotation for param in parameters}
    run.__doc__ = verb.__doc__
    run.keys = {name: _key_of(param) for name, param in keys.items()}  # type: ignore[attr-defined]
    return run


_SET = "fivefold.set"  # where the context of a command has the names that `--set` gives


def _key_of(param: inspect.Parameter) -> Key | None:
    """The key that a parameter is declared as, or None if it is a flag."""
    marks = getattr(param.annotation, "__metadata__", ())
    return marks[0] if marks and isinstance(marks[0], Key) else None


def _parsed(pairs: Mapping[str, str], keys: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Keys of a command with values of their types; all problems at once."""
    parsed: dict[str, Any] = {}
    problems: list[str] = []
    for name, text in pairs.items():
        hint = get_args(keys[name].annotation)[0]
        try:
            parsed[name] = tables.from_text(hint, text, name)
        except ValueError as error:
            problems.append(f"{name} = {text!r}: {error}")
    if problems:
        raise BadFile("--set", problems)
    return parsed


def as_given(options: PlanOptions, command: typer.Context) -> GivenJob:
    """What the command line gives of a job; without a layout or a plan its layout is open."""
    names = {name for name, value in command.params.items() if value not in (None, False, [])}
    names |= command.meta[_SET] & {*plan_keys(), "steps"}
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
    keys: dict[str, Any] = run_keys(one_of("--precision", precision, PRECISIONS))
    return replace(options, **keys)


def tokens_of(option: str, given: str | int) -> int:
    """A number of tokens."""
    try:
        number = parse_count(str(given), option.lstrip("-"))
    except ValueError:
        hint = "give a whole number of tokens, such as 256, 500k or 1M"
        raise FivefoldError(f"{option} {given}: {hint}") from None
    if number < 1:
        raise FivefoldError(f"{option} {given}: give 1 token at least")
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
    if name in command.meta.get(_SET, ()):
        return True
    source = command.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def option_name(command: typer.Context, name: str) -> str:
    """An option as a user writes it: a flag, or a key of `--set`."""
    if name == "target":
        return "MODEL"
    flags = {param.name: param for param in command.command.params}
    return long_name(flags[name].opts, dashes=True) if name in flags else f"--set {name}"


def only_with(command: typer.Context, option: str, allowed: Collection[str]) -> None:
    """Refuse what has no effect beside an option."""
    names: set[str] = {name for name in command.params if name != "set" and typed(command, name)}
    if "set" not in allowed:
        names |= command.meta.get(_SET, set())
    if extras := sorted(names - {*allowed, "as_json"}):
        extra, beside = option_name(command, extras[0]), option_name(command, option)
        raise FivefoldError(f"{extra} has no effect with {beside}: leave one of them out")


def _options(
    target: str, shared: dict[str, Any], pairs: Mapping[str, str], model: str | None
) -> PlanOptions:
    """The command line as `PlanOptions`."""
    if shared["zero"] is not None:
        shared["zero"] = parse_zero(shared["zero"])
    if shared["gpus"] is not None:
        above("--gpus", shared["gpus"], 0)
    settings = parse_settings(pairs)
    if twice := [key for key in settings.plan if shared.get(key) not in (None, False)]:
        raise BadFile("--set", [f"{key} is given twice: leave one out" for key in twice])
    shared |= {"set": settings.model or None, "train": settings.train or None}
    return options_from(target_or_options(target, shared["gpus"], model), shared | settings.plan)


# A comma before a bare value is part of a list, as in stage_layers=7,8,8,7.
_LIST_COMMA = re.compile(r"""("[^"]*"|'[^']*')|,(?=[^\s,="']+(?:[\s,]|$))""")
_COMMA = "\x1f"


def _pairs(texts: list[str]) -> dict[str, str]:
    """Settings between spaces or commas, unless quotes are around these."""
    pairs: dict[str, str] = {}
    text = _LIST_COMMA.sub(lambda match: match[1] or _COMMA, " ".join(texts))
    split = shlex.shlex(text, posix=True)
    split.whitespace, split.whitespace_split = ", \t\n", True
    split.commenters = split.escape = ""
    try:
        parts = [part.replace(_COMMA, ",") for part in split]
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
