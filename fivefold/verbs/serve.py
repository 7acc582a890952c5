"""`fivefold serve`: a run or a Hugging Face model with the API of OpenAI, on this machine."""

from __future__ import annotations

import contextlib
import select
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.api.serving import serve
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
