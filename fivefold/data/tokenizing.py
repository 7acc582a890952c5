"""Files to a folder of token shards: read, encode in several processes, filter, write in order.

The folder does not depend on the number of processes. A run that was killed goes on where its last
shard ended, if its files and its options are the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fivefold.core import FivefoldError, tables
from fivefold.core.model import TOKENIZER_FILES
from fivefold.data.documents import DIGEST, EMPTY, KEPT, LONG, SHORT, EncodedBlock
from fivefold.data.shards import (
    BEGINS,
    DTYPES,
    INDEX,
    MASK,
    VERSION,
    Index,
    StoredFile,
    StoredShard,
    TokenFormat,
    read_index,
)
from fivefold.data.sources import BLOCK, RowBlock, Sources, read_blocks

# A function over many items in several processes, with the results in the order of the items.
#
# Each process has a pipe and, in this process, a thread that feeds it. A few items for each process
# are under way at a time, so that memory does not grow with their number. A process whose parent
# was killed reads the end of its pipe, and ends.

T, R = TypeVar("T"), TypeVar("R")
_AHEAD = 3  # items for each process: one that it has, and those that wait


@contextmanager
def in_processes(
    function: Callable[[T], R], num_workers: int
) -> Iterator[Callable[[Iterable[T]], Iterator[R]]]:
    """Ordered parallel map over items; with one worker, in this process."""
    if num_workers == 1:
        yield lambda items: map(function, items)
        return
    context = get_context("fork")  # the function is inherited, and never sent
    pairs = [context.Pipe() for _ in range(num_workers)]
    ours = [pair[0] for pair in pairs]
    processes: list[Any] = []
    for number, (_, theirs) in enumerate(pairs):
        connections = [*ours, *(other for at, (_, other) in enumerate(pairs) if at != number)]
        process = context.Process(target=_serve, args=(function, theirs, connections), daemon=True)
        process.start()
        processes.append(process)
    for _, theirs in pairs:
        theirs.close()
    free: SimpleQueue[Connection] = SimpleQueue()
    for connection in ours:
        free.put(connection)
    threads = ThreadPoolExecutor(num_workers, thread_name_prefix="fivefold-worker")
    try:
        yield lambda items: _ordered(threads, free, items, num_workers * _AHEAD)
    finally:
        for process in processes:
            process.terminate()
        threads.shutdown(wait=True, cancel_futures=True)
        for process in processes:
            process.join()


def _ordered(
    threads: ThreadPoolExecutor, free: SimpleQueue[Connection], items: Iterable[T], most: int
) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque()
    for item in items:
        waiting.append(threads.submit(_ask, free, item))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _ask(free: SimpleQueue[Connection], item: Any) -> Any:
    connection = free.get()
    try:
        connection.send(item)
        fine, result = connection.recv()
    except (EOFError, OSError) as error:
        raise FivefoldError(
            "a worker has ended without a result: it may have been killed for its memory; use "
            "fewer --workers"
        ) from error
    finally:
        free.put(connection)  # a dead one too: a thread that waited for it would wait forever
    if not fine:
        raise result
    return result


def _serve(
    function: Callable[[Any], Any], connection: Connection, connections: list[Connection]
) -> None:
    """Answer until the parent closes its pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallel part
    for other in connections:
        other.close()
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, function(item))
        except FivefoldError as error:
            answer = (False, FivefoldError(str(error)))  # which every error can be sent as
        except Exception as error:
            answer = (False, RuntimeError(f"{type(error).__name__}: {error}"))
        try:
            connection.send(answer)
        except OSError:
            return


# Write a folder of token shards (`data/shards.py`), under a temporary name next to it.
#
# One rename gives the folder its name once it is complete. A list of finished shards is kept until
# then, so that a run that was killed goes on after the last of them.

_TOKEN_FILES = re.compile(r"index\.json|[0-9]{5,}\.(tokens|begins|mask)")
_PROGRESS, _SEEN, _LOCK = "progress.json", "seen", "lock"  # in the temporary folder alone


