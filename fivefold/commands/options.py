"""Options that commands share, keys of --set, and what every command prints."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, get_args

import typer

from fivefold.commands.job import (
    GivenJob,
    above,
    is_foreign,
    one_of,
    positive,
    target_or_options,
)
from fivefold.completion import starting_with
from fivefold.core import (
    JSON_SCHEMA,
    PRECISIONS,
    BadFile,
    FivefoldError,
    RankLost,
    UnknownName,
    parse_count,
    run_keys,
    tables,
)
from fivefold.core import hardware as machines
from fivefold.core.layout import CONTEXT_KINDS, Layout, parse_zero
from fivefold.core.model import KV_FORMATS, Tuning
from fivefold.core.model import presets as models
from fivefold.core.plan import (
    PlanOptions,
    options_from,
    parse_settings,
    plan_keys,
    require_key,
    says_layout,
)
from fivefold.core.schedule import catalog
from fivefold.terminal import long_name

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from fivefold.commands.job import OnProgress, TaskProgress
    from fivefold.core.model import Shape
    from fivefold.generate import ModelOptions, NamedAdapter, ReadWeight, Tell, TextModel

TARGET = Annotated[
    str,
    typer.Argument(
        help="Model preset, Hugging Face config.json, plan.toml, or another framework's file.",
        metavar="MODEL",
        autocompletion=starting_with(models.presets),
    ),
]


class SetKey(NamedTuple):
    """A parameter of a command that is a key of `--set`, not a flag.

    A flag says what nearly every user of a command gives; all else is a key, so that the help of
    every command fits on a screen.
    """

    help: str


_VALUES = {  # that Tab completes
    "machine": machines.presets,
    "schedule": catalog.names,
    "context": lambda: CONTEXT_KINDS,
    "zero": lambda: ("0", "1", "2", "3"),
    "recompute": lambda: ("none", "selective", "full", "full-but-attention"),
    "precision": lambda: PRECISIONS,
}


def _option(kind: Any, help: str, *names: str, values: str | None = None) -> Any:
    complete = None if values is None else starting_with(_VALUES[values])
    return Annotated[
        kind | None,
        typer.Option(*names, help=help, show_default=False, autocompletion=complete),
    ]


SHARED: dict[str, Any] = {
    "layout": _option(
        str, 'Degrees, as in "dp=2x2 tp=2 pp=2 cp=2 ep=2 etp=1"; dp=RxS is replicate x shard.'
    ),
    "machine": _option(str, "Machine preset (h100, gb200, …) or TOML file.", values="machine"),
    "gpus": _option(int, "Number of GPUs; with a layout, the product of its degrees."),
    "zero": _option(
        str, "ZeRO stage 0 to 3, or FSDP's name for it (default 3; 1 with pp > 1).", values="zero"
    ),
    "schedule": _option(
        str, "Pipeline schedule by name, auto, or a file (default 1f1b).", values="schedule"
    ),
    "microbatches": _option(int, "Microbatches per step (default: the smallest legal ≥ 2·pp)."),
    "microbatch_size": _option(int, "Sequences in a microbatch (default 1)."),
    "seq": _option(int, "Tokens in a sequence (default: 8192 or the model's maximum)."),
    "batch": _option(int, "Global batch in sequences (default: dp × microbatches × size)."),
    "context": _option(str, f"Context kind: {', '.join(CONTEXT_KINDS)}.", values="context"),
    "recompute": _option(
        str,
        "Recompute: none, selective, full[:K], full-but-attention, modules as in norm+mlp; some "
        "stages: full@0-1.",
        values="recompute",
    ),
    "set": _option(
        list[str],
        'Any key of plan, training, model or this command: "layers=4 lr=3e-4 packed=true".',
        "--set",
    ),
}
# Keys of a plan that are flags of `verify` too: each changes what is compared.
PACKED = _option(bool, "Pack documents, with document masks.", "--packed")
FP8 = _option(str, "What shares a scale in fp8: tensorwise (default), blockwise or mxfp8.")

BackendOption = Annotated[
    str | None,
    typer.Option(
        help="Backend of collectives between GPUs: nccl or gloo (default: nccl if every rank has "
        "its own GPU or NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share one, else gloo).",
        show_default=False,
    ),
]
RunPrecisionOption = Annotated[
    str | None,
    typer.Option(
        help=f"Precision of linears: {', '.join(PRECISIONS)} (default: the plan's).",
        show_default=False,
        autocompletion=starting_with(_VALUES["precision"]),
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        help=f"Estimate in {', '.join(PRECISIONS)}.",
        show_default=False,
        autocompletion=starting_with(_VALUES["precision"]),
    ),
]
# Of commands that run a model.
SourceArgument = Annotated[
    Path, typer.Argument(metavar="RUN|DIR", help="A run folder, or a Hugging Face folder.")
]
ModelLayoutOption = Annotated[
    str, typer.Option(help='Degrees of ranks, as in "tp=2 pp=2"; dp are replicas.')
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
TokenizerOption = Annotated[
    str | None, typer.Option(help="tokenizer.json, or bytes (default: the folder's).")
]
CacheOption = Annotated[float, typer.Option(help="Maximum GB of the KV cache on a rank.")]
InvariantOption = Annotated[
    bool, typer.Option("--batch-invariant", help="Results do not depend on the batch, to the bit.")
]
ServedPrecisionOption = Annotated[
    str | None,
    typer.Option(help="fp8: weights of linears in layers take a byte (default: bf16, as --dtype)."),
]
StepOption = Annotated[str | None, typer.Option(help="Step of the run's checkpoint, or best.")]
DraftsKey = Annotated[
    str | None,
    SetKey(
        "Propose tokens, verified together: ngram:4 (earlier text), mtp:1 (layers of the model)."
    ),
]
KvKey = Annotated[
    str | None,
    SetKey("fp8: keys and values take a byte a number (default: bf16, which is as --dtype)."),
]
HeadroomKey = Annotated[float, SetKey("Share of the memory to leave free.")]
ImbalanceKey = Annotated[
    float | None, SetKey("Load of the fullest expert over the mean; 1 is balanced.")
]


def with_plan_options(
    verb: Callable[..., None],
    default_target: str | None = None,
    look_up: Callable[[str], str] = str,
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., None]:
    """The verb as a command with the target, the shared options and its own options.

    Parameters that are annotated as a `SetKey` are given with `--set`. Without a `default_target`
    the target is required. `look_up` may replace the target. `flags`: keys of a plan that are
    options of this command.
    """
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
    keys = {param.name: param for param in own if _key_of(param) is not None}
    shared = {**SHARED, **flags}

    def run(command: typer.Context, **params: Any) -> None:
        plan_params = {name: params.pop(name) for name in shared}
        pairs = _pairs(plan_params.pop("set") or [], keys)
        own_keys = _parsed({key: pairs.pop(key) for key in [*pairs] if key in keys}, keys)
        command.params.update({key: param.default for key, param in keys.items()} | own_keys)
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
    # Where the help and the answer to a former flag look for them.
    vars(run)["set_keys"] = {name: _key_of(param) for name, param in keys.items()}
    return run


def with_set_keys(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as a command whose parameters that are annotated as a `SetKey` are given with
    `--set`. It has no plan, so there are no other keys."""
    own = list(inspect.signature(verb, eval_str=True).parameters.values())
    keys = {param.name: param for param in own if _key_of(param) is not None}

    def run(**params: Any) -> None:
        pairs = _pairs(params.pop("set") or [], keys)
        if unknown := [key for key in pairs if key not in keys]:
            raise UnknownName("key", unknown[0], keys)
        verb(**params, **_parsed(pairs, keys))

    option = Annotated[
        list[str] | None, typer.Option("--set", help="Keys of this command, as key=value.")
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [param.replace(kind=keyword) for param in own if param.name not in keys]
    parameters.append(inspect.Parameter("set", keyword, default=None, annotation=option))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {param.name: param.annotation for param in parameters}
    run.__doc__ = verb.__doc__
    vars(run)["set_keys"] = {name: _key_of(param) for name, param in keys.items()}
    return run


_SET = "fivefold.set"  # where the context of a command has the names that `--set` gives


def _key_of(param: inspect.Parameter) -> SetKey | None:
    """The key that a parameter is declared as, or None if it is a flag."""
    marks = getattr(param.annotation, "__metadata__", ())
    return marks[0] if marks and isinstance(marks[0], SetKey) else None


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


class Answer(Protocol):
    """What a function of the Python API returns: its JSON, and its text as `str()`."""

    def to_json(self) -> Mapping[str, Any]: ...


def print_answer(answer: Answer, as_json: bool) -> None:
    """Print an answer as a command does: its text, or with --json its JSON."""
    typer.echo(json_text(answer.to_json()) if as_json else str(answer))


def in_precision(options: PlanOptions, precision: str | None) -> PlanOptions:
    """The job in the precision that an option names, or as it is."""
    if precision is None:
        return options
    keys: dict[str, Any] = run_keys(one_of("--precision", precision, PRECISIONS))
    return replace(options, **keys)


def tokens_of(option: str, count: str | int) -> int:
    """A number of tokens."""
    try:
        number = parse_count(str(count), option.lstrip("-"))
    except ValueError:
        hint = "give a whole number of tokens, such as 256, 500k or 1M"
        raise FivefoldError(f"{option} {count}: {hint}") from None
    if number < 1:
        raise FivefoldError(f"{option} {count}: give 1 token at least")
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


def _pairs(texts: list[str], own: Collection[str] = ()) -> dict[str, str]:
    """Settings between spaces or commas, unless quotes are around these. `own`: keys that the
    command has beside those of plan, training and model."""
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
            if equals and key not in own:
                require_key(key)  # its name may be the mistake
            raise BadFile("--set", [f"{word!r} is no setting: write key=value, such as layers=4"])
        pairs[key] = value
    return pairs


class ProgressBar(NamedTuple):
    """What a long task calls: `advance` adds to the progress, `update` sets it, and its total."""

    advance: Callable[[float], None]
    update: Callable[..., None]


@contextmanager
def progress_bar(
    title: str, total: float = 1.0, *columns: ProgressColumn, shown: bool = True
) -> Generator[ProgressBar]:
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

        def update(done: float, total: float | None = None) -> None:
            progress.update(task, completed=done, total=total)

        yield ProgressBar(partial(progress.advance, task), update)


@contextmanager
def shown_progress(
    title: str, *columns: ProgressColumn, shown: bool = True
) -> Generator[OnProgress]:
    """A progress bar from the first report on: until then ranks may be forked, without the thread
    that draws it."""
    with ExitStack() as stack:
        bars: list[ProgressBar] = []

        def on_progress(report: TaskProgress) -> None:
            if not bars:
                bar = progress_bar(title, report.total, *columns, shown=shown)
                bars.append(stack.enter_context(bar))
            bars[0].update(report.done, report.total)

        yield on_progress


def warn(why: str) -> None:
    """Say what is wrong, though it goes on."""
    typer.echo(f"fivefold: {why}", err=True)


@contextmanager
def exit_on_lost_rank(as_json: bool = False) -> Generator[None]:
    """Say which rank was lost, with `as_json` as JSON too, and exit with code 1."""
    try:
        yield
    except RankLost as lost:
        if as_json:
            typer.echo(json_text({"passed": False, "error": lost.reason}))
        warn(lost.reason)
        raise typer.Exit(1) from None


def model_options(
    dtype: str | None,
    device: str,
    cache_gb: float,
    *,
    layout: str | Layout,
    tokenizer: str | Path | None,
    batch_invariant: bool = False,
    precision: str | None = None,
    drafts: str | None = None,
    kv: str | None = None,
) -> ModelOptions:
    """How a model is to be run."""
    from fivefold.generate import DTYPES, PRECISIONS, DraftOptions, ModelOptions

    return ModelOptions(
        str(layout),
        dtype and one_of("--dtype", dtype, DTYPES),
        one_of("--device", device, ("auto", "cpu", "cuda")),
        None if tokenizer is None else str(tokenizer),
        positive("--cache-gb", cache_gb),
        batch_invariant,
        precision and one_of("--precision", precision, PRECISIONS),
        None if drafts is None else DraftOptions.parse(drafts),
        kv and one_of("kv", kv, KV_FORMATS),
    )


def model_path(source: Any) -> Path:
    """The folder of a run that was trained, or a path."""
    return Path(getattr(source, "folder", source))


def open_weights(model: TextModel, step: int | Literal["best"] | None, tell: Tell) -> ReadWeight:
    """What reads a weight of the folder; tells why a newer checkpoint is not read."""
    from fivefold.generate import AdaptedWeights
    from fivefold.huggingface import HfFolder, merged
    from fivefold.train.checkpoint import open_run

    if not model.is_run:
        base: ReadWeight = HfFolder(model.folder, model.shape).weight
    else:
        reader = open_run(model.source, model.shape, step, tell)
        full = merged(model.shape, lambda name: reader.read(f"model/{name}"))
        base = lambda weight, dtype: full(weight.name).to(dtype)  # noqa: E731
    return AdaptedWeights(base, model.adapters, tell) if model.adapters else base


def named_adapters(listed: Sequence[str] | Mapping[str, Any], base: Shape) -> list[NamedAdapter]:
    """Adapters as NAME=DIR, of runs or of PEFT."""
    if not isinstance(listed, Mapping):
        pairs = [text.partition("=") for text in listed]
        if bad := [text for text, pair in zip(listed, pairs, strict=True) if not all(pair)]:
            raise FivefoldError(f"adapters {bad[0]}: give a name and a folder, as NAME=DIR")
        return [_adapter(name, Path(folder), base) for name, _, folder in pairs]
    return [_adapter(name, model_path(source), base) for name, source in listed.items()]


def _adapter(name: str, source: Path, base: Shape) -> NamedAdapter:
    """The adapter of a run, or of a folder of PEFT."""
    from fivefold.generate import NamedAdapter, find_model

    if (source / "plan.toml").exists():
        shape = find_model(source).shape
        shape = shape if shape.tuning is not None else replace(shape, tuning=Tuning())
        return NamedAdapter(name, source, shape, partial(_of_run, source, shape), has_base=True)
    if not (source / "adapter_config.json").exists():
        rule = "is neither a run (plan.toml) nor an adapter of PEFT (adapter_config.json)"
        raise BadFile(str(source), [f"{rule}: give one of these folders"])
    from fivefold.huggingface import AdapterFolder

    shape = replace(base, tuning=None)
    shape = replace(shape, tuning=AdapterFolder(source, shape).tuning)
    return NamedAdapter(name, source, shape, partial(_of_peft, source, shape))


def _of_run(source: Path, shape: Shape, tell: Tell) -> ReadWeight:
    from fivefold.train.checkpoint import open_run

    reader = open_run(source, shape, None, tell)
    return lambda weight, dtype: reader.read(f"model/{weight.name}").to(dtype)


def _of_peft(source: Path, shape: Shape, tell: Tell) -> ReadWeight:
    from fivefold.huggingface import AdapterFolder

    return AdapterFolder(source, replace(shape, tuning=None)).weight
