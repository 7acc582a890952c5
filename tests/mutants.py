"""Mutation testing: planted faults, and which of them no test sees.

    python -m tests.mutants run [ID...]  judge what has no valid result, at most 40 mutants
    python -m tests.mutants list         the drawn mutants and their results
    python -m tests.mutants show ID      the edit of one mutant, and the tests that would run
    python -m tests.mutants apply ID     write it to the working tree
    python -m tests.mutants merge FILE   take over the results of another machine
    python -m tests.mutants page         write the scores to docs/how-it-is-verified.md

Each mutant runs in a copy of the tree, on the tests that run its function by the map of
`tests.coverage_map`. A test that fails on a mutant kills it only if it passes without the mutant.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.util import cache_from_source
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from tests.changes import module_of
from tests.coverage_map import MAP, CoverageMap, read
from tests.mutations import ROOMS, Mutant, candidates, draw, short_hash
from tests.related import Case, Related
from tests.selection import ALL_CASES, SALT

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "data" / "mutants.json"
REASONS = ROOT / "tests" / "data" / "mutant_reasons.toml"
PAGE = ROOT / "docs" / "how-it-is-verified.md"
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->\n"
NUMBER = 45  # mutants of a room
FILE_SECONDS = 0.7  # to import a file of tests
LEAST_SECONDS = 0.05  # of an item: pytest's own
START_SECONDS = 60.0  # of pytest and torch, on a busy machine
PATIENCE = 8.0  # how many times as long as by the map an item may take
HEALTHY_SECONDS = 600.0  # of one item without a mutant
MOST_BYTES = 8 << 30  # of data of a process: a mutant may allocate without end
MOST_RUNS = 12  # of one mutant, each without a test that the run before showed to be no judge
SKIPPED_FOLDERS = (".git", "build", "carry", ".venv", "__pycache__", "runs")
OWNER = "FIVEFOLD_MUTANT"  # in the environment of all processes of a run
# They run in interpreters that the map does not see: whose tests run them.
UNRECORDED = {"fivefold/generate/chat_worker.py": "fivefold/generate/chat.py"}
LEFT_OUT_TESTS = ("tests/page/", "tests/gpu/", "tests/test_mutants.py")
CLOCKS = {"within", "perf_counter", "monotonic"}
KILLED, TIMEOUT, SURVIVED, UNCOVERED = "killed", "timeout", "survived", "uncovered"
EQUIVALENT, INVALID = "equivalent", "invalid"
SEEN = (KILLED, TIMEOUT)


@dataclass(frozen=True)
class Record:
    """The result of one mutant; `key` says for which function and tests."""

    id: str
    room: str
    path: str
    function: str
    kind: str
    before: str
    after: str
    result: str
    test: str
    seconds: float
    budget: float
    date: str
    key: str

    @property
    def order(self) -> tuple[str, ...]:
        return self.room, self.path, self.function, self.id


def read_records(path: Path = RESULTS) -> dict[str, Record]:
    if not path.exists():
        return {}
    return {fields["id"]: Record(**fields) for fields in json.loads(path.read_text("utf-8"))}


def write_records(records: Iterable[Record], path: Path) -> None:
    """One line for each, in an order that stays."""
    ordered = sorted(records, key=lambda record: record.order)
    lines = [json.dumps(asdict(record), ensure_ascii=False) for record in ordered]
    part = path.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
    part.replace(path)


class Items:
    """The items of this tree, and those that run a function."""

    def __init__(self, root: Path, coverage: CoverageMap, items: Collection[str] = ()) -> None:
        """Items that were not collected are not chosen; their files count in keys all the same."""
        self.root, self.coverage = root, coverage
        self._texts: dict[str, str] = {}
        failed = set(coverage.items(coverage.failed))
        self.cases = [Case(item) for item in items if item not in failed and not self._timed(item)]
        self.files = files_of_tests(root, coverage)
        self.items = items

    def _timed(self, item: str) -> bool:
        """Whether an item looks at the clock, which other workers slow down."""
        path, _, name = item.partition("[")[0].partition("::")
        text = self._text(path)
        if not any(clock in text for clock in CLOCKS):
            return False  # most files: a parse of all takes seconds
        return bool(module_of(text).mentions[name.replace("::", ".")] & CLOCKS)

    def _text(self, path: str) -> str:
        if path not in self._texts:
            file = self.root / path
            self._texts[path] = file.read_text("utf-8") if file.exists() else ""
        return self._texts[path]

    @cached_property
    def _related(self) -> Related:
        return Related(self.coverage, self.cases)

    @cached_property
    def num_functions(self) -> dict[str, int]:
        """How many functions each item runs: a special test comes before a general one."""
        steps = [0] * (len(self.coverage.names) + 1)  # by how much an item differs from the last
        for runs in self.coverage.functions.values():
            for position, length in enumerate(accumulate(runs)):
                steps[length] += -1 if position % 2 else 1
        return dict(zip(self.coverage.names, accumulate(steps), strict=False))

    def recorded(self, mutant: Mutant) -> list[str]:
        """The names in the map of the functions whose tests run this one, also where its module was
        joined to another since."""
        path = UNRECORDED.get(mutant.path)
        if path is None:
            name = f"{mutant.path}:{mutant.function}"
            return [name] if name in self.coverage.functions else self._moved(mutant)
        return [name for name in self.coverage.functions if name.startswith(f"{path}:")]

    def _moved(self, mutant: Mutant) -> list[str]:
        return [
            name
            for name in self.coverage.functions
            if name.endswith(f":{mutant.function}")
            and name.startswith(f"fivefold/{mutant.room}/")
            and not (self.root / name.partition(":")[0]).exists()
        ]

    @cached_property
    def _files_with_new_tests(self) -> set[str]:
        recorded = {name.partition("[")[0] for name in self.coverage.names}
        known = {(test.partition("::")[0], test.rpartition("::")[2]) for test in recorded}
        return {
            path
            for path in self.files
            for name in re.findall(r"^ *(?:async )?def (test_\w+)", self._text(path), re.M)
            if (path, name) not in known
        }

    def new_files(self, mutant: Mutant) -> set[str]:
        """Files with tests that the map does not have, of those that import the mutant's room."""
        room = f"fivefold.{mutant.room}"
        return {path for path in self._files_with_new_tests if room in self._text(path)}

    def _new(self, mutant: Mutant) -> set[str]:
        """Items that the map does not have, and that may run the function."""
        files = self.new_files(mutant)
        return {
            item
            for item in self.items
            if item.partition("::")[0] in files and item not in self.coverage.seconds
        }

    def choose(self, mutant: Mutant, budget: float, without: Collection[str] = ()) -> list[str]:
        """Items for so many seconds by the map: new ones, then special and short ones, one of each
        test before a second of any; those of a file follow each other."""
        related = self._related.fresh()
        names = {name for function in self.recorded(mutant) for name in related.running(function)}
        new = self._new(mutant)
        by_test: dict[str, list[str]] = defaultdict(list)
        for name in sorted((names | new) - set(without), key=self._price):
            by_test[name.partition("[")[0]].append(name)
        turns = {
            name: (name not in new, turn)
            for cases in by_test.values()
            for turn, name in enumerate(cases)
        }
        files: dict[str, list[str]] = {}
        extra = 0.0
        for name in sorted(turns, key=lambda name: (*turns[name], self._price(name))):
            path = name.partition("::")[0]
            cost = LEAST_SECONDS + (FILE_SECONDS if path not in files else 0.0)
            related.run(name, budget - extra - cost)
            if name in related.chosen:
                files.setdefault(path, []).append(name)
                extra += cost
        return [name for cases in files.values() for name in cases]

    def _price(self, name: str) -> tuple[float, str]:
        seconds = self.coverage.seconds.get(name, 1.0)
        return self.num_functions.get(name, 1) * max(seconds, LEAST_SECONDS), name

    def key(self, mutant: Mutant, killer: str = "") -> str:
        """What a result depends on: the function, and the file of the test that killed the mutant,
        or without one the files of all tests that run the function."""
        paths = {killer.partition("::")[0]} if killer else self._files(mutant)
        texts = (text for path in sorted(paths) for text in (path, self._text(path)))
        return short_hash(mutant.id, mutant.digest, *texts)

    def _files(self, mutant: Mutant) -> set[str]:
        functions = [self.coverage.functions.get(name, []) for name in self.recorded(mutant)]
        paths = {
            name.partition("::")[0] for runs in functions for name in self.coverage.items(runs)
        }
        return paths | self.new_files(mutant)

    def is_valid(self, record: Record, mutant: Mutant, budget: float = 0.0) -> bool:
        """Whether a result is that of this function and of these tests, in as many seconds."""
        if record.result == INVALID:
            return record.key == short_hash(mutant.id, mutant.digest)
        seen = record.result in SEEN
        enough = seen or record.result == UNCOVERED or record.budget >= budget
        return enough and record.key == self.key(mutant, record.test if seen else "")


