"""`fivefold generate`: text from a run or from a Hugging Face model, on this machine.

With a layout, every rank is a forked process with an engine and a writer of its own. All add the
same requests and decide alike; rank 0 reports what was written. One rank runs in this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.shape import Shape
from fivefold.generate.prompts import Prompt, finished_ids, read_prompts
from fivefold.generate.requests import Request, Sampling
from fivefold.generate.text_model import DTYPES, ModelOptions, TextModel, find_model, set_up
from fivefold.verbs import above, checkpoint_step, model_options, open_weights, write_texts

if TYPE_CHECKING:
    from fivefold.generate.writer import WrittenText

InvariantOption = Annotated[
    bool, typer.Option("--batch-invariant", help="Results do not depend on the batch, to the bit.")
]


@dataclass(frozen=True)
class TextOptions:
    """How completions are made and where they go."""

    max_tokens: int
    sampling: Sampling
    stops: list[str]
    chat: bool
    step: int | Literal["best"] | None
    record_routing: bool


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
        Path | None, typer.Option("--output", "-o", help="JSONL to write, or to continue.")
    ] = None,
    record_routing: Annotated[
        bool, typer.Option("--record-routing", help="Record the experts of all tokens.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Complete a prompt, or those of a file."""
    if (prompt is None) == (file is None):
        raise FivefoldError("give one of --prompt TEXT and --file PROMPTS.jsonl")
    sampling = Sampling(temperature, top_k, top_p, seed)
    if problems := list(sampling.problems()):
        raise BadFile("the options", problems)
    options = TextOptions(
        above("max-tokens", max_tokens, 0),
        sampling,
        stop or [],
        chat,
        checkpoint_step(step),
        record_routing,
    )
    runs = model_options(
        dtype, device, cache_gb, layout=layout, tokenizer=tokenizer, batch_invariant=batch_invariant
    )
    prompts = read_prompts(file) if file is not None else [Prompt("0", prompt or "")]
    _generate(find_model(source), prompts, options, runs, output, as_json)


def _check_recording(shape: Shape, options: TextOptions, to_lines: bool) -> None:
    """Refuse to record choices that there are not, or that would go nowhere."""
    if options.record_routing and shape.moe is None:
        raise FivefoldError(f"--record-routing: {shape.name} has no experts; leave it out")
    if options.record_routing and not to_lines:
        raise FivefoldError("--record-routing writes into JSON lines: give --json, or -o OUT.jsonl")


def _generate(
    model: TextModel,
    prompts: list[Prompt],
    options: TextOptions,
    runs: ModelOptions,
    output: Path | None,
    as_json: bool,
) -> None:
    # Imported here, so that a bad command line is refused before torch is loaded.
    from fivefold.generate.chat import ChatTemplate
    from fivefold.generate.text import stops_of
    from fivefold.generate.writer import TextPiece, TextRequest

    _check_recording(model.shape, options, as_json or output is not None)
    setup = set_up(model, runs, partial(open_weights, model, options.step))
    codec = setup.codec
    stops, ends = stops_of(codec, options.stops)
    render = ChatTemplate(model.folder).render if options.chat else None
    texts = {each.id: each.rendered(render) for each in prompts}
    done = set[str]() if output is None else finished_ids(output, texts)
    requests = [
        Request(
            id,
            codec.encode(text, special=not options.chat),
            options.max_tokens,
            options.sampling,
            ends | setup.ends,
        )
        for id, text in texts.items()
        if id not in done
    ]
    for request in requests:
        request.check(model.shape.vocab, model.shape.max_seq)
    if not requests:
        typer.echo(f"all {len(done):,} completions are in {output} already", err=True)
        return
    asked = [TextRequest(each, texts[each.id], stops) for each in requests]
    with _sink(output, as_json, len(prompts) == 1) as (on_text, on_written):

        def on_piece(piece: TextPiece) -> None:
            on_text(piece.text)
            if piece.written is not None:
                on_written(piece.written)

        write_texts(setup.task(asked, options.record_routing), "generate", on_piece)


@contextmanager
def _sink(
    output: Path | None, as_json: bool, single: bool
) -> Iterator[tuple[Callable[[str], None], Callable[[WrittenText], None]]]:
    """Where text and completions go: one prompt's text as it comes, else whole completions."""
    streams = single and not as_json and output is None

    def on_text(text: str) -> None:
        if streams:
            sys.stdout.write(text)
            sys.stdout.flush()

    def on_written(written: WrittenText) -> None:
        line = json.dumps(written.table(), ensure_ascii=False)
        if stream is not None:
            stream.write(line + "\n")
            stream.flush()
        if streams:
            typer.echo()
        elif as_json:
            typer.echo(line)
        elif output is None:
            typer.echo(f"[{written.id}] {written.prompt}{written.text}")

    stream = None if output is None else _opened(output)
    try:
        yield on_text, on_written
    finally:
        if stream is not None:
            stream.close()


def _opened(output: Path) -> Any:
    try:
        return output.open("a", encoding="utf-8")
    except OSError as error:
        raise BadFile(str(output), [f"{error.strerror}; give another file with -o"]) from error
