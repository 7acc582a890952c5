"""`fivefold tokens`: tokenize files into a folder, check such a folder, or say what is in it."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fivefold.commands.options import ProgressBar, json_text, progress_bar, tokens_of
from fivefold.core import FivefoldError

if TYPE_CHECKING:
    from fivefold.data import Encode

_WORDS = {"empty": "empty", "short": "too short", "long": "too long", "duplicate": "duplicate"}


class Tokenizing(NamedTuple):
    """The options that decide which tokens are written."""

    tokenizer: str
    end: str | None
    column: str | None
    lengths: dict[str, int | None]
    dedup: bool
    chat: bool
    pairs: bool


InputsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="INPUT...",
        help="Text, JSON, JSONL, parquet or Arrow files (.gz, .zst), or folders of them; with "
        "--check or --info, token folders.",
    ),
]
OutputFolder = Annotated[Path | None, typer.Option("-o", help="Folder of tokens to write.")]
TokenizerOption = Annotated[
    str, typer.Option(help="A tokenizer.json, a model folder with one, or bytes.")
]
ColumnOption = Annotated[
    str | None,
    typer.Option("--column", "--field", help="Column or JSON field with the text, or messages."),
]
ChatOption = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Rows are conversations: messages, instruction and output, or prompt and completion; "
        "--tokenizer is a model folder with a chat template.",
    ),
]
PairsOption = Annotated[
    bool,
    typer.Option(
        "--pairs",
        help="Rows are preference pairs: chosen and rejected conversations, or answers to a "
        "prompt; --tokenizer as for --chat.",
    ),
]
EndOption = Annotated[
    str | None,
    typer.Option(help="Token after each document, or none (default: 256, or the tokenizer's)."),
]
WorkersOption = Annotated[
    int | None, typer.Option(help="Processes that encode (default: one for each core).")
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Verify the checksums of token folders.")
]


def run(
    inputs: InputsArgument,
    output: OutputFolder = None,
    tokenizer: TokenizerOption = "bytes",
    column: ColumnOption = None,
    chat: ChatOption = False,
    pairs: PairsOption = False,
    end: EndOption = None,
    min_chars: Annotated[int, typer.Option(help="Leave out shorter documents.")] = 0,
    max_chars: Annotated[int | None, typer.Option(help="Leave out longer documents.")] = None,
    min_tokens: Annotated[int, typer.Option(help="Leave out documents of fewer tokens.")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(help="Leave out documents of more tokens.")
    ] = None,
    dedup: Annotated[
        bool, typer.Option("--dedup", help="Leave out documents whose text was seen before.")
    ] = False,
    workers: WorkersOption = None,
    shard_tokens: Annotated[str, typer.Option(help="Tokens per shard: 500k, 100M, 1B.")] = "100M",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    check: CheckOption = False,
    info: Annotated[bool, typer.Option("--info", help="Print what is in token folders.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokenize text into a folder, check such a folder, or say what is in it."""
    if (output is not None) + check + info != 1:
        raise FivefoldError(
            "give either -o DIR, to write tokens there, or --check, to check some, or --info, to "
            "see some"
        )
    if output is None:
        tables = [_check(folder) if check else _info(folder) for folder in inputs]
        texts = [_line(table) + _sample_text(table) for table in tables]
        typer.echo(json.dumps(tables) if as_json else "\n".join(texts))
        return
    if workers is not None and workers < 1:
        raise FivefoldError(f"--workers {workers}: give at least 1")
    lengths = {"min_chars": min_chars, "max_chars": max_chars}
    lengths |= {"min_tokens": min_tokens, "max_tokens": max_tokens}
    settings = Tokenizing(tokenizer, end, column, lengths, dedup, chat, pairs)
    size = tokens_of("--shard-tokens", shard_tokens)
    table = _write(inputs, output, size, settings, workers, force)
    typer.echo(json_text(table) if as_json else _written_text(table))


def _write(
    inputs: list[Path],
    output: Path,
    shard_tokens: int,
    words: Tokenizing,
    workers: int | None,
    force: bool,
) -> dict[str, Any]:
    # Imported here, so that --help does not load numpy.
    from fivefold.data import TokenizeOptions, find_sources, tokenize, usual_workers

    encode = _encode(words)
    sources = find_sources(inputs)
    options = TokenizeOptions(shard_tokens, workers or usual_workers(), words.dedup, force)
    with _bar(sources.num_bytes) as bar:
        done = tokenize(sources, output, encode, options, bar.advance)
    return {
        **_describe(output),
        "empty": done.left_out.get("empty", 0),
        "left_out": done.left_out,
        "files": len(sources.files),
        "skipped": {why: len(files) for why, files in sources.skipped.items()},
        "skipped_files": sources.skipped,
        "resumed": done.resumed,
    }


