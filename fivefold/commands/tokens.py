"""`fivefold tokens`: tokenize files into a folder, check such a folder, or say what is in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.commands.job import OnProgress, TaskProgress
from fivefold.commands.options import json_text, shown_progress, tokens_of
from fivefold.core import FivefoldError

if TYPE_CHECKING:
    from fivefold.data import Encode, LengthFilter

_WORDS = {"empty": "empty", "short": "too short", "long": "too long", "duplicate": "duplicate"}


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
    from rich.progress import DownloadColumn, TimeRemainingColumn

    with shown_progress("tokens", DownloadColumn(), TimeRemainingColumn()) as on_progress:
        folders = tokens(
            inputs,
            output=output,
            tokenizer=tokenizer,
            column=column,
            chat=chat,
            pairs=pairs,
            end=end,
            min_chars=min_chars,
            max_chars=max_chars,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            dedup=dedup,
            workers=workers,
            shard_tokens=shard_tokens,
            force=force,
            check=check,
            info=info,
            on_progress=on_progress,
        )
    table = folders.to_json()
    as_text = json_text(table) if isinstance(table, dict) else json.dumps(table)
    typer.echo(as_text if as_json else str(folders))


@dataclass(frozen=True)
class TokenFolders:
    """A folder of tokens that was written, or those that were checked or read.

    `str()` is the text of `fivefold tokens`, `to_json()` its JSON: a table, or a list of tables.
    """

    tables: tuple[dict[str, Any], ...]
    written: bool

    def to_json(self) -> dict[str, Any] | list[dict[str, Any]]:
        """What `fivefold tokens --json` prints."""
        return self.tables[0] if self.written else list(self.tables)

    def __str__(self) -> str:
        if self.written:
            return _written_text(self.tables[0])
        return "\n".join(_line(table) + _sample_text(table) for table in self.tables)


def tokens(
    inputs: str | Path | Sequence[str | Path],
    *,
    output: str | Path | None = None,
    tokenizer: str | Path = "bytes",
    column: str | None = None,
    chat: bool = False,
    pairs: bool = False,
    end: str | None = None,
    min_chars: int = 0,
    max_chars: int | None = None,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    dedup: bool = False,
    workers: int | None = None,
    shard_tokens: str | int = "100M",
    force: bool = False,
    check: bool = False,
    info: bool = False,
    on_progress: OnProgress | None = None,
) -> TokenFolders:
    """Tokenize files into the folder `output`; with `check` verify the checksums of token folders,
    with `info` say what is in them."""
    if (output is not None) + check + info != 1:
        raise FivefoldError(
            "give either -o DIR, to write tokens there, or --check, to check some, or --info, to "
            "see some"
        )
    paths = [Path(path) for path in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    if output is None:
        describe = partial(_check, on_progress=on_progress) if check else _info
        return TokenFolders(tuple(map(describe, paths)), written=False)
    if workers is not None and workers < 1:
        raise FivefoldError(f"--workers {workers}: give at least 1")
    size = tokens_of("--shard-tokens", shard_tokens)
    # Imported here, so that --help does not load numpy.
    from fivefold.data import LengthFilter, TokenizeOptions, find_sources, tokenize, usual_workers

    lengths = LengthFilter(min_chars, max_chars, min_tokens, max_tokens)
    if pairs and column is not None:
        raise FivefoldError("--pairs reads chosen and rejected: leave --column out")
    if chat or pairs:
        encode = _conversations(str(tokenizer), end, column, lengths, pairs, dedup)
    else:
        encode = _documents(str(tokenizer), end, column, lengths, dedup)
    sources = find_sources(paths)
    options = TokenizeOptions(size, workers or usual_workers(), dedup, force)
    tick = _ticks(sources.num_bytes, on_progress)
    done = tokenize(sources, Path(output), encode, options, tick)
    table = {
        **_describe(Path(output)),
        "empty": done.left_out.get("empty", 0),
        "left_out": done.left_out,
        "files": len(sources.files),
        "skipped": {why: len(files) for why, files in sources.skipped.items()},
        "skipped_files": sources.skipped,
        "resumed": done.resumed,
    }
    return TokenFolders((table,), written=True)


def _documents(
    tokenizer: str, end: str | None, column: str | None, lengths: LengthFilter, dedup: bool
) -> Encode:
    from fivefold.data import BlockEncoder, make_encoder

    return BlockEncoder(make_encoder(tokenizer, end), column or "text", lengths, dedup)


def _conversations(
    tokenizer: str,
    end: str | None,
    column: str | None,
    lengths: LengthFilter,
    pairs: bool,
    dedup: bool,
) -> Encode:
    from fivefold.data import ChatEncoder, PairEncoder, make_chat_encoder
    from fivefold.generate import ChatTemplate

    kind = PairEncoder if pairs else ChatEncoder
    encoder = make_chat_encoder(tokenizer, end)  # refuses what is no folder
    render = ChatTemplate(Path(tokenizer)).render_many
    return kind(encoder, render, column, lengths, dedup)


def _ticks(num_bytes: int, on_progress: OnProgress | None) -> Callable[[float], None]:
    """What is called with numbers of bytes, and reports their sum."""
    done = 0.0

    def tick(count: float) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(TaskProgress(done, num_bytes, "tokens"))

    return tick


def _check(folder: Path, on_progress: OnProgress | None) -> dict[str, Any]:
    from fivefold.data import read_index, refuse_damaged

    index = read_index(folder)
    refuse_damaged(folder, index, checksums=True, tick=_ticks(index.num_bytes, on_progress))
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