def tree_files(root: Path) -> list[str]:
    """Files that git has or would add; without git those of the folder, without build outputs."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, check=True)
        names = [name for name in done.stdout.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = []
    if not names:
        names = [
            path.relative_to(root).as_posix()
            for path in root.rglob("*")
            if not set(SKIPPED_FOLDERS).intersection(path.relative_to(root).parts)
        ]
    return [name for name in names if (root / name).is_file()]


class OutOfTime(Exception):
    """The time of all runs is over."""


@dataclass(frozen=True)
class Outcome:
    """How pytest ended, and what it printed."""

    code: int | None  # nothing if it had to be ended
    output: str

    def failed(self, items: Collection[str]) -> str:
        """The first item that failed, or that did not end."""
        results = [re.match(r"(.+?) (FAILED|ERROR)\b", line) for line in self.output.splitlines()]
        names = [match[1] for match in results if match and match[1] in items]
        begun = [item for item in items if f"\n{item} " in self.output]
        # By its place in the output: pytest may run items in another order.
        last = max(begun, key=lambda item: self.output.rfind(f"\n{item} "), default="")
        return names[0] if names else last

    def uncollected(self) -> list[str]:
        """Items or files that pytest did not find or could not import."""
        absent = re.findall(
            r"^ERROR: (?:not found: |found no collectors for )(.*)$", self.output, re.M
        )
        broken = re.findall(r"^ERROR (tests/\S+\.py)\b", self.output, re.M)
        return [f"tests/{name.partition('/tests/')[2]}" for name in absent] + broken


class Copy:
    """A copy of the tree, in which one mutant runs at a time."""

    def __init__(self, root: Path, folder: Path, deadline: float) -> None:
        self.root, self.folder, self.deadline = root, folder / "tree", deadline
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        for name in tree_files(root):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, self.folder / name)

    def _write(self, path: str, content: bytes) -> None:
        """Python takes a cached module for current by seconds and size: it goes too."""
        (self.folder / path).write_bytes(content)
        Path(cache_from_source(str(self.folder / path))).unlink(missing_ok=True)

    def plant(self, mutant: Mutant) -> None:
        self._write(mutant.path, mutant.apply((self.root / mutant.path).read_bytes()))

    def restore(self, mutant: Mutant) -> None:
        self._write(mutant.path, (self.root / mutant.path).read_bytes())

    def pytest(self, words: Sequence[str], limit: float, stall: float = float("inf")) -> Outcome:
        """Run pytest for so many seconds, and so many without a new item."""
        options = ["-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "--no-header"]
        options += ["-c", str(self.folder / "pyproject.toml"), f"--rootdir={self.folder}"]
        return self.python([*options, f"--basetemp={self.temporary}/pytest", *words], limit, stall)

    def python(self, words: Sequence[str], limit: float, stall: float = float("inf")) -> Outcome:
        log = self.temporary / "output"
        owner = str(self.folder)
        environment = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith("FIVEFOLD")
            },
            **{ALL_CASES: "1", SALT: "mutants", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            **{"PYTHONPATH": owner, "TMPDIR": str(self.temporary), OWNER: owner},
            "PYTHONUNBUFFERED": "1",  # what dies by a signal has named its item
        }
        command = ["sh", "-c", f'ulimit -d {MOST_BYTES >> 10}; exec "$@"', "sh", sys.executable]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *words],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                in_time = self._follow(process, log, limit, stall)
            finally:
                _end_processes(process, owner)
        text = log.read_text("utf-8", errors="replace")
        return Outcome(process.returncode if in_time else None, text)

    def _follow(
        self, process: subprocess.Popen[bytes], log: Path, limit: float, stall: float
    ) -> bool:
        """Wait for a process; False if it took too long."""
        began = changed = time.monotonic()
        size = 0
        while process.poll() is None:
            time.sleep(0.05)
            now_s = time.monotonic()
            if now_s > self.deadline:
                raise OutOfTime
            if (new_size := log.stat().st_size) != size:
                size, changed = new_size, now_s
            if now_s - began > limit or now_s - changed > stall:
                return False
        return True


def _end_processes(process: subprocess.Popen[bytes], owner: str) -> None:
    """End what a run has started: its group, and whatever left the group with its environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    mark = f"{OWNER}={owner}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue


