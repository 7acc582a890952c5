"""The map from functions to the test items that run them.

    python -m tests.coverage_map merge FOLDER_OR_FILE... [-o FILE] [--base COMMIT]

makes it of the folders that `tests.coverage_recorder` wrote, or of maps of several runs.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAP = ROOT / "tests" / "data" / "coverage_map.json.xz"
BASE = "FIVEFOLD_COVERAGE_BASE"


@dataclass
class CoverageMap:
    """What a run of all tests recorded. Items and functions are in the order of their names."""

    base: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # of an item
    failed: set[str] = field(default_factory=set)
    shared: dict[str, float] = field(default_factory=dict)  # seconds of fixtures and caches
    uses: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # shared, of items
    items: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # of a function

    def update(self, other: CoverageMap) -> None:
        """Add another run: of an item that both ran, the seconds of the other count."""
        self.base = other.base or self.base
        self.failed = {*(self.failed - other.seconds.keys()), *other.failed}
        self.seconds.update(other.seconds)
        self.shared.update(other.shared)
        for name, items in other.uses.items():
            self.uses[name] |= items
        for name, items in other.items.items():
            self.items[name] |= items


def runs_of(numbers: Iterable[int]) -> list[int]:
    """Sorted numbers as gap, length, gap, length: cases of a test follow each other."""
    pairs: list[int] = []
    end = 0
    for number in sorted(numbers):
        if pairs and number == end:
            pairs[-1] += 1
        else:
            pairs += [number - end, 1]
        end = number + 1
    return pairs


def numbers_of(pairs: Sequence[int]) -> Iterable[int]:
    end = 0
    for gap, length in zip(pairs[::2], pairs[1::2], strict=True):
        yield from range(end + gap, end + gap + length)
        end += gap + length


def write(coverage: CoverageMap, path: Path) -> None:
    names = sorted({*coverage.seconds, *(n for items in coverage.items.values() for n in items)})
    index = {name: number for number, name in enumerate(names)}
    tests: list[list[object]] = []  # names of cases without their test, which comes once
    for name in names:
        test, bracket, case = name.partition("[")
        if not tests or tests[-1][0] != test:
            tests.append([test])
        tests[-1].append(bracket + case)
    value = {
        "base": coverage.base,
        "tests": tests,
        "seconds": [round(coverage.seconds.get(name, -1.0), 2) for name in names],
        "failed": runs_of(index[name] for name in coverage.failed),
        "shared": {name: round(seconds, 1) for name, seconds in sorted(coverage.shared.items())},
        "uses": {
            name: runs_of(index[item] for item in items)
            for name, items in sorted(coverage.uses.items())
            if items
        },
        "functions": {
            name: runs_of(index[item] for item in items)
            for name, items in sorted(coverage.items.items())
            if items
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> CoverageMap:
    value = json.loads(lzma.decompress(path.read_bytes()))
    names = [test + case for test, *cases in value["tests"] for case in cases]
    coverage = CoverageMap(value["base"], shared=value["shared"])
    coverage.seconds = {
        name: seconds for name, seconds in zip(names, value["seconds"], strict=True) if seconds >= 0
    }
    coverage.failed = {names[number] for number in numbers_of(value["failed"])}
    for key, target in (("uses", coverage.uses), ("functions", coverage.items)):
        for name, pairs in value[key].items():
            target[name] = {names[number] for number in numbers_of(pairs)}
    return coverage


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
            elif kind == "failed":
                failed.add(fields[0])
    coverage = CoverageMap(base)
    for short, name in names.items():
        kind, _, plain = name.partition(" ")
        if kind == "item":
            within = reached(short, uses)
            for context in within:
                for function in ran.get(context, ()):
                    if function in names:
                        coverage.items[names[function]].add(plain)
            if short in took:
                coverage.seconds[plain] = took[short]
            if short in failed:
                coverage.failed.add(plain)
            for context in within - {short}:
                if took.get(context, 0.0) >= 0.1 and not names[context].startswith("module "):
                    coverage.uses[names[context]].add(plain)
                    coverage.shared[names[context]] = took[context]
    return coverage


def reached(first: str, uses: dict[str, set[str]]) -> set[str]:
    """A context and all that it uses."""
    seen, left = {first}, [first]
    while left:
        new = uses.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def head() -> str:
    """The commit of the working tree; nothing where there is no git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.coverage_map")
    parser.add_argument("command", choices=["merge"])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=MAP)
    parser.add_argument("--base", default=os.environ.get(BASE) or head())
    options = parser.parse_args(words)
    coverage = CoverageMap()
    for source in options.sources:
        coverage.update(collect(source, options.base) if source.is_dir() else read(source))
    coverage.base = options.base or coverage.base
    write(coverage, options.output)
    print(
        f"{options.output}: {options.output.stat().st_size:,} bytes, {len(coverage.items):,} "
        f"functions, {len(coverage.seconds):,} items, {sum(coverage.seconds.values()):,.0f} s, "
        f"{len(coverage.failed)} failed, base {coverage.base or 'unknown'}"
    )


if __name__ == "__main__":
    main()