class _Different(Exception):
    """The written shards differ from the existing folder."""


@dataclass(frozen=True)
class Place:
    """Position in the input, and documents left out before it, by reason."""

    file: int = 0
    row: int = 0
    left_out: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class WrittenShards:
    """Finished shards of a folder in progress."""

    identity: str
    position: Place = field(default_factory=Place)
    vocab: int = 0
    num_seen: int = 0  # bytes of digests
    shards: tuple[StoredShard, ...] = ()

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)


class JoinedDocuments(NamedTuple):
    """Consecutive documents with their end tokens, joined."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]  # bytes of their texts
    masks: NDArray[np.uint8] | None = None  # 1: the token has a loss
    digests: bytes = b""  # of their texts, which a run that goes on needs
    position: Callable[[int], Place] = lambda number: Place()
    """Where the input goes on after so many of them."""


@dataclass(frozen=True)
class FolderJob:
    """A folder to write. Without an identity it is never resumed."""

    folder: Path
    meaning: TokenFormat
    shard_tokens: int
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])  # of the tokenizer
    identity: str | None = None
    replace: bool = False


def write_folder(
    job: FolderJob, read: Callable[[WrittenShards, bytes], Generator[JoinedDocuments]]
) -> tuple[Index, WrittenShards]:
    """Write documents to a new folder; returns its index, and the progress from which this start
    resumed.

    A folder that exists with the same tokens is left as it is. One with other tokens is refused as
    soon as a difference is found, or replaced on demand. `read` gives the documents after those of
    a progress, and is told the digests of the earlier ones.
    """
    old_index = _existing_index(job)
    target = job.folder.resolve()
    temporary = target.with_name(f".{target.name}.partial")
    with _write_errors(temporary):
        temporary.mkdir(parents=True, exist_ok=True)
        lock = _locked(temporary)
    try:
        start, seen = _continued(temporary, job.identity or secrets.token_hex(8))
        writer = _ShardWriter(temporary, job, start, old_index)
        try:
            with contextlib.closing(read(start, seen)) as batches:
                for documents in batches:
                    writer.add(documents)
            index = writer.close()
        finally:
            writer.abandon()
        if old_index is None:
            _publish(temporary, job)
        shutil.rmtree(temporary, ignore_errors=True)
    except Exception as error:  # not a signal: what is there is for the next start
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, _Different):
            raise _refused(job.folder) from error
        raise
    finally:
        lock.close()
    return index, start


def _locked(temporary: Path) -> IO[bytes]:
    """A lock on the temporary folder, which ends with this process."""
    stream = (temporary / _LOCK).open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.close()
        raise FivefoldError(
            f"another process writes {temporary} now: wait for it, or give another folder"
        ) from error
    return stream


def _continued(temporary: Path, identity: str) -> tuple[WrittenShards, bytes]:
    """The progress of an earlier start of this job, and the digests of its documents."""
    start, seen = WrittenShards(identity), b""
    with contextlib.suppress(OSError, ValueError):
        table = json.loads((temporary / _PROGRESS).read_bytes())
        progress = tables.build(WrittenShards, table, _PROGRESS)
        files = [file for shard in progress.shards for file in shard.files]
        is_complete = all(
            (temporary / stored_file.name).stat().st_size == stored_file.bytes
            for stored_file in files
        )
        known = (temporary / _SEEN).read_bytes()[: progress.num_seen]
        if progress.identity == identity and is_complete and len(known) == progress.num_seen:
            start, seen = progress, known
    known_names = {file.name for shard in start.shards for file in shard.files}
    with _write_errors(temporary):
        for path in temporary.iterdir():
            if path.name not in {*known_names, _LOCK}:
                path.unlink()
        (temporary / _SEEN).write_bytes(seen)
    return start, seen


def _existing_index(job: FolderJob) -> Index | None:
    """The index of the folder that exists, if it may have the same tokens."""
    folder = job.folder
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FivefoldError(f"{folder}: {error.strerror}; give another folder") from error
    ours = [name for name in names if name in TOKENIZER_FILES or _TOKEN_FILES.fullmatch(name)]
    if other := [name for name in names if name not in ours]:
        raise FivefoldError(
            f"{folder} has the file {other[0]}, which is not a token file: give a new folder"
        )
    if job.replace or not names:
        return None
    try:
        index = read_index(folder)
    except FivefoldError as error:
        raise _refused(folder) from error
    if index.meaning != job.meaning:
        raise _refused(folder)
    return index


def _refused(folder: Path) -> FivefoldError:
    return FivefoldError(
        f"{folder} exists with other tokens: give another folder, or --force to replace it"
    )


def _publish(temporary: Path, job: FolderJob) -> None:
    """One rename, or two where a folder is replaced."""
    target = job.folder.resolve()
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    with _write_errors(job.folder):
        for name in (_PROGRESS, _SEEN, _LOCK):
            (temporary / name).unlink(missing_ok=True)
        for name, data in job.files.items():
            _write_synced(temporary / name, data)
        _sync_folder(temporary)
        replaces = job.replace and target.exists()
        if replaces:
            target.rename(old)
        try:
            temporary.rename(target)
        except OSError:
            if replaces:
                old.rename(target)
            raise
        _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    """A file that is on the disk when this returns, complete or not at all."""
    beside = path.with_name(f"{path.name}.new")
    with _write_errors(path):
        with beside.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _ChecksummedFile:
    """A file in progress, with its size and checksum so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.digest = path, 0, hashlib.sha256()
        with _write_errors(path):
            self.stream = path.open("xb")

    def write(self, array: NDArray[Any]) -> None:
        data = array.tobytes()
        self.digest.update(data)
        self.size += len(data)
        with _write_errors(self.path):
            self.stream.write(data)

    def close(self) -> StoredFile:
        with _write_errors(self.path):
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()
        return StoredFile(self.path.name, self.size, self.digest.hexdigest())

    def abandon(self) -> None:
        """Close a file that will be deleted; a full disk may raise an error once more."""
        with contextlib.suppress(OSError):
            self.stream.close()


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FivefoldError(
            f"cannot write {path}: {error.strerror or error}; no files remain; free some "
            "space or give a folder elsewhere, and run it again"
        ) from error


