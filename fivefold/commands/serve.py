"""`fivefold serve`: a run or a model with the API of OpenAI."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.commands.job import above, checkpoint_step, positive
from fivefold.commands.options import model_options, open_weights
from fivefold.core import BadFile, FivefoldError
from fivefold.core.plan import problems as kv_problems
from fivefold.generate import ModelOptions, ModelSetup, TextModel, find_model, set_up
from fivefold.render import LinePrinter

_LAST_LINES_S = 2.0  # for a reader to take what is left of the log
Source = Annotated[
    Path, typer.Argument(metavar="RUN|DIR", help="A run folder, or a Hugging Face folder.")
]
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
QueueOption = Annotated[
    int, typer.Option(help="Maximum sequences that wait; more are answered with 429.")
]
RunningOption = Annotated[int, typer.Option(help="Maximum sequences in a data rank of a replica.")]
BatchOption = Annotated[
    int | None,
    typer.Option(help="Maximum tokens of a forward (default: 8192 on GPUs, 512 on CPUs)."),
]
CacheOption = Annotated[
    float | None,
    typer.Option(help="Maximum GB of the KV cache on a rank (default: 1, or 80% of a free GPU)."),
]
DrainOption = Annotated[float, typer.Option(help="Seconds for open requests after SIGTERM.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="float64, float32 or bfloat16 (default: as generate).")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
TokenizerOption = Annotated[
    str | None, typer.Option(help="tokenizer.json, or bytes (default: the folder's).")
]
InvariantOption = Annotated[
    bool, typer.Option("--batch-invariant", help="Results do not depend on the batch, to the bit.")
]
StepOption = Annotated[str | None, typer.Option(help="Step of the run's checkpoint, or best.")]


def run(
    source: Source,
    layout: LayoutOption = "dp=1",
    replicas: ReplicasOption = 1,
    prefill: PrefillOption = None,
    prefill_replicas: PrefillReplicasOption = 1,
    restarts: RestartsOption = 3,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key: KeyOption = None,
    api_key_file: KeyFileOption = None,
    name: NameOption = None,
    max_queue: QueueOption = 1024,
    max_running: RunningOption = 256,
    max_batch_tokens: BatchOption = None,
    cache_gb: CacheOption = None,
    drain_seconds: DrainOption = 60.0,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    batch_invariant: InvariantOption = False,
    step: StepOption = None,
) -> None:
    """Serve a model with the API of OpenAI: completions, chats, streams."""
    options: dict[str, Any] = {"layout": layout, "replicas": replicas, "host": host, "port": port}
    options |= {"prefill": prefill, "prefill_replicas": prefill_replicas, "restarts": restarts}
    options |= {"api_keys": api_key or (), "api_key_file": api_key_file, "name": name}
    options |= {"max_queue": max_queue, "max_running": max_running, "cache_gb": cache_gb}
    options |= {"max_batch_tokens": max_batch_tokens, "drain_seconds": drain_seconds}
    options |= {"dtype": dtype, "device": device, "tokenizer": tokenizer, "step": step}
    options["batch_invariant"] = batch_invariant

    printer = LinePrinter(_echo)  # its thread starts with the first line: engines are forked then

    def ready(address: str) -> None:
        printer.print_line(f"fivefold serve: {address} (stop it with Ctrl-C)")

    def warning(why: str) -> None:
        printer.print_line(f"fivefold: {why}", err=True)

    try:
        code = serve(source, **options, on_ready=ready, log=printer.print_line, on_warning=warning)
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
    source: str | Path,
    *,
    layout: str = "dp=1",
    replicas: int = 1,
    prefill: str | None = None,
    prefill_replicas: int = 1,
    restarts: int = 3,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: Sequence[str] = (),
    api_key_file: str | Path | None = None,
    name: str | None = None,
    max_queue: int = 1024,
    max_running: int = 256,
    max_batch_tokens: int | None = None,
    cache_gb: float | None = None,
    drain_seconds: float = 60.0,
    dtype: str | None = None,
    device: str = "auto",
    tokenizer: str | None = None,
    batch_invariant: bool = False,
    step: str | int | None = None,
    on_ready: Callable[[str], None] = lambda address: None,
    log: Callable[[str], None] = lambda line: None,
    on_warning: Callable[[str], None] = lambda why: None,
) -> int:
    """Serve a run or a Hugging Face folder until a signal ends it; returns the exit code. `prefill`
    is the layout of engines for prompts alone, and `layout` then that of those that go on."""
    options: dict[str, Any] = {
        "host": host,
        "port": _port(port),
        "keys": (*map(_checked, api_keys), *_keys(api_key_file)),
        "replicas": int(above("--replicas", replicas, 0)),
        "prefill_replicas": _of_prefill(prefill_replicas, prefill),
        "restarts": int(above("--restarts", restarts, -1)),
        "max_queue": int(above("--max-queue", max_queue, 0)),
        "max_running": int(above("--max-running", max_running, 0)),
        "max_batch_tokens": _batch_tokens(max_batch_tokens),
        "cache_gb": None if cache_gb is None else positive("--cache-gb", cache_gb),
        "drain_s": positive("--drain-seconds", drain_seconds),
    }
    settings: dict[str, Any] = {"layout": layout, "tokenizer": tokenizer}
    settings["batch_invariant"] = batch_invariant
    runs = model_options(dtype, device, cache_gb or 1.0, **settings)
    asked_step = checkpoint_step(step)
    model = find_model(Path(source), asked_step)
    running = _running()
    served = running.ServeOptions(name or Path(source).resolve().name, **options)
    opened = partial(open_weights, model, asked_step)
    setup = set_up(model, runs, opened)
    first = None if prefill is None else _prompts_of(model, replace(runs, layout=prefill), opened)
    if served.replicas > 1 or first is not None:
        setup = _beside_others(setup)
    server = running.ModelServer(setup, served, on_ready, log, on_warning, first)
    try:
        return server.run()
    except running.ServeLost as lost:
        on_warning(str(lost))
        return 1


def _running() -> Any:
    try:
        from fivefold.serve import server as running
    except ModuleNotFoundError as error:
        raise FivefoldError(f"serving needs the h11 library ({error}): {INSTALL}") from error
    return running


def _batch_tokens(given: int | None) -> int | None:
    return None if given is None else int(above("--max-batch-tokens", given, 0))


def _port(port: int) -> int:
    if not 0 <= port <= _LAST_PORT:
        raise FivefoldError(f"--port {port}: give a number from 0 to {_LAST_PORT}")
    return port


def _of_prefill(replicas: int, prefill: str | None) -> int:
    """The engines for prompts; refuses a number without their layout."""
    if prefill is None and replicas != 1:
        raise FivefoldError(
            f"--prefill-replicas {replicas} needs --prefill LAYOUT; for engines that do all of a "
            "request use --replicas"
        )
    return int(above("--prefill-replicas", replicas, 0))


def _prompts_of(model: TextModel, runs: ModelOptions, opened: Any) -> ModelSetup:
    """The engines that compute prompts alone; refuses a model whose cache cannot travel."""
    if problems := list(kv_problems(model.shape)):
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