class Judge:
    """Runs mutants in copies of the tree, as many at a time as there are copies."""

    def __init__(self, root: Path, folder: Path, workers: int, seconds: float = 1e9) -> None:
        self.deadline = time.monotonic() + seconds
        folders = [folder / str(number) for number in range(workers)]
        self.copies = [Copy(root, path, self.deadline) for path in folders]
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for copy in self.copies:
            self._free.put(copy)
        self._healthy: dict[str, float] = {}  # seconds of an item without a mutant
        self._lock = threading.Lock()

    def collect(self, files: Sequence[str]) -> list[str]:
        """The items of files of tests. Files that cannot be imported here have none."""
        with ThreadPoolExecutor(len(self.copies)) as pool:
            parts = [files[number :: len(self.copies)] for number in range(len(self.copies))]
            outputs = pool.map(self._collect, self.copies, parts)
        return [item for items in outputs for item in items]

    def _collect(self, copy: Copy, files: Sequence[str]) -> list[str]:
        if not files:
            return []
        words = ["--collect-only", "-q", "--continue-on-collection-errors", *files]
        lines = copy.pytest(words, HEALTHY_SECONDS).output.splitlines()
        return [line for line in lines if re.match(r"tests/\S+\.py::", line)]

    @property
    def unhealthy(self) -> set[str]:
        with self._lock:
            return {item for item, took in self._healthy.items() if took == float("inf")}

    def _passes(self, copy: Copy, item: str, limit: float = HEALTHY_SECONDS) -> bool:
        """Whether an item passes in so many seconds without a mutant, in a copy that has none."""
        with self._lock:
            took = self._healthy.get(item)
        if took is None:
            began = time.monotonic()
            passes = copy.pytest(["-q", item], HEALTHY_SECONDS).code == 0
            took = time.monotonic() - began if passes else float("inf")
            with self._lock:
                self._healthy[item] = took
        return took < limit

    def judge(self, mutant: Mutant, tests: Items, budget: float, killer: str = "") -> Record:
        """The result of one mutant; the test that killed it before runs first."""
        began = time.monotonic()
        if began > self.deadline:
            raise OutOfTime
        copy = self._free.get()
        try:
            if killer and self._kills(copy, mutant, killer):
                result, test = KILLED, killer
            else:
                result, test = self._result(copy, mutant, tests, budget)
        finally:
            copy.restore(mutant)
            self._free.put(copy)
        key = tests.key(mutant, test if result in SEEN else "")
        if result == INVALID:
            key = short_hash(mutant.id, mutant.digest)
        return Record(
            **{name: getattr(mutant, name) for name in ("id", "room", "path", "function", "kind")},
            **{"before": mutant.before, "after": mutant.after, "result": result, "test": test},
            **{"seconds": round(time.monotonic() - began, 1), "budget": budget, "key": key},
            date=f"{datetime.now(UTC):%Y-%m-%d}",
        )

    def _kills(self, copy: Copy, mutant: Mutant, item: str) -> bool:
        copy.plant(mutant)
        outcome = copy.pytest(["-x", "-v", item], HEALTHY_SECONDS)
        copy.restore(mutant)
        died = outcome.code is not None and outcome.code < 0
        return (outcome.code == 1 or died) and self._passes(copy, item)

    def _result(self, copy: Copy, mutant: Mutant, tests: Items, budget: float) -> tuple[str, str]:
        without: set[str] = set()
        for _ in range(MOST_RUNS):
            items = tests.choose(mutant, budget, without | self.unhealthy)
            if not items:
                covered = tests.choose(mutant, float("inf"))
                return (SURVIVED if covered else UNCOVERED), ""
            seconds = [tests.coverage.seconds.get(item, 1.0) for item in items]
            limit = START_SECONDS + 4 * sum(seconds)
            stall = START_SECONDS + PATIENCE * max(seconds)
            copy.plant(mutant)
            outcome = copy.pytest(["-x", "-v", *items], limit, stall)
            if outcome.code in (0, 5):
                return SURVIVED, ""
            uncollected, item = set(outcome.uncollected()), outcome.failed(items)
            if (uncollected or not item) and not _imports(copy, mutant):
                return INVALID, ""
            copy.restore(mutant)
            if uncollected:
                # A file that no longer collects is a kill: without the mutant it did.
                files = sorted(name for name in uncollected if "::" not in name)
                if files:
                    return KILLED, files[0]
                without |= uncollected
                continue
            if not item:
                return SURVIVED, ""  # no test has begun, so none has seen it
            without.add(item)
            if outcome.code is None and self._passes(copy, item, stall):
                return TIMEOUT, item
            if outcome.code is not None and self._passes(copy, item):
                return KILLED, item
        return SURVIVED, ""