class _ShardWriter:
    """Writes documents to the shards of a folder, in order.

    A shard is full once it has `shard_tokens`; no document is split. With `expected`, each full
    shard must be equal to that of this index, so that a difference is found early.
    """

    def __init__(
        self, folder: Path, job: FolderJob, start: WrittenShards, expected: Index | None = None
    ) -> None:
        self.folder, self.meaning, self.shard_tokens = folder, job.meaning, job.shard_tokens
        self.expected, self.identity = expected, start.identity
        self.shards, self.vocab, self.num_seen = list(start.shards), start.vocab, start.num_seen
        self.files: list[_ChecksummedFile] = []
        self.num_tokens = self.num_documents = self.text_bytes = 0

    def add(self, documents: JoinedDocuments) -> None:
        """Write documents: as many as fill a shard, then the next."""
        ends = np.cumsum(documents.lengths)
        done, seen = 0, memoryview(documents.digests)
        size = len(seen) // len(ends)  # of a digest
        while done < len(ends):
            before = int(ends[done - 1]) if done else 0
            capacity = self.shard_tokens - self.num_tokens
            last = min(len(ends), int(np.searchsorted(ends, before + capacity)) + 1)
            part = slice(before, int(ends[last - 1]))
            starts = ends[done:last] - documents.lengths[done:last] - before + self.num_tokens
            masks = documents.masks
            self._write(documents.tokens[part], starts, None if masks is None else masks[part])
            self.text_bytes += int(documents.sizes[done:last].sum())
            self._note(bytes(seen[done * size : last * size]))
            done = last
            if self.num_tokens >= self.shard_tokens:
                self._finish(documents.position(last))

    def _write(
        self, tokens: NDArray[Any], starts: NDArray[np.int64], masks: NDArray[np.uint8] | None
    ) -> None:
        assert (masks is not None) == self.meaning.masked
        if not self.files:
            kinds = ("tokens", "begins", *(("mask",) if self.meaning.masked else ()))
            stem = f"{len(self.shards):05}"
            self.files = [_ChecksummedFile(self.folder / f"{stem}.{kind}") for kind in kinds]
        arrays = [tokens.astype(DTYPES[self.meaning.dtype], copy=False), starts.astype(BEGINS)]
        arrays += [] if masks is None else [masks.astype(MASK, copy=False)]
        for file, array in zip(self.files, arrays, strict=True):
            file.write(array)
        self.num_tokens += len(tokens)
        self.num_documents += len(starts)
        self.vocab = max(self.vocab, int(tokens.max()) + 1)

    def _note(self, digests: bytes) -> None:
        """Append to the digests of all documents."""
        if digests:
            path = self.folder / _SEEN
            with _write_errors(path), path.open("ab") as stream:
                stream.write(digests)
            self.num_seen += len(digests)

    def close(self) -> Index:
        """Finish the last shard, and write the index."""
        self._finish(None)
        index = Index(VERSION, self.meaning, self.vocab, tuple(self.shards))
        if self.expected not in (None, index):
            raise _Different
        _write_synced(self.folder / INDEX, index.text().encode())
        return index

    def abandon(self) -> None:
        """Close files that are not finished."""
        for file in self.files:
            file.abandon()

    def _finish(self, position: Place | None) -> None:
        """Close a shard; `position` is where the input goes on after it."""
        if not self.files:
            return
        tokens, begins, *mask = [file.close() for file in self.files]
        counts = (self.num_tokens, self.num_documents, self.text_bytes)
        shard = StoredShard(*counts, tokens, begins, mask[0] if mask else None)
        number = len(self.shards)
        if self.expected is not None and self.expected.shards[number : number + 1] != (shard,):
            raise _Different
        self.shards.append(shard)
        self.files = []
        self.num_tokens = self.num_documents = self.text_bytes = 0
        if position is not None:
            done = WrittenShards(
                self.identity, position, self.vocab, self.num_seen, tuple(self.shards)
            )
            _write_synced(self.folder / _PROGRESS, json.dumps(asdict(done)).encode())


