"""`fivefold serve`: a run or a model with the API of OpenAI."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.commands.job import above, checkpoint_step, positive, warn_caller
from fivefold.commands.options import (
    DeviceOption,
    DraftsKey,
    InvariantOption,
    KvKey,
    ServedPrecisionOption,
    SetKey,
    SourceArgument,
    StepOption,
    TokenizerOption,
    model_options,
    model_path,
    named_adapters,
    open_weights,
    with_set_keys,
)
from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.plan import problems as kv_problems
from fivefold.generate import (
    ModelOptions,
    ModelSetup,
    TextModel,
    find_model,
    set_up,
    with_adapters,
)
from fivefold.render import LinePrinter

_LAST_LINES_S = 2.0  # for a reader to take what is left of the log
LayoutOption = Annotated[
    str, typer.Option(help='Degrees of the ranks of a replica, as in "tp=2 pp=2".')
]
ReplicasOption = Annotated[
    int, typer.Option(help="Engines that share the requests, each in the layout.")
]
PrefillOption = Annotated[
    str | None,
    typer.Option(
        help="Degrees of other ranks that compute prompts alone; those of --layout then go on with "
        "the answers."
    ),
]
PrefillReplicasOption = Annotated[int, typer.Option(help="Engines that compute prompts.")]
RestartsOption = Annotated[
    int, typer.Option(help="Maximum new starts in a row of an engine that loses a rank.")
]
DoorsKey = Annotated[
    int | None,
    SetKey("Processes that speak HTTP (default: one for 4 cores, at most the engines)."),
]
HostOption = Annotated[
    str, typer.Option(help="Address to listen on; beyond loopback only with a key.")
]
PortOption = Annotated[int, typer.Option(help="Port; 0 picks a free one.")]
KeyOption = Annotated[
    list[str] | None, typer.Option(help="Key that clients have to send; repeat it.")
]
KeyFileOption = Annotated[
    Path | None, typer.Option(help="File with a key on each line, which no process list shows.")
]
NameOption = Annotated[
    str | None, typer.Option(help="Name that clients ask for (default: the folder's).")
]
AdaptersKey = Annotated[
    str | None,
    SetKey(
        "NAME=DIR+NAME=DIR: adapters of this model, of runs or of PEFT, that clients ask for by "
        "their names."
    ),
]
QueueOption = Annotated[
    int, typer.Option(help="Maximum sequences that wait; more are answered with 429.")
]
RunningOption = Annotated[int, typer.Option(help="Maximum sequences in a data rank of a replica.")]
BatchOption = Annotated[
    int | None,
    typer.Option(help="Maximum tokens of a forward (default: 8192 on GPUs, 512 on CPUs)."),
]
ServedCacheOption = Annotated[
    float | None,
    typer.Option(help="Maximum GB of the KV cache on a rank (default: 1, or 80% of a free GPU)."),
]
DrainOption = Annotated[float, typer.Option(help="Seconds for open requests after SIGTERM.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="float64, float32 or bfloat16 (default: as generate).")
]


@with_set_keys
def run(
    source: SourceArgument,
    layout: LayoutOption = "dp=1",
    replicas: ReplicasOption = 1,
    prefill: PrefillOption = None,
    prefill_replicas: PrefillReplicasOption = 1,
    restarts: RestartsOption = 3,
    doors: DoorsKey = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key: KeyOption = None,
    api_key_file: KeyFileOption = None,
    name: NameOption = None,
    adapters: AdaptersKey = None,
    max_queue: QueueOption = 1024,
    max_running: RunningOption = 256,
    max_batch_tokens: BatchOption = None,
    cache_gb: ServedCacheOption = None,
    drain_seconds: DrainOption = 60.0,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    batch_invariant: InvariantOption = False,
    precision: ServedPrecisionOption = None,
    step: StepOption = None,
    drafts: DraftsKey = None,
    kv: KvKey = None,
) -> None:
    """Serve a model with the API of OpenAI: completions, chats, streams."""
    printer = LinePrinter(_echo)  # its thread starts with the first line: engines are forked then

    def ready(address: str) -> None:
        printer.print_line(f"fivefold serve: {address} (stop it with Ctrl-C)")

    def warning(why: str) -> None:
        printer.print_line(f"fivefold: {why}", err=True)

    try:
        code = serve(
            source,
            layout=layout,
            replicas=replicas,
            prefill=prefill,
            prefill_replicas=prefill_replicas,
            restarts=restarts,
            doors=doors,
            host=host,
            port=port,
            api_key=api_key or (),
            api_key_file=api_key_file,
            name=name,
            adapters=adapters.split("+") if adapters else (),
            max_queue=max_queue,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            cache_gb=cache_gb,
            drain_seconds=drain_seconds,
            dtype=dtype,
            device=device,
            tokenizer=tokenizer,
            batch_invariant=batch_invariant,
            precision=precision,
            step=step,
            drafts=drafts,
            kv=kv,
            on_ready=ready,
            log=printer.print_line,
            on_warning=warning,
        )
    finally:
        printer.close(_LAST_LINES_S)
    raise typer.Exit(code)


def _echo(line: str, err: bool) -> None:
    """Print a line when its reader has room: a write that waits would keep the server from
    ending."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file
        select.select([], [sys.stderr if err else sys.stdout], [])
    typer.echo(line, err=err)


_LAST_PORT = 65_535
_LEAST_KEY = 8  # characters
INSTALL = "pip install 'fivefold[serve]'"