def _imports(copy: Copy, mutant: Mutant) -> bool:
    module = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return copy.python(["-c", f"import {module}"], limit=120).code == 0


def drawn_mutants(root: Path, records: Mapping[str, Record], new: int = 0) -> list[Mutant]:
    """What has a result and still exists, filled up by the draw of each room, and `new` more."""
    mutants: list[Mutant] = []
    for index, room in enumerate(ROOMS):
        of_room = candidates(root, room)
        invalid = {mutant.id for mutant in of_room if _is(records, mutant.id, INVALID)}
        recorded = [
            mutant for mutant in of_room if mutant.id in records and mutant.id not in invalid
        ]
        extra = new // len(ROOMS) + (index < new % len(ROOMS))
        number = max(NUMBER, len(recorded)) + extra
        mutants += draw(of_room, number, invalid, root, recorded=recorded)
    return mutants


def _is(records: Mapping[str, Record], mutant_id: str, result: str) -> bool:
    return mutant_id in records and records[mutant_id].result == result


def find(root: Path, mutant_id: str) -> Mutant:
    """The mutant with this id, drawn or not."""
    for room in ROOMS:
        for mutant in candidates(root, room):
            if mutant.id == mutant_id:
                return mutant
    raise SystemExit(f"no mutant {mutant_id}: its function has changed, or list prints the ids")


