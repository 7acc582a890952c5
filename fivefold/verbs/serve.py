"""`fivefold serve`: a run or a Hugging Face model behind the OpenAI API, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fivefold.api.serving import serve
from fivefold.verbs import warn


def run(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|DIR", help="A run folder, or a Hugging Face folder.")
    ],
    layout: Annotated[
        str, typer.Option(help='Degrees of the ranks of a replica, as in "tp=2 pp=2".')
    ] = "dp=1",
    replicas: Annotated[int, typer.Option(help="Engines that share the requests, each in the layout.")] = 1,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback only with a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 picks a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients have to send; repeat it.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with a key on each line, which no process list shows.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name that clients ask for (default: the folder's).")
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Maximum sequences that wait; more are answered with 429.")
    ] = 1024,
    max_running: Annotated[
        int, typer.Option(help="Maximum sequences in a data rank of a replica.")
    ] = 256,
    max_batch_tokens: Annotated[int, typer.Option(help="Maximum tokens of a forward.")] = 512,
    cache_gb: Annotated[
        float | None,
        typer.Option(
            help="Maximum GB of the KV cache on a rank (default: 1, or 80% of a free GPU)."
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds for open requests after SIGTERM.")
    ] = 60.0,
    dtype: Annotated[
        str | None, typer.Option(help="float64, float32 or bfloat16 (default: as generate).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json, or bytes (default: the folder's).")
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Results do not depend on the batch, to the bit."),
    ] = False,
    step: Annotated[str | None, typer.Option(help="Step of the run's checkpoint, or best.")] = None,
) -> None:
    """Serve a model with the API of OpenAI: completions, chats, streams."""

    def ready(address: str) -> None:
        typer.echo(f"fivefold serve: {address} (stop it with Ctrl-C)")
        sys.stdout.flush()

    def log(line: str) -> None:
        typer.echo(line)
        sys.stdout.flush()

    code = serve(
        source,
        layout=layout,
        replicas=replicas,
        host=host,
        port=port,
        api_keys=api_key or (),
        api_key_file=api_key_file,
        name=name,
        max_queue=max_queue,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        cache_gb=cache_gb,
        drain_seconds=drain_seconds,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        batch_invariant=batch_invariant,
        step=step,
        on_ready=ready,
        log=log,
        on_warning=warn,
    )
    raise typer.Exit(code)
