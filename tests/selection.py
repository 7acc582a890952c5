"""What a test run takes of the long lists, and what only `make nightly` runs.

`make test` takes a few cases of each list. They are drawn by a salt that changes with the commit,
so that all cases run over time; the head of the report prints it, and FIVEFOLD_SALT repeats a draw.
What a change touches runs on top of that: see `tests/related.py`.
FIVEFOLD_ALL_CASES=1, which `make nightly` sets, takes all cases, runs the tests that are marked
`nightly`, and looks at the clock.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

Case = TypeVar("Case")
SALT, ALL_CASES = "FIVEFOLD_SALT", "FIVEFOLD_ALL_CASES"
ROOT = Path(__file__).parent.parent


def all_cases() -> bool:
    """Whether everything runs, as in `make nightly`."""
    return bool(os.environ.get(ALL_CASES))


@cache
def salt() -> str:
    """FIVEFOLD_SALT; else the commit; a fixed word where there is no git."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    if said := os.environ.get(SALT):
        return said
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "fivefold"
    return done.stdout.strip()


def _salted(name: object) -> bytes:
    return hashlib.blake2b(f"{salt()}: {name}".encode(), digest_size=8).digest()


def seed() -> int:
    """What random examples are drawn by."""
    return int.from_bytes(_salted("examples"))


def shuffled(cases: Iterable[Case]) -> list[Case]:
    """The cases in the order of this salt."""
    return sorted(cases, key=_salted)


def salted_share(name: str) -> float:
    """A number from 0 to 1 that each salt draws anew."""
    return int.from_bytes(_salted(name)) / 2**64


def drawn(name: str, share: float) -> bool:
    """Whether this salt is one of the share that runs what has this name, or everything runs."""
    return all_cases() or salted_share(name) < share


def num_drawn(name: str, number: float) -> int:
    """How many cases of the test with this name run: 1.5 is one on every commit, and another on
    half of them."""
    whole = int(number)
    return whole + drawn(name, number - whole)


@contextmanager
def within(seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Fail where something takes longer, in `make nightly` only: other work slows `make test`."""
    began = clock()
    yield
    took = clock() - began
    assert took < seconds or not all_cases(), f"took {took:.1f} s, more than {seconds} s"