def run(options: argparse.Namespace) -> None:
    """Judge the mutants that have no valid result, and write each result at once."""
    began = time.monotonic()
    coverage = read(MAP)
    records = read_records(options.output) or read_records()
    mutants = drawn_mutants(ROOT, records, options.new)
    exist = {mutant.id for mutant in mutants}
    records = {name: record for name, record in records.items() if name in exist}
    turns = waiting(mutants, records, Items(ROOT, coverage), options)
    print(f"{len(mutants)} mutants, {len(turns)} to judge", flush=True)
    lock = threading.Lock()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder,
        contextlib.suppress(OutOfTime),
    ):
        left_s = options.seconds - (time.monotonic() - began)
        judge = Judge(ROOT, Path(folder), options.workers, left_s)
        items = Items(ROOT, coverage, judge.collect(needed_files(coverage, turns, options.budget)))
        print(f"{len(items.cases)} items, {time.monotonic() - began:.0f} s until here", flush=True)

        def write_result(mutant: Mutant) -> None:
            with contextlib.suppress(OutOfTime):  # the next run judges it
                former = records.get(mutant.id)
                killer = former.test if former is not None and former.result == KILLED else ""
                record = judge.judge(mutant, items, options.budget, killer)
                with lock:
                    records[record.id] = record
                    write_records(records.values(), options.output)
                    print(line(record), flush=True)

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(write_result, turns))
        if judge.unhealthy:
            print("fail without a mutant: " + " ".join(sorted(judge.unhealthy)))
    write_records(records.values(), options.output)
    print("\n".join(scores(records.values(), read_reasons())))


