"""Everything that can be checked here, and one table of what passed.

    python -m tests.nightly

runs all tests with all cases and clocks, every table of `make verify-all`, the page in a browser
where there is one, and ten kills of one run. The tables go to a folder of their own; each must have
as many cases as the one in docs. Parts that look at the clock or kill run alone, the others as many
at a time as there are cores. It takes about three hours on two cores, and half an hour on sixteen:
with all cases the tests are 150 core-minutes, the tables 100. It ends with exit code 1 if anything
failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.selection import ALL_CASES, ROOT, SALT, salt, seed

MOST_SECONDS = 4 * 3600  # of one part, which is then taken to hang
CORES = len(os.sched_getaffinity(0))
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
NUM_LINES = 25  # of the output of a part that failed


@dataclass(frozen=True)
class Part:
    """One command. A `table` is what it prints, as a file of docs."""

    name: str
    words: tuple[str, ...]
    noun: str
    table: str | None = None


@dataclass(frozen=True)
class Outcome:
    """A line of the table."""

    part: Part
    seconds: float
    count: int
    result: str  # "passed", "left out", or what is wrong

    @property
    def good(self) -> bool:
        return self.result in ("passed", "left out")


def table(name: str, module: str) -> Part:
    return Part(name, ("-m", f"tests.ranks.{module}"), "cases", f"verified-{name}.md")


TOGETHER = (
    table("training", "invariance"),  # the longest first, so that nothing waits for it in the end
    table("widths", "real_widths"),
    table("compiled", "compiled"),
    table("combinations", "covering"),
    table("choices", "first_choices"),
    table("recompute", "recomputed"),
    table("fp8", "fp8_layouts"),
    table("tuning", "tuned_layouts"),
    table("generation", "generations"),
    table("contexts", "contexts"),
    table("pipelines", "pipelines"),
    table("layouts", "sweep"),
    # Random faults: other scripts with every salt.
    Part(
        "control",
        ("-m", "tests.control_scripts", "--scripts=2000", f"--seed={seed() % 10**9}"),
        "scripts",
    ),
    Part("types", ("-m", "pyright"), "errors"),
)
ALONE = (
    Part(
        "tests", (*PYTEST, "-n", str(CORES), "--dist", "loadfile", "--ignore=tests/page"), "tests"
    ),
    Part("page", (*PYTEST, "-rs", "tests/page"), "tests"),
    Part("chaos", ("benchmarks/chaos.py",), "kills"),
)


PARTS = (*ALONE, *TOGETHER)


def run(part: Part, folder: Path) -> Outcome:
    """Run one part; its output goes to files in the folder."""
    out, err = folder / (part.table or f"{part.name}.log"), folder / f"{part.name}.err"
    environment = {**os.environ, ALL_CASES: "1", SALT: salt()}
    began = time.monotonic()
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *part.words], cwd=ROOT, stdout=stdout, stderr=stderr, env=environment
        )
        try:
            code = process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    printed = out.read_text("utf-8")
    outcome = Outcome(part, time.monotonic() - began, *judge(part, code, printed))
    print(line(outcome), flush=True)
    if not outcome.good:
        print("\n".join([*printed.splitlines()[-NUM_LINES:], *err.read_text().splitlines()[-5:]]))
    return outcome


def judge(part: Part, code: int, printed: str) -> tuple[int, str]:
    """How many tests or cases there were, and the result."""
    count = counted(part, printed)
    if code not in (0, 5):  # 5: pytest found no test
        return count, f"FAILED with exit code {code}"
    if part.table is not None:
        wanted = counted(part, (ROOT / "docs" / part.table).read_text("utf-8"))
        if count != wanted:
            return count, f"FAILED: docs/{part.table} has {wanted} cases, run make verify-all"
    if part.noun != "errors" and count == 0:
        return count, "left out" if re.search(r"\d+ skipped", printed) else "FAILED: nothing ran"
    return count, "passed"


def counted(part: Part, text: str) -> int:
    """Cases that pass in a table, or what the last lines of a part count."""
    if part.table is not None:
        return len(re.findall(r"^\|.*\| pass \|$", text, re.M))
    found = re.findall(r"(\d+) (?:passed|kills|errors)", text)
    return int(found[-1]) if found else 0


def line(outcome: Outcome) -> str:
    count = f"{outcome.count:,} {outcome.part.noun}"
    return f"| {outcome.part.name:<12} | {count:>12} | {outcome.seconds:>7.0f} | {outcome.result} |"


def show(outcomes: Iterable[Outcome], seconds: float) -> None:
    """The table."""
    print(f"\n| {'part':<12} | {'run':>12} | {'seconds':>7} | result |")
    print(f"|{'-' * 14}|{'-' * 13}:|{'-' * 8}:|---|")
    for outcome in outcomes:
        print(line(outcome))
    print(f"\n{seconds / 60:.0f} minutes, {SALT}={salt()}")


def main(names: Sequence[str] = ()) -> int:
    """Run all parts, or those that are named."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="fivefold-nightly-"))
    print(f"output: {folder}", flush=True)
    alone, together = (
        [part for part in parts if not names or part.name in names] for parts in (ALONE, TOGETHER)
    )
    outcomes = [run(part, folder) for part in alone]
    with ThreadPoolExecutor(CORES) as workers:
        outcomes += workers.map(lambda part: run(part, folder), together)
    show(outcomes, time.monotonic() - began)
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
