"""The map from functions to the test items that run them.

    python -m tests.coverage_map merge FOLDER_OR_MAP... [-o MAP] [--base COMMIT]

makes it of the folders that `tests.coverage_recorder` wrote, or of maps of several runs; `record`
runs all tests first, as `make test-map` does.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.coverage_trace import FOLDER
from tests.selection import ALL_CASES

ROOT = Path(__file__).resolve().parent.parent
MAP = ROOT / "tests" / "data" / "coverage_map.json.xz"
BASE = "FIVEFOLD_COVERAGE_BASE"
LEAST_SHARED = 0.1  # seconds of a fixture or cache below which nobody asks who shares it
LEAST_RECORDED = 0.005  # seconds of an item; the file has hundredths
Runs = list[int]


@dataclass(frozen=True)
class CoverageMap:
    """What a run of all tests recorded. Sets of items are runs of their numbers: see `runs_of`."""

    base: str
    names: list[str]  # of the items, in their order
    seconds: dict[str, float]  # of an item, without what it shares with others
    failed: Runs
    shared: dict[str, float]  # seconds of fixtures and caches
    uses: dict[str, Runs]  # the items that use one of them
    functions: dict[str, Runs]  # the items that run a function

    def items(self, runs: Runs) -> Iterator[str]:
        return (self.names[number] for number in numbers_of(runs))


@dataclass
class Recording:
    """What will be a map."""

    base: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    shared: dict[str, float] = field(default_factory=dict)
    uses: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def update(self, other: CoverageMap) -> None:
        """Add another run: of an item that both ran, the seconds of the other count."""
        self.base = other.base or self.base
        self.failed = {*(self.failed - other.seconds.keys()), *other.items(other.failed)}
        self.seconds.update(other.seconds)
        self.shared.update(other.shared)
        for name, runs in other.uses.items():
            self.uses[name].update(other.items(runs))
        for name, runs in other.functions.items():
            self.functions[name].update(other.items(runs))

    def map(self) -> CoverageMap:
        names = sorted({*self.seconds, *(n for items in self.functions.values() for n in items)})
        index = {name: number for number, name in enumerate(names)}

        def runs(items: Iterable[str]) -> Runs:
            return runs_of(index[item] for item in items if item in index)

        return CoverageMap(
            self.base,
            names,
            self.seconds,
            runs(self.failed),
            dict(sorted(self.shared.items())),
            {name: runs(items) for name, items in sorted(self.uses.items())},
            {name: runs(items) for name, items in sorted(self.functions.items())},
        )


def runs_of(numbers: Iterable[int]) -> Runs:
    """Numbers as gap, length, gap, length: cases of a test follow each other."""
    runs: Runs = []
    end = 0
    for number in sorted(numbers):
        if runs and number == end:
            runs[-1] += 1
        else:
            runs += [number - end, 1]
        end = number + 1
    return runs


def numbers_of(runs: Runs) -> Iterator[int]:
    end = 0
    for gap, length in zip(runs[::2], runs[1::2], strict=True):
        yield from range(end + gap, end + gap + length)
        end += gap + length


def write(coverage: CoverageMap, path: Path) -> None:
    tests: list[list[str]] = []  # a test, then its cases without its name
    for name in coverage.names:
        test, bracket, case = name.partition("[")
        if not tests or tests[-1][0] != test:
            tests.append([test])
        tests[-1].append(bracket + case)
    seconds = [round(coverage.seconds.get(name, -1.0), 2) for name in coverage.names]
    value = {
        "base": coverage.base,
        "tests": tests,
        "seconds": seconds,
        "failed": coverage.failed,
        "shared": {name: round(long, 1) for name, long in coverage.shared.items()},
        "uses": coverage.uses,
        "functions": coverage.functions,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> CoverageMap:
    value = json.loads(lzma.decompress(path.read_bytes()))
    names = [test + case for test, *cases in value["tests"] for case in cases]
    recorded = zip(names, value["seconds"], strict=True)
    seconds = {name: max(long, LEAST_RECORDED) for name, long in recorded if long >= 0}
    parts = (value[key] for key in ("failed", "shared", "uses", "functions"))
    return CoverageMap(value["base"], names, seconds, *parts)


def collect(folder: Path, base: str) -> CoverageMap:
    """The map of one recorded run, also of one that was stopped."""
    names: dict[str, str] = {}
    took: dict[str, float] = {}
    ran: dict[str, set[str]] = defaultdict(set)
    uses: dict[str, set[str]] = defaultdict(set)
    failed: set[str] = set()
    for path in sorted(folder.glob("*.txt")):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            kind, *fields = map(sys.intern, line.split(" ", 2))
            if kind == "name" and len(fields) == 2:
                names[fields[0]] = fields[1]
            elif kind == "took" and len(fields) == 2:
                took[fields[0]] = float(fields[1])
            elif kind in ("ran", "uses") and len(fields) == 2:
                (ran if kind == "ran" else uses)[fields[0]].add(fields[1])
            elif kind == "failed" and fields:
                failed.add(fields[0])
    recording = Recording(base)
    for short, name in names.items():
        kind, _, item = name.partition(" ")
        if kind == "item" and short in took:
            recording.seconds[item] = took[short]
            if short in failed:
                recording.failed.add(item)
            contexts = reached(short, uses)
            for function in {digest for context in contexts for digest in ran.get(context, ())}:
                if function in names:
                    recording.functions[names[function]].add(item)
            for context in contexts - {short}:
                shares = not names.get(context, "module").startswith("module")
                if shares and took.get(context, 0.0) >= LEAST_SHARED:
                    recording.uses[names[context]].add(item)
                    recording.shared[names[context]] = took[context]
    return recording.map()


def reached(first: str, uses: dict[str, set[str]]) -> set[str]:
    """A context and all that it uses."""
    seen, left = {first}, [first]
    while left:
        new = uses.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def record(folder: Path, tests: Sequence[str]) -> None:
    """Run all cases under the recorder, as if there were no GPU; what fails is recorded too."""
    command = ["-q", "-p", "no:cacheprovider", "-p", "tests.coverage_recorder", "--dist=loadfile"]
    command += ["-n", str(os.cpu_count()), *(tests or ["--ignore=tests/page", "tests"])]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, FOLDER: str(folder), ALL_CASES: "1", "PYTHONPATH": paths}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    subprocess.run([sys.executable, "-m", "pytest", *command], cwd=ROOT, env=environment)


def head() -> str:
    """The commit of the working tree; nothing where there is no git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def merge(sources: Sequence[Path], base: str, output: Path) -> None:
    recording = Recording()
    for source in sources:
        recording.update(collect(source, base) if source.is_dir() else read(source))
    recording.base = base or recording.base
    write(recording.map(), output)
    print(
        f"{output}: {output.stat().st_size:,} bytes, {len(recording.functions):,} functions, "
        f"{len(recording.seconds):,} items, {sum(recording.seconds.values()):,.0f} s, "
        f"{len(recording.failed)} failed, base {recording.base or 'unknown'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.coverage_map")
    parser.add_argument("command", choices=["merge", "record"])
    parser.add_argument("sources", nargs="*", help="what to merge; or files of tests")
    parser.add_argument("-o", "--output", type=Path, default=MAP)
    parser.add_argument("--base", default=os.environ.get(BASE) or head())
    options = parser.parse_args()
    if options.command == "merge":
        merge([Path(source) for source in options.sources], options.base, options.output)
        return
    with tempfile.TemporaryDirectory(prefix="fivefold-coverage-") as folder:
        record(Path(folder), options.sources)
        merge([Path(folder)], options.base, options.output)


if __name__ == "__main__":
    main()