_COUNTED = {EMPTY: "empty", SHORT: "short", LONG: "long"}
DUPLICATE = "duplicate"


class Encode(Protocol):
    """Encodes a block; has the columns to read, and the format of its tokens."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def meaning(self) -> TokenFormat: ...

    @property
    def files(self) -> dict[str, bytes]: ...

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that its tokens depend on."""
        ...

    def __call__(self, block: RowBlock) -> EncodedBlock: ...


@dataclass(frozen=True)
class TokenizeOptions:
    """Options of tokenization, apart from the encoder."""

    shard_tokens: int
    workers: int
    dedup: bool = False
    replace: bool = False


@dataclass
class Tokenized:
    """Result of tokenization."""

    index: Index
    left_out: dict[str, int]
    resumed: int  # documents that an earlier start had done


def tokenize(
    sources: Sources,
    folder: Path,
    encode: Encode,
    options: TokenizeOptions,
    tick: Callable[[float], None],
) -> Tokenized:
    """Tokenize files to a folder; `tick` is called with the bytes read from disk."""
    job = FolderJob(
        folder,
        encode.meaning,
        options.shard_tokens,
        encode.files,
        _identity(sources, encode, options),
        options.replace,
    )
    reader = _Reader(sources, encode, options, tick)
    index, start = write_folder(job, reader.documents)
    left_out = {key: count for key, count in reader.counts.items() if count}
    return Tokenized(index, left_out, start.num_documents)