def waiting(
    mutants: Iterable[Mutant],
    records: Mapping[str, Record],
    items: Items,
    options: argparse.Namespace,
) -> list[Mutant]:
    """Mutants without a valid result, in the order of a hash: a run that ends early has judged as
    large a part of each room. Named ones have no valid result."""
    if options.ids:
        return [mutant for mutant in mutants if mutant.id in options.ids]
    turns = [
        mutant
        for mutant in mutants
        if options.room in (None, mutant.room)
        and (
            mutant.id not in records
            or not items.is_valid(records[mutant.id], mutant, options.budget)
        )
    ]
    turns.sort(key=lambda mutant: short_hash("turn", mutant.id))
    return turns if options.all else turns[: options.most]


def needed_files(coverage: CoverageMap, mutants: Iterable[Mutant], budget: float) -> list[str]:
    """Files of tests that these mutants may need."""
    items = Items(ROOT, coverage, coverage.names)
    files: set[str] = set()
    for mutant in mutants:
        files |= {name.partition("::")[0] for name in items.choose(mutant, budget)}
        files |= items.new_files(mutant)
    return sorted(files)


def files_of_tests(root: Path, coverage: CoverageMap) -> list[str]:
    """Files of tests, recorded or new, without those of browsers, of GPUs and of this module."""
    paths = {name.partition("::")[0] for name in coverage.names}
    paths |= {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}
    paths = {path for path in paths if not path.startswith(LEFT_OUT_TESTS)}
    return sorted(path for path in paths if (root / path).exists())


def line(record: Record) -> str:
    judged = f"{record.result:<9} {record.seconds:6.1f} s {record.test}"
    edit = f"{record.before}\n    → {record.after}"
    return f"{record.id} {record.path}:{record.function} [{record.kind}] {judged}\n    {edit}"


Reasons = dict[str, dict[str, str]]


def read_reasons(path: Path = REASONS) -> Reasons:
    """Sentences by id: of mutants that compute the same, and of others that no test should see."""
    reasons = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    return {part: dict(reasons.get(part, {})) for part in (EQUIVALENT, "accepted")}


def result_of(record: Record, reasons: Reasons) -> str:
    is_equivalent = record.result == SURVIVED and record.id in reasons[EQUIVALENT]
    return EQUIVALENT if is_equivalent else record.result


def score(records: Iterable[Record], reasons: Reasons) -> float:
    """The share of mutants that tests see, of those that compute something else."""
    results = [result_of(record, reasons) for record in records]
    num_seen = sum(result in SEEN for result in results)
    return num_seen / max(1, sum(result not in (EQUIVALENT, INVALID) for result in results))


def scores(records: Iterable[Record], reasons: Reasons) -> Iterator[str]:
    """A table of rooms."""
    of_room: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        of_room[record.room].append(record)
    columns = (KILLED, TIMEOUT, SURVIVED, UNCOVERED, EQUIVALENT)
    yield f"| room | mutants | {' | '.join(columns)} | score |"
    yield f"|---|{'---|' * (len(columns) + 2)}"
    everything = [record for room in ROOMS for record in of_room[room]]
    for name, judged in [*((room, of_room[room]) for room in ROOMS), ("all", everything)]:
        results = [result_of(record, reasons) for record in judged]
        numbers = [results.count(column) for column in columns]
        number = len(results) - results.count(INVALID)
        share = f"{score(judged, reasons):.1%}" if number else "–"
        yield f"| {name} | {number} | {' | '.join(map(str, numbers))} | {share} |"


