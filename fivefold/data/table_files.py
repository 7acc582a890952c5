"""Rows of parquet and Arrow files, by column, in batches; pyarrow reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from fivefold.core import BadFile, FivefoldError

TableKind = Literal["parquet", "arrow", "stream"]
TABLES = ("parquet", "arrow", "stream")
_ROWS = 256  # of a batch
_PARQUET, _ARROW, _STREAM = b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff"


def kind_of(head: bytes) -> TableKind | None:
    """Format of a table by its first bytes; None if it is not one."""
    starts: dict[bytes, TableKind] = {_PARQUET: "parquet", _ARROW: "arrow", _STREAM: "stream"}
    return next((kind for start, kind in starts.items() if head.startswith(start)), None)


def imported(name: str, path: Path) -> Any:
    """Import a library of the extra `data`."""
    try:
        return import_module(name)
    except ImportError as error:
        library = name.split(".")[0]
        raise FivefoldError(
            f"{path} needs the library {library}: pip install 'fivefold[data]'"
        ) from error


def read_rows(path: Path, kind: str, columns: Sequence[str]) -> Iterator[tuple[list[Any], int]]:
    """Iterate over batches of rows, each with its share of the file's bytes.

    Of several columns a file needs one; rows are then tables of those that it has.
    """
    arrow = imported("pyarrow", path)
    size = path.stat().st_size
    with _naming(path, arrow):
        names, total, batches = _opened(path, kind, arrow, columns)
        if len(columns) == 1:
            _require_column(path, names, columns[0])
        chosen = [name for name in columns if name in names]
        if not chosen:
            rule = f"it has none of the columns {', '.join(columns)}; name the one by --column"
            raise BadFile(str(path), [f"{rule}, one of: {', '.join(names) or 'none'}"])
        last_share = done = 0
        for batch in batches(chosen):
            for begin in range(0, batch.num_rows, _ROWS):
                part = batch.slice(begin, _ROWS)
                done += part.num_rows
                share = size * done // total if total else 0
                if len(columns) == 1:
                    yield part.column(columns[0]).to_pylist(), share - last_share
                else:
                    yield part.select(chosen).to_pylist(), share - last_share
                last_share = share


def _require_column(path: Path, names: list[str], column: str) -> None:
    if column not in names:
        known = ", ".join(names) or "none"
        rule = f"it has no column {column!r}; name the column with the text by --column"
        raise BadFile(str(path), [f"{rule}, one of: {known}"])


def _opened(path: Path, kind: str, arrow: Any, columns: Sequence[str]) -> Any:
    """The columns of a file, its number of rows if that is known, and what reads batches."""
    if kind == "parquet":
        file = imported("pyarrow.parquet", path).ParquetFile(path)
        total = file.metadata.num_rows
        return (
            file.schema_arrow.names,
            total,
            lambda selection: file.iter_batches(_ROWS, columns=selection),
        )
    ipc = imported("pyarrow.ipc", path)
    mapped = arrow.memory_map(str(path))
    if kind == "stream":
        reader = ipc.open_stream(mapped)
        return reader.schema.names, 0, lambda selection: reader
    file = ipc.open_file(mapped)
    batches = map(file.get_batch, range(file.num_record_batches))
    return file.schema.names, 0, lambda selection: batches


@contextmanager
def _naming(path: Path, arrow: Any) -> Iterator[None]:
    """Turn an error of the library into one that names the file."""
    try:
        yield
    except FivefoldError:
        raise
    except (arrow.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BadFile(str(path), [f"not a complete table: {reason}; copy it again"]) from error
