"""`fivefold tokens`: tokenize text files into a folder, or check such a folder."""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.core.errors import FivefoldError
from fivefold.verbs import ProgressBar, progress_bar

_SIZES = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}


def run(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Text, JSONL or gzip files, or folders of them; with --check, token folders.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of tokens to write.")
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, or bytes.")] = "bytes",
    field: Annotated[str, typer.Option(help="Field of a JSONL line that holds the text.")] = "text",
    end: Annotated[
        str | None,
        typer.Option(
            help="Token after each document, or none (default: 256, or the tokenizer's).",
            show_default=False,
        ),
    ] = None,
    shard_tokens: Annotated[str, typer.Option(help="Tokens per shard: 500k, 100M, 1B.")] = "100M",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Verify the checksums of token folders.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokenize text into a folder, or check such a folder."""
    if check == (output is not None):
        raise FivefoldError("give either -o DIR, to write tokens there, or --check, to check some")
    if output is None:
        tables = [_check(folder) for folder in inputs]
        typer.echo(json.dumps(tables) if as_json else "\n".join(map(_line, tables)))
        return
    size = parse_count("shard-tokens", shard_tokens)
    table = _write(inputs, output, size, (tokenizer, end), field, force)
    if as_json:
        typer.echo(json.dumps(table))
        return
    typer.echo(_line(table))
    if table["empty"]:
        typer.echo(f"left out {_many(table['empty'], 'empty document')}")
    typer.echo(f"the model's vocabulary must have {table['vocab']:,} tokens at least")


def parse_count(option: str, text: str) -> int:
    """A whole number above 0, with k, M or B for thousands, millions and billions.

    >>> parse_count("shard-tokens", "2.5M")
    2500000
    """
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kMB]?)", text)
    number = float(found[1]) * _SIZES[found[2]] if found else 0.0
    if number < 1 or number != int(number):
        raise FivefoldError(f"--{option} {text}: give a whole number, such as 500k, 100M or 1B")
    return int(number)


def _write(
    inputs: list[Path],
    output: Path,
    shard_tokens: int,
    words: tuple[str, str | None],
    field: str,
    force: bool,
) -> dict[str, Any]:
    # Imported here, so that --help does not load numpy.
    from fivefold.data.documents import Tokenized, list_files, make_encoder, read_documents
    from fivefold.data.shard_writer import write_folder

    encoder = make_encoder(*words)
    files = list_files(inputs)
    with _bar(sum(file.stat().st_size for file in files)) as bar:
        documents = Tokenized(read_documents(files, field, bar.advance), encoder)
        write_folder(output, encoder.meaning, documents, shard_tokens, replace=force)
    return {**_describe(output), "empty": documents.num_empty}


def _check(folder: Path) -> dict[str, Any]:
    from fivefold.data.shards import read_index, refuse_damaged

    index = read_index(folder)
    with _bar(index.num_bytes) as bar:
        refuse_damaged(folder, index, checksums=True, tick=bar.advance)
    return {**_describe(folder), "checked": True}


def _describe(folder: Path) -> dict[str, Any]:
    from fivefold.data.shards import read_index

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
    }


def _line(table: dict[str, Any]) -> str:
    end = "no end-of-document token" if table["end"] is None else f"end {table['end']}"
    sound = ", all checksums right" if "checked" in table else ""
    return (
        f"{table['folder']}: {_many(table['tokens'], 'token')} in "
        f"{_many(table['documents'], 'document')}, {_many(table['shards'], 'shard')} of "
        f"{table['dtype']}, {table['bytes']:,} bytes; "
        f"tokenizer {table['tokenizer']}, {end}{sound}"
    )


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _bar(num_bytes: int) -> AbstractContextManager[ProgressBar]:
    """A progress bar over bytes."""
    from rich.progress import DownloadColumn, TimeRemainingColumn

    return progress_bar("tokens", num_bytes, DownloadColumn(), TimeRemainingColumn())
