"""Sources of tokens: what a file is, tables by column, filters, duplicates, and runs that go on."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.cli import main
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.data.documents import BlockEncoder, ByteEncoder, LengthFilter
from fivefold.data.shards import open_corpus, read_index
from fivefold.data.sources import BLOCK, Sources, find_sources
from fivefold.data.tokenizing import Tokenized, TokenizeOptions, in_processes, tokenize

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256))


def run(*words: object) -> int | str | None:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code


def texts_of(folder: Path) -> list[str]:
    """The documents of a folder of bytes."""
    found: list[str] = []
    for shard in open_corpus(folder, 257, verify=True).shards:
        parts = np.split(shard.tokens, shard.begins[1:])
        found += [bytes(each[:-1].astype(np.uint8)).decode() for each in parts]
    return found


def tokenized(
    sources: Sources,
    folder: Path,
    tick: Callable[[float], None] = int,
    keep: LengthFilter | None = None,
    **options: Any,
) -> Tokenized:
    said = {"shard_tokens": 10**6, "workers": 1, **options}
    dedup = bool(said.get("dedup"))
    encode = BlockEncoder(ByteEncoder(256), "text", keep or LengthFilter(), dedup)
    return tokenize(sources, folder, encode, TokenizeOptions(**said), tick)


def test_what_a_file_is_is_decided_by_content_and_ending(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zstandard = pytest.importorskip("zstandard")
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "a.md").write_text("# Markdown")
    (inside / "b.png").write_bytes(PNG)
    (inside / "c").write_bytes(gzip.compress(b"packed without an ending"))
    packed = zstandard.ZstdCompressor().compress(b'{"text": "lines in zstd"}\n')
    (inside / "d.jsonl.zst").write_bytes(packed * 2)  # two frames
    (inside / "e.txt").write_bytes("Zwölf Boxkämpfer".encode("utf-16"))
    (inside / "f.pdf").write_bytes(b"%PDF-1.7\n" + b"text " * 9)
    (inside / "g.py").write_text("print()\n")
    assert run("tokens", inside, "-o", tmp_path / "d", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["skipped"] == {"binary file": 3} and table["files"] == 4
    names = [Path(each).name for each in table["skipped_files"]["binary file"]]
    assert names == ["b.png", "e.txt", "f.pdf"]
    wanted = ["# Markdown", "packed without an ending", *["lines in zstd"] * 2, "print()\n"]
    assert texts_of(tmp_path / "d") == wanted
    assert run("tokens", inside / "b.png", "-o", tmp_path / "e") == 2
    assert "it is binary" in capsys.readouterr().err
    (inside / "h.txt.zst").write_bytes(packed[:-5])
    assert run("tokens", inside / "h.txt.zst", "-o", tmp_path / "e") == 2
    assert run("tokens", inside / "d.jsonl.zst", "-o", tmp_path / "e", "--column", "x") == 2
    assert "d.jsonl.zst, line 1:\n  - no field 'x'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "in"]


def test_tables_are_read_by_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"text {number}" for number in range(600)]
    table = arrow.table({"body": [*texts, None], "n": list(range(601))})
    saved = tmp_path / "saved"
    (saved / "train").mkdir(parents=True)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    first = saved / "train" / "data-00000-of-00001.arrow"
    with arrow.ipc.new_stream(str(first), table.schema) as writer:  # as `datasets` saves them
        writer.write_table(table)
    with arrow.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("state.json", "dataset_info.json"):
        (saved / "train" / name).write_text("{}")
    inputs = (tmp_path / "a.parquet", tmp_path / "b.arrow", saved / "train")
    words = ("--column", "body", "--workers", 1, "--json")
    for number, path in enumerate(inputs):
        assert run("tokens", path, "-o", tmp_path / f"d{number}", *words) == 0
        found = json.loads(capsys.readouterr().out)
        assert texts_of(tmp_path / f"d{number}") == texts and found["empty"] == 1
    assert found["skipped"] == {"description of a dataset": 2}
    (saved / "dataset_dict.json").write_text("{}")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    for path, column, message in (
        (inputs[0], "text", "it has no column 'text'; name the column .* one of: body, n"),
        (inputs[0], "n", "a.parquet, row 1:\n  - column 'n' has a int and no text"),
        (saved, "body", "the splits train; give the folder of one, such as .*saved/train"),
        (tmp_path / "cut.parquet", "body", "cut.parquet:\n  - not a complete table"),
    ):
        with pytest.raises(BadFile, match=message):
            encode = BlockEncoder(ByteEncoder(256), column)
            tokenize(find_sources([path]), tmp_path / "x", encode, TokenizeOptions(100, 1), int)
    assert not (tmp_path / "x").exists() and not (tmp_path / ".x.partial").exists()


def test_files_describe_the_tables_of_their_folder_alone(tmp_path: Path) -> None:
    card, table = "---\nlicense: mit\n---\n", b"ARROW1\0\0" + bytes(64)
    for name in ("train", "other", "texts"):
        (tmp_path / name).mkdir()
    for name in ("train", "other"):
        (tmp_path / name / "data.arrow").write_bytes(table)
    for name in ("train", "texts"):
        (tmp_path / name / "state.json").write_text("{}")
        (tmp_path / name / "dataset_info.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "texts"):
        (folder / "README.md").write_text(card)
    sources = find_sources([tmp_path])
    assert [file.path.relative_to(tmp_path).as_posix() for file in sources.files] == [
        "other/data.arrow",
        "texts/README.md",
        "texts/dataset_info.json",
        "texts/state.json",
        "train/data.arrow",
    ]
    (described,) = sources.skipped.values()
    assert [Path(name).relative_to(tmp_path).as_posix() for name in described] == [
        "README.md",
        "train/dataset_info.json",
        "train/state.json",
    ]


def lines_of(path: Path, texts: list[str]) -> Sources:
    rows = [json.dumps({"text": text}) for text in texts]
    is_array = path.suffix == ".json"
    path.write_text(f"[{', '.join(rows)}]" if is_array else "".join(f"{row}\n" for row in rows))
    return find_sources([path])


def test_documents_are_left_out_by_length_and_by_text(tmp_path: Path) -> None:
    texts = ["ä", "the same", "", "a long text that is left out", "the same", "zwölf", "the same"]
    sources = lines_of(tmp_path / "a.jsonl", texts)
    keep = LengthFilter(min_chars=2, max_chars=20, max_tokens=9)
    done = tokenized(sources, tmp_path / "d", keep=keep, dedup=True)
    assert texts_of(tmp_path / "d") == ["the same", "zwölf"]
    assert done.left_out == {"empty": 1, "short": 1, "long": 1, "duplicate": 2}
    assert read_index(tmp_path / "d").text_bytes == len("the samezwölf".encode())
    with pytest.raises(FivefoldError, match=r"left out .1 empty, 6 short, 0 long"):
        tokenized(sources, tmp_path / "e", keep=LengthFilter(min_tokens=99))
    with pytest.raises(FivefoldError, match="--min-chars 5 and --max-chars 4: no document has"):
        LengthFilter(min_chars=5, max_chars=4)


def many_lines(path: Path) -> Sources:
    """More than two blocks, in which every third document is a duplicate or empty."""
    texts = [f"document {number} " * 40 for number in range(0, 6 * BLOCK, 6 * 640)]
    mixed = [each for at, text in enumerate(texts) for each in (text, texts[at // 2], "")]
    return lines_of(path, mixed)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_the_folder_does_not_depend_on_the_workers(tmp_path: Path, name: str) -> None:
    sources = many_lines(tmp_path / name)
    assert sources.num_bytes > 2 * BLOCK
    for workers in (1, 2):
        tokenized(sources, tmp_path / str(workers), workers=workers, dedup=True, shard_tokens=10**5)
    one, two = (read_index(tmp_path / str(workers)) for workers in (1, 2))
    assert one == two and len(one.shards) > 5


@pytest.mark.parametrize(
    ("name", "dedup"), [("a.jsonl", False), ("a.jsonl", True), ("a.json", True)]
)
def test_a_killed_run_leaves_no_folder_and_goes_on(tmp_path: Path, name: str, dedup: bool) -> None:
    sources = many_lines(tmp_path / name)
    whole = tokenized(sources, tmp_path / "whole", dedup=dedup, shard_tokens=10**5)
    ticks: list[float] = []

    def killed(num_bytes: float) -> None:
        ticks.append(num_bytes)
        if len(ticks) == 3:  # once at the start, then after each block
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        tokenized(sources, tmp_path / "d", killed, dedup=dedup, shard_tokens=10**5)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "d").exists() and (tmp_path / ".d.partial").is_dir()
    again = tokenized(sources, tmp_path / "d", dedup=dedup, shard_tokens=10**5)
    assert 0 < again.resumed < whole.index.num_documents
    assert (again.index, again.left_out) == (whole.index, whole.left_out)
    assert read_index(tmp_path / "d") == read_index(tmp_path / "whole")
    open_corpus(tmp_path / "d", 257, verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "d", "whole"]


def test_other_options_or_files_start_anew(tmp_path: Path) -> None:
    sources = lines_of(tmp_path / "a.jsonl", [f"document {number} " * 40 for number in range(200)])

    def stopped(num_bytes: float) -> None:
        if num_bytes:
            raise KeyboardInterrupt

    def again(**options: Any) -> int:
        with pytest.raises(KeyboardInterrupt):
            tokenized(sources, tmp_path / "d", stopped, shard_tokens=10**4, replace=True)
        said = {"shard_tokens": 10**4, "replace": True, **options}
        return tokenized(sources, tmp_path / "d", **said).resumed

    assert again() > 0
    assert again(dedup=True) == again(shard_tokens=10**5) == 0
    with pytest.raises(KeyboardInterrupt):
        tokenized(sources, tmp_path / "d", stopped, shard_tokens=10**4, replace=True)
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert tokenized(sources, tmp_path / "d", shard_tokens=10**4, replace=True).resumed == 0


def test_one_process_writes_a_folder_at_a_time(tmp_path: Path) -> None:
    sources = lines_of(tmp_path / "a.jsonl", ["text"])

    def second(num_bytes: float) -> None:
        with pytest.raises(FivefoldError, match=r"another process writes .*d\.partial now"):
            tokenized(sources, tmp_path / "d")

    tokenized(sources, tmp_path / "d", second)
    assert texts_of(tmp_path / "d") == ["text"]


def fails_at_seven(number: int) -> int:
    if number == 7:
        raise BadFile("a.jsonl, line 7", ["wrong"])
    if number == 9:
        os._exit(1)
    return number * number


def test_workers_answer_in_order_and_say_what_went_wrong() -> None:
    with in_processes(fails_at_seven, 2) as mapped:
        assert list(mapped(range(7))) == [number * number for number in range(7)]
    for first, message in ((7, "cannot use a.jsonl, line 7:\n  - wrong"), (9, "worker has ended")):
        with pytest.raises(FivefoldError, match=message), in_processes(fails_at_seven, 2) as mapped:
            list(mapped([1, *[first] * 5, 2]))


def own_pid(number: int) -> int:
    return os.getpid()


def test_no_worker_is_left_at_the_end() -> None:
    with in_processes(own_pid, 2) as mapped:
        pids = set(mapped(range(20)))
    assert os.getpid() not in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_info_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenized(lines_of(tmp_path / "a.jsonl", ["first text", "second"]), tmp_path / "d")
    assert run("tokens", tmp_path / "d", "--info") == 0
    out = capsys.readouterr().out
    assert "fingerprint bytes" in out and "begins with 'first text'" in out
    assert "tokens a document: 7 to 11, median 9" in out
    assert run("tokens", tmp_path / "d", "--info", "--json") == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert table["documents"] == 2 and table["sample"] == "first text"
    assert table["lengths"] == {"min": 7, "median": 9, "max": 11}