def section(records: Iterable[Record], reasons: Reasons) -> str:
    """The part of the page that says what the last runs showed."""
    ordered = sorted(records, key=lambda record: record.order)
    last = max((record.date for record in ordered), default="")
    lines = [f"Results until {last}:", "", *scores(ordered, reasons), ""]
    missed = [record for record in ordered if record.result in (SURVIVED, UNCOVERED)]
    if missed:
        lines += ["| not seen | function | kind | edit | why |", "|---|---|---|---|---|"]
    for record in missed:
        why = reasons[EQUIVALENT].get(record.id, reasons["accepted"].get(record.id, ""))
        edit = " → ".join(f"`{_cell(text)}`" for text in _difference(record.before, record.after))
        function = f"`{record.path.removeprefix('fivefold/')}:{record.function}`"
        lines.append(
            f"| `{record.id}` {result_of(record, reasons)} | {function} | {record.kind} | {edit} "
            f"| {why} |"
        )
    return "\n".join(lines) + "\n"


def _difference(before: str, after: str, most: int = 70) -> tuple[str, str]:
    """Two lines, cut to what differs and a little around it."""
    if max(len(before), len(after)) <= most:
        return before, after
    pairs = enumerate(zip(before, after, strict=False))
    common = next((index for index, pair in pairs if pair[0] != pair[1]), len(before))
    start = max(0, min(common - most // 3, len(before) - most))
    cut = [
        text[start : start + most] + "…" * (len(text) > start + most) for text in (before, after)
    ]
    return (("…" if start else "") + cut[0]), (("…" if start else "") + cut[1])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


def with_section(page: str, text: str) -> str:
    head, _, tail = page.partition(BEGIN)
    return head + BEGIN + text + END + tail.partition(END)[2]


def merge(path: Path, root: Path = ROOT) -> None:
    """Take over results; what a test has killed here stays killed."""
    records, coverage = read_records(), read(MAP)
    tests = Items(root, coverage)
    mutants = {mutant.id: mutant for room in ROOMS for mutant in candidates(root, room)}
    for record in read_records(path).values():
        known = records.get(record.id)
        mutant = mutants.get(record.id)
        stays = known is not None and known.result in SEEN and mutant is not None
        if mutant is not None and not (stays and known and tests.is_valid(known, mutant)):
            records[record.id] = record
    write_records([record for record in records.values() if record.id in mutants], RESULTS)
    print("\n".join(scores(records.values(), read_reasons())))


def show(mutant: Mutant, root: Path = ROOT) -> None:
    old = (root / mutant.path).read_bytes()
    texts = [content.decode().splitlines() for content in (old, mutant.apply(old))]
    print("\n".join(difflib.unified_diff(*texts, mutant.path, mutant.kind, lineterm="", n=3)))
    coverage = read(MAP)
    print("\n".join(Items(root, coverage, coverage.names).choose(mutant, budget=60)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    commands = parser.add_subparsers(dest="command", required=True)
    judged = commands.add_parser("run")
    judged.add_argument("ids", nargs="*", help="judge these, again")
    judged.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    judged.add_argument("--budget", type=float, default=60.0, help="seconds of tests, by the map")
    judged.add_argument("--most", type=int, default=40, help="mutants that are judged")
    judged.add_argument("--all", action="store_true", help="judge all that have no valid result")
    judged.add_argument("--new", type=int, default=0, help="draw so many more")
    judged.add_argument("--seconds", type=float, default=1e9, help="limit of the run")
    judged.add_argument("--room", choices=ROOMS)
    judged.add_argument("--output", type=Path, default=RESULTS)
    commands.add_parser("list")
    commands.add_parser("page")
    for name in ("show", "apply"):
        commands.add_parser(name).add_argument("id")
    commands.add_parser("merge").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    elif options.command == "list":
        records = read_records()
        for mutant in drawn_mutants(ROOT, records):
            record = records.get(mutant.id)
            name = f"{mutant.path}:{mutant.line} {mutant.function} [{mutant.kind}]"
            print(mutant.id, result_of(record, read_reasons()) if record else "–", name)
    elif options.command == "page":
        text = section(read_records().values(), read_reasons())
        PAGE.write_text(with_section(PAGE.read_text("utf-8"), text), "utf-8")
    elif options.command == "merge":
        merge(options.file)
    else:
        mutant = find(ROOT, options.id)
        if options.command == "show":
            show(mutant)
        else:
            path = ROOT / mutant.path
            path.write_bytes(mutant.apply(path.read_bytes()))


if __name__ == "__main__":
    main()
