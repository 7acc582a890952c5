"""`fivefold generate`: text from a run or from a Hugging Face model, on this machine.

With a layout, every rank is a forked process with an engine and a writer of its own. All add the
same requests and decide alike; rank 0 reports what was written. One rank runs in this process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.api.generating import generate
from fivefold.core import FivefoldError, RankLost
from fivefold.generate import DTYPES, Prompt, read_prompts
from fivefold.verbs import shown_progress, warn

if TYPE_CHECKING:
    from fivefold.generate import TextPiece, WrittenText

InvariantOption = Annotated[
    bool, typer.Option("--batch-invariant", help="Results do not depend on the batch, to the bit.")
]


def run(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|DIR", help="A run folder, or a Hugging Face folder.")
    ],
    prompt: Annotated[str | None, typer.Option(help="The text to complete.")] = None,
    file: Annotated[
        Path | None, typer.Option(help='JSONL with {"prompt": …} or {"messages": […]}, "id".')
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of a completion.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy, 1 unchanged.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the K most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample from the top probability P.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text or special token that ends it; repeat it.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help='Degrees of ranks, as in "tp=2 pp=2"; dp are replicas.')
    ] = "dp=1",
    chat: Annotated[bool, typer.Option("--chat", help="Use the folder's chat template.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)} (default: float32, bfloat16 on GPUs).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json, or bytes (default: the folder's).")
    ] = None,
    cache_gb: Annotated[float, typer.Option(help="Maximum GB of the KV cache on a rank.")] = 1.0,
    batch_invariant: InvariantOption = False,
    step: Annotated[str | None, typer.Option(help="Step of the run's checkpoint, or best.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", help="JSONL to write, or to continue.")
    ] = None,
    record_routing: Annotated[
        bool, typer.Option("--record-routing", help="Record the experts of all tokens.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Complete a prompt, or those of a file."""
    if (prompt is None) == (file is None):
        raise FivefoldError("give one of --prompt TEXT and --file PROMPTS.jsonl")
    if record_routing and not as_json and output is None:
        raise FivefoldError("--record-routing writes into JSON lines: give --json, or -o OUT.jsonl")
    prompts = read_prompts(file) if file is not None else [Prompt("0", prompt or "")]
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k}
    options |= {"top_p": top_p, "seed": seed, "stop": stop or (), "layout": layout, "chat": chat}
    options |= {"dtype": dtype, "device": device, "tokenizer": tokenizer, "cache_gb": cache_gb}
    options |= {"batch_invariant": batch_invariant, "step": step, "output": output}
    _generate(source, prompts, {**options, "record_routing": record_routing}, as_json)


def _generate(source: Path, prompts: list[Prompt], options: dict[str, Any], as_json: bool) -> None:
    output = options["output"]
    streams = len(prompts) == 1 and not as_json and output is None
    echoed = "" if options["chat"] else prompts[0].text
    printer = _Printer(streams, as_json, quiet=output is not None, prompt=echoed)
    try:
        with shown_progress("generate", shown=len(prompts) > 1) as on_progress:
            written = generate(
                source,
                prompts,
                **options,
                on_piece=printer.on_piece,
                on_progress=on_progress,
                on_warning=warn,
            )
    except RankLost as lost:
        warn(lost.reason)
        raise typer.Exit(1) from lost
    if not written:
        typer.echo(f"all {len(prompts):,} completions are in {output} already", err=True)


class _Printer:
    """Prints one prompt's text as it comes, else whole completions; `quiet`: only JSON."""

    def __init__(self, streams: bool, as_json: bool, quiet: bool, prompt: str) -> None:
        self.streams, self.as_json, self.quiet = streams, as_json, quiet
        self.prompt = prompt  # printed before what completes it

    def on_piece(self, piece: TextPiece) -> None:
        if self.streams:
            sys.stdout.write(self.prompt + piece.text)
            sys.stdout.flush()
            self.prompt = ""
        if piece.written is not None:
            self.on_written(piece.written)

    def on_written(self, written: WrittenText) -> None:
        if self.streams:
            typer.echo()
        elif self.as_json:
            typer.echo(json.dumps(written.table(), ensure_ascii=False))
        elif not self.quiet:
            typer.echo(f"[{written.id}] {written.prompt}{written.text}")