def serve(
    source: Any,
    *,
    layout: str | Layout = "dp=1",
    replicas: int = 1,
    prefill: str | None = None,
    prefill_replicas: int = 1,
    restarts: int = 3,
    doors: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | Sequence[str] = (),
    api_key_file: str | Path | None = None,
    name: str | None = None,
    adapters: Sequence[str] | Mapping[str, Any] = (),
    max_queue: int = 1024,
    max_running: int = 256,
    max_batch_tokens: int | None = None,
    cache_gb: float | None = None,
    drain_seconds: float = 60.0,
    dtype: str | None = None,
    device: str = "auto",
    tokenizer: str | Path | None = None,
    batch_invariant: bool = False,
    precision: str | None = None,
    step: str | int | None = None,
    drafts: str | None = None,
    kv: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    log: Callable[[str], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> int:
    """Serve a run or a Hugging Face folder until a signal ends it; returns the exit code.

    `adapters` are runs or folders of PEFT by the names that clients ask for: a dict, or texts as
    NAME=DIR. `prefill` is the layout of engines for prompts alone; `layout` is then that of engines
    that go on with the answers. `drafts` ("ngram:4", "mtp:1") proposes tokens that a step verifies
    together; `kv` may be "fp8". `on_ready` gets the address, `log` a line for every request.
    """
    if not 0 <= port <= _LAST_PORT:
        raise FivefoldError(f"--port {port}: give a number from 0 to {_LAST_PORT}")
    keys = [api_key] if isinstance(api_key, str) else api_key
    keys = (*map(_checked, keys), *_keys(api_key_file))
    above("--replicas", replicas, 0)
    _require_prefill_replicas(prefill_replicas, prefill)
    above("--restarts", restarts, -1)
    above("doors", 1 if doors is None else doors, 0)
    above("--max-queue", max_queue, 0)
    above("--max-running", max_running, 0)
    above("--max-batch-tokens", 1 if max_batch_tokens is None else max_batch_tokens, 0)
    if cache_gb is not None:
        positive("--cache-gb", cache_gb)
    positive("--drain-seconds", drain_seconds)
    runs = model_options(
        dtype,
        device,
        cache_gb or 1.0,
        layout=layout,
        tokenizer=tokenizer,
        batch_invariant=batch_invariant,
        precision=precision,
        drafts=drafts,
        kv=kv,
    )
    path, chosen = model_path(source), checkpoint_step(step)
    model, base_name = find_model(path, chosen), name or path.resolve().name
    if adapters:
        model = with_adapters(model, named_adapters(adapters, model.shape), base_name)
    try:
        from fivefold.serve import server
    except ModuleNotFoundError as error:
        raise FivefoldError(f"serving needs the h11 library ({error}): {INSTALL}") from error
    opened = partial(open_weights, model, chosen)
    setup = set_up(model, runs, opened)
    of_prompts = replace(runs, layout=prefill or "", drafts=None)  # which draw one token
    first = None if prefill is None else _prompts_of(model, of_prompts, opened, setup)
    options = server.ServeOptions(
        base_name,
        host=host,
        port=port,
        keys=keys,
        doors=doors or server.usual_doors(replicas * setup.plan.layout.dp),
        replicas=replicas,
        prefill_replicas=prefill_replicas,
        restarts=restarts,
        max_queue=max_queue,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        cache_gb=cache_gb,
        drain_s=drain_seconds,
    )
    if replicas > 1 or first is not None:
        setup = _beside_others(setup)
    warn = on_warning or warn_caller
    running = server.ModelServer(setup, options, on_ready or _ignore, log or _ignore, warn, first)
    try:
        return running.run()
    except server.ServeLost as lost:
        warn(str(lost))
        return 1


def _ignore(line: str) -> None:
    """A line that nobody listens for."""


def _require_prefill_replicas(replicas: int, prefill: str | None) -> None:
    """Refuse a number of engines for prompts that is none, or without their layout."""
    if prefill is None and replicas != 1:
        raise FivefoldError(
            f"--prefill-replicas {replicas} needs --prefill LAYOUT; for engines that do all of a "
            "request use --replicas"
        )
    above("--prefill-replicas", replicas, 0)


def _prompts_of(model: TextModel, runs: ModelOptions, opened: Any, setup: ModelSetup) -> ModelSetup:
    """The engines that compute prompts alone; refuses a model whose cache cannot travel."""
    problems = list(kv_problems(model.shape))
    if setup.plan.shape.mtp:
        problems.append(
            f"drafts = '{setup.options.drafts}': the caches that come have no keys of the layers "
            "that propose; give ngram:K, or leave one of both out"
        )
    if problems:
        raise BadFile(f"--prefill {runs.layout!r}", problems)
    return _beside_others(set_up(model, runs, opened))


def _beside_others(setup: ModelSetup) -> ModelSetup:
    """With the backend of ranks on the GPUs that each engine has."""
    from fivefold.launch import NcclLibrary, choose_backend, num_gpus

    world, library = setup.plan.layout.world, NcclLibrary.current()
    return replace(setup, backend=choose_backend(None, setup.device, world, num_gpus(), library))


def _checked(key: str) -> str:
    if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise FivefoldError(
            f"an API key has at least {_LEAST_KEY} letters, digits or signs and no space: give "
            "another one"
        )
    return key


def _keys(file: str | Path | None) -> list[str]:
    """The keys of a file, one on each line; lines with # are comments."""
    if file is None:
        return []
    try:
        lines = Path(file).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(str(file), [f"{error}; give a file with a key on each line"]) from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise BadFile(str(file), ["it has no key; write one on each line"])
    return list(map(_checked, keys))
