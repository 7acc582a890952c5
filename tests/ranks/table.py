"""The table that a full run prints: a line for each case as it ends, then how many passed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from typing import Generic, TypeVar

from fivefold.launch.processes import Pool
from fivefold.verify.trial import VerifyVerdict

Case = TypeVar("Case")

_ERRORS = {
    "loss": "loss_err",
    "gradients": "grad_err",
    "norm": "norm_err",
    "weights": "weight_err",
}


@dataclass(frozen=True)
class Table(Generic[Case]):
    """What a table says about itself, and how a case is run and named in it."""

    head: str  # {date} is the day of the run
    columns: tuple[str, ...]  # of `cells`; those of the verdict follow
    noun: str
    most_ranks: int
    prove: Callable[[Pool, Case], VerifyVerdict]
    cells: Callable[[Case], Iterable[object]]
    foot: str = ""

    def run(self, cases: Iterable[Case]) -> int:
        """Prove every case on one pool and print the table; the exit code."""
        began = time.perf_counter()
        print(self.head.format(date=date.today()))
        columns = [*self.columns, *_ERRORS, "traffic", "seconds", ""]
        print(_line(columns))
        print("|" + "---|" * len(columns))
        verdicts: list[VerifyVerdict] = []
        with Pool(self.most_ranks + 1) as pool:
            for case in cases:
                start = time.perf_counter()
                verdicts.append(self.prove(pool, case))
                seconds = time.perf_counter() - start
                said = _cells_of(verdicts[-1], seconds)
                print(_line([*self.cells(case), *said]), flush=True)
        passed = sum(verdict.passed for verdict in verdicts)
        print(f"\n{passed} of {len(verdicts)} {self.noun} pass")
        if self.foot:
            print(f"\n{self.foot}")
        print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
        return 0 if passed == len(verdicts) else 1


def _cells_of(verdict: VerifyVerdict, seconds: float) -> list[str]:
    errors = [f"{verdict.errors[name]:.0e}" for name in _ERRORS.values()]
    match = "equal" if verdict.traffic_match else "differs"
    result = "pass" if verdict.passed else f"FAIL at {verdict.diverges_at}"
    return [*errors, match, f"{seconds:.1f}", result]


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
