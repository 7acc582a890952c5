"""`fivefold generate`: text from a run or from a Hugging Face model, on this machine's CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.core import models, plan
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.precision import FORMATS
from fivefold.core.shape import Shape
from fivefold.generate.prompts import Prompt, finished_ids, read_prompts
from fivefold.generate.requests import Request, Sampling
from fivefold.verbs import above, one_of, positive, progress_bar

if TYPE_CHECKING:
    from fivefold.generate.text import Codec
    from fivefold.generate.weights import ReadWeight
    from fivefold.generate.writer import TextWriter, WrittenText

_TOKENIZER, _BYTES_END = "tokenizer.json", 256
_DTYPES = [name for name, each in FORMATS.items() if each.verified]


@dataclass(frozen=True)
class TextModel:
    """A model as it is found in a folder."""

    shape: Shape
    source: Path
    folder: Path  # that may have a tokenizer and its configs
    is_run: bool


@dataclass(frozen=True)
class TextOptions:
    """How completions are made and where they go."""

    max_tokens: int
    sampling: Sampling
    stops: list[str]
    chat: bool
    dtype: str
    tokenizer: str | None
    cache_gb: float
    step: int | None


def run(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|DIR", help="A run folder, or a Hugging Face folder.")
    ],
    prompt: Annotated[str | None, typer.Option(help="The text to go on with.")] = None,
    file: Annotated[
        Path | None, typer.Option(help='JSONL with {"prompt": …} or {"messages": […]}, "id".')
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a completion.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy; 1 the model's own odds.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest with this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text or special token that ends it; repeat it.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the folder's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(_DTYPES)}.")] = "float32",
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json, or bytes (default: the folder's).")
    ] = None,
    cache_gb: Annotated[float, typer.Option(help="Most GB of keys and values.")] = 1.0,
    step: Annotated[int | None, typer.Option(help="Step of the run's checkpoint.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSONL to write; it is gone on with.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON line a prompt.")] = False,
) -> None:
    """Go on with a prompt, or with those of a file."""
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
        one_of("dtype", dtype, _DTYPES),
        tokenizer,
        positive("cache-gb", cache_gb),
        step,
    )
    prompts = read_prompts(file) if file is not None else [Prompt("0", prompt or "")]
    model = _found(source)
    _generate(model, prompts, options, output, as_json)


def _found(source: Path) -> TextModel:
    """The model of a folder."""
    if (source / "plan.toml").exists():
        options = plan.read(source / "plan.toml")
        shape = models.with_overrides(models.load(options.model), options.set)
        path = Path(options.model)
        beside = path if path.is_dir() else path.parent
        folder = beside if (beside / _TOKENIZER).exists() else source
        return TextModel(shape, source, folder, True)
    if (source / "config.json").exists():
        return TextModel(models.load(str(source / "config.json")), source, source, False)
    rule = "is neither a run (plan.toml) nor a Hugging Face model (config.json)"
    raise BadFile(str(source), [f"{rule}: give one of these folders"])


def _generate(
    model: TextModel,
    prompts: list[Prompt],
    options: TextOptions,
    output: Path | None,
    as_json: bool,
) -> None:
    # Imported here, so that a bad command line is refused before torch is loaded.
    from fivefold.generate.chat import ChatTemplate
    from fivefold.generate.text import ByteCodec, end_tokens, stops_of

    codec = _codec(model, options.tokenizer)
    stops, ends = stops_of(codec, options.stops)
    is_bytes = isinstance(codec, ByteCodec)
    ends |= frozenset({_BYTES_END}) if is_bytes else end_tokens(model.folder)
    render = ChatTemplate(model.folder).render if options.chat else None
    texts = {each.id: each.rendered(render) for each in prompts}
    done = set[str]() if output is None else finished_ids(output, texts)
    requests = [
        Request(
            id,
            codec.encode(text, special=not options.chat),
            options.max_tokens,
            options.sampling,
            ends,
        )
        for id, text in texts.items()
        if id not in done
    ]
    for request in requests:
        request.check(model.shape.vocab, model.shape.max_seq)
    if not requests:
        typer.echo(f"all {len(done):,} completions are in {output} already", err=True)
        return
    writer = _writer(model, requests, options, codec)
    for request in requests:
        writer.add(request, texts[request.id], stops)
    with _sink(output, as_json, len(prompts) == 1) as (on_text, on_written):
        _write_all(writer, len(requests), on_text, on_written)


def _codec(model: TextModel, tokenizer: str | None) -> Codec:
    from fivefold.generate.text import NUM_BYTES, ByteCodec, read_tokenizer

    path = model.folder / _TOKENIZER if tokenizer is None else Path(tokenizer)
    if tokenizer != "bytes" and (tokenizer is not None or path.exists()):
        return read_tokenizer(path)
    if tokenizer is None and (not model.is_run or model.shape.vocab > 2 * NUM_BYTES):
        rule = f"has no {_TOKENIZER}, and a vocabulary of {model.shape.vocab:,}"
        raise BadFile(str(model.folder), [f"{rule}: give --tokenizer FILE, or --tokenizer bytes"])
    return ByteCodec()


def _writer(
    model: TextModel, requests: list[Request], options: TextOptions, codec: Codec
) -> TextWriter:
    import torch

    from fivefold.generate.blocks import blocks_of
    from fivefold.generate.engine import DecoderForward, Engine
    from fivefold.generate.weights import blocks_within, load_decoder
    from fivefold.generate.writer import TextWriter

    shape = model.shape
    decoder = load_decoder(shape, getattr(torch, options.dtype), _weights(model, options.step))
    lengths = (min(len(each.prompt) + each.max_tokens, shape.max_seq) for each in requests)
    blocks = min(blocks_within(decoder, options.cache_gb * 1e9), sum(map(blocks_of, lengths)))
    return TextWriter(Engine(shape, DecoderForward(decoder, blocks), blocks), codec)


def _weights(model: TextModel, step: int | None) -> ReadWeight:
    """What reads a weight of the folder."""
    from fivefold.huggingface.files import HfFolder
    from fivefold.train.checkpoint.of_run import open_run

    if not model.is_run:
        return HfFolder(model.folder, model.shape).weight
    reader = open_run(
        model.source, model.shape, step, lambda why: typer.echo(f"fivefold: {why}", err=True)
    )
    return lambda weight, dtype: reader.read(f"model/{weight.name}").to(dtype)


def _write_all(
    writer: TextWriter,
    count: int,
    on_text: Callable[[str], None],
    on_written: Callable[[WrittenText], None],
) -> None:
    with progress_bar("generate", count, shown=count > 1) as bar:
        while writer.busy:
            for piece in writer.step():
                on_text(piece.text)
                if piece.written is not None:
                    on_written(piece.written)
                    bar.advance(1)


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