def _identity(sources: Sources, encode: Encode, options: TokenizeOptions) -> str | None:
    """Equal for runs that write the same tokens; None if a file can be read only once."""
    files: list[tuple[str, int, int]] = []
    for source in sources.files:
        if not source.path.is_file():
            return None
        file_stat = source.path.stat()
        files.append((str(source.path.resolve()), file_stat.st_size, file_stat.st_mtime_ns))
    table = {
        "files": files,
        "encode": encode.identity,
        "meaning": asdict(encode.meaning),
        "dedup": options.dedup,
        "shard_tokens": options.shard_tokens,
    }
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


@dataclass
class _Reader:
    """Reads and encodes documents from a position on, and counts those left out."""

    sources: Sources
    encode: Encode
    options: TokenizeOptions
    tick: Callable[[float], None]
    counts: dict[str, int] = field(default_factory=dict[str, int])
    seen: set[bytes] = field(default_factory=set[bytes])

    def documents(self, start: WrittenShards, seen: bytes) -> Generator[JoinedDocuments]:
        """The documents after those of an earlier start, each block in one piece."""
        self.counts = dict.fromkeys((*_COUNTED.values(), DUPLICATE), 0) | start.position.left_out
        self.seen = {seen[at : at + DIGEST] for at in range(0, len(seen), DIGEST)}
        begin, num_full = (start.position.file, start.position.row), start.num_documents
        self.tick(sum(file.path.stat().st_size for file in self.sources.files[: begin[0]]))
        blocks = read_blocks(self.sources, self.encode.columns, begin)
        with in_processes(self.encode, self._num_workers()) as mapped:
            for done in mapped(blocks):
                new_documents = self._kept(done)
                num_full += len(new_documents.lengths)
                if len(new_documents.lengths):
                    yield new_documents
                self.counts = _added(self.counts, done, len(done.fates), len(new_documents.lengths))
                self.tick(done.block.num_bytes)
        if not num_full:
            raise FivefoldError(
                f"no text in the input, only {sum(self.counts.values()):,} documents that are "
                f"left out ({_listed(self.counts)}): give files with text, or other limits"
            )

    def _num_workers(self) -> int:
        """No more processes than there are blocks."""
        return max(1, min(self.options.workers, self.sources.num_bytes // BLOCK))

    def _kept(self, done: EncodedBlock) -> JoinedDocuments:
        """The documents of a block that are no duplicates."""
        rows = np.flatnonzero(done.fates == KEPT)
        lengths, sizes, tokens = done.lengths, done.sizes, done.tokens
        masks, new = done.masks, done.digests
        if self.options.dedup:
            raw = [bytes(digest) for digest in new]
            first = np.array([self._is_new(digest) for digest in raw], np.bool_)
            if not first.all():
                part = np.repeat(first, lengths)
                lengths, sizes, tokens = lengths[first], sizes[first], tokens[part]
                rows, new = rows[first], new[first]
                masks = None if masks is None else masks[part]
        position = self._places(done, rows)
        return JoinedDocuments(tokens, lengths, sizes, masks, new.tobytes(), position)

    def _is_new(self, digest: bytes) -> bool:
        if digest in self.seen:
            return False
        self.seen.add(digest)
        return True

    def _places(self, done: EncodedBlock, rows: NDArray[np.int64]) -> Callable[[int], Place]:
        """Where to go on after the first documents of a block."""
        counts = self.counts

        def position(number: int) -> Place:
            end = int(rows[number - 1]) + 1
            left_out = _added(counts, done, end, number)
            return Place(done.block.file, done.block.first + end, left_out)

        return position


def _added(
    counts: dict[str, int], done: EncodedBlock, num_rows: int, num_kept: int
) -> dict[str, int]:
    """Counts with the first rows of a block, of which so many documents were kept."""
    fates = done.fates[:num_rows]
    totals = {word: counts[word] + int((fates == fate).sum()) for fate, word in _COUNTED.items()}
    duplicates = counts[DUPLICATE] + int((fates == KEPT).sum()) - num_kept
    return {**counts, **totals, DUPLICATE: duplicates}


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {word}" for word, number in counts.items())


def usual_workers() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