def _encode(words: Tokenizing) -> Encode:
    from fivefold.data import (
        BlockEncoder,
        ChatEncoder,
        LengthFilter,
        PairEncoder,
        make_chat_encoder,
        make_encoder,
    )
    from fivefold.generate import ChatTemplate

    keep = LengthFilter(**words.lengths)  # type: ignore[arg-type]
    if words.pairs and words.column is not None:
        raise FivefoldError("--pairs reads chosen and rejected: leave --column out")
    if words.chat or words.pairs:
        kind = PairEncoder if words.pairs else ChatEncoder
        chat = make_chat_encoder(words.tokenizer, words.end)
        render = ChatTemplate(Path(words.tokenizer)).render_many
        return kind(chat, render, words.column, keep, words.dedup)
    encoder = make_encoder(words.tokenizer, words.end)
    return BlockEncoder(encoder, words.column or "text", keep, words.dedup)


def _check(folder: Path) -> dict[str, Any]:
    from fivefold.data import read_index, refuse_damaged

    index = read_index(folder)
    with _bar(index.num_bytes) as bar:
        refuse_damaged(folder, index, checksums=True, tick=bar.advance)
    return {**_describe(folder), "checked": True}


def _info(folder: Path) -> dict[str, Any]:
    from fivefold.data import inspect

    return {**_describe(folder), **inspect(folder)}


def _describe(folder: Path) -> dict[str, Any]:
    from fivefold.data import read_index

    index = read_index(folder)
    return {
        "folder": str(folder),
        "tokens": index.num_tokens,
        "documents": index.num_documents,
        "shards": len(index.shards),
        "bytes": index.num_bytes,
        "dtype": index.meaning.dtype,
        "vocab": index.vocab,
        "end": index.meaning.end,
        "tokenizer": index.meaning.tokenizer,
        "fingerprint": index.meaning.fingerprint,
        "masked": index.meaning.masked,
        "paired": index.meaning.paired,
    }


def _line(table: dict[str, Any]) -> str:
    end = "no end-of-document token" if table["end"] is None else f"end {table['end']}"
    noun = "preference pair" if table["paired"] else "document"
    sound = ", all checksums right" if "checked" in table else ""
    return (
        f"{table['folder']}: {_many(table['tokens'], 'token')} in "
        f"{_many(table['documents'], noun)}, {_many(table['shards'], 'shard')} of "
        f"{table['dtype']}, {table['bytes']:,} bytes; "
        f"tokenizer {table['tokenizer']}, {end}{sound}"
    )


def _written_text(table: dict[str, Any]) -> str:
    left = table["left_out"]
    parts = [f"{left[key]:,} {word}" for key, word in _WORDS.items() if key in left]
    lines = [_line(table)]
    if table["resumed"]:
        lines.append(f"{_many(table['resumed'], 'document')} were done by a start before")
    if parts:
        number = "document" if sum(left.values()) == 1 else "documents"
        lines.append(f"left out {', '.join(parts)} {number}")
    for why, number in table["skipped"].items():
        first, *extra_files = table["skipped_files"][why]
        examples = f"{first}, …; --json names all" if extra_files else first
        lines.append(f"skipped {_many(number, why)} ({examples})")
    lines.append(f"the model's vocabulary must have {table['vocab']:,} tokens at least")
    return "\n".join(lines)


def _sample_text(table: dict[str, Any]) -> str:
    """What --info adds to the line."""
    if "sample" not in table:
        return ""
    lengths = table["lengths"]
    spread = f"{lengths['min']:,} to {lengths['max']:,}, median {lengths['median']:,}"
    lines = ["", f"  fingerprint {table['fingerprint']}", f"  tokens a document: {spread}"]
    if table["masked"]:
        lines.append(f"  {table['with_loss']:.1%} of the tokens have a loss")
    return "\n".join([*lines, f"  begins with {table['sample']!r}"])


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _bar(num_bytes: int) -> AbstractContextManager[ProgressBar]:
    """A progress bar over bytes."""
    from rich.progress import DownloadColumn, TimeRemainingColumn

    return progress_bar("tokens", num_bytes, DownloadColumn(), TimeRemainingColumn())
