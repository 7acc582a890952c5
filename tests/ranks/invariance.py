"""Forty steps of one training in many layouts, and in one run that changes its layout on the way.

    python -m tests.ranks.invariance

runs all of them and prints a table in markdown; the tests run a part, with fewer layers and steps.
Every layout takes the same sequences in the same microbatches, so that one process, run once for
each rule of balance and precision, is the truth of all of them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.core.precision import Dtype
from fivefold.launch.processes import Pool
from fivefold.records.run_writer import METRICS, RunFolder, read_records
from fivefold.train.build import source_of
from fivefold.train.check import Check, RankArguments, check_runs, judge, reference_runs
from fivefold.train.loop import run_rank
from fivefold.train.options import RunOptions
from fivefold.train.state import TrainedRank, TrainSettings

HEAD = """# Verified training

Losses of {steps} steps of `tiny-moe` with {layers} layers in every layout below, beside those of
one process that reads the same text: {rows} packed sequences of {seq} tokens a step in microbatches
of {size}, AdamW, lr 1e-3. In float64 they may differ by 1e-9 nats. The spread is the difference of
two runs of one process that add the terms of every sum in different orders; in float32 layouts may
differ by three times as much, and by 2e-6 where that is more. A flip is a token that a
layer sends to other experts than one process does, of {routed:,} tokens times layers: a tie, which
rounding decides. Where losses differ by more for it, one process runs again with the experts of
the ranks, and the difference is that to its losses; the scores of these experts must be as near to
those of its own. Made by `make verify-all` on {date}.
"""
COLUMNS = (
    "layout", "ranks", "ZeRO", "schedule", "context", "balance", "recompute", "dtype",
    "largest difference", "spread", "allowed", "flips", "seconds", "",
)  # fmt: skip
CHANGING = """
## A run that changes its layout

One run folder. Every line resumes it from the checkpoint that the line before has left, and is held
against those steps of one process that was never interrupted.
"""
NOTE = """
`capacity:C`, which drops the least probable tokens, is not in the table. Rows of this text often
begin with the same byte several times, such as spaces, and these tokens have equal scores: which of
them is dropped is decided by rounding, in one process as in many. `capacity-position:C` has an
answer there.
"""
ROWS, MICROBATCH_SIZE, SEQ = 16, 2, 32
STEPS, LAYERS = 40, 4
MOST_RANKS = 16
_PATIENCE = 120.0  # seconds: many ranks share few cores
DTYPES: tuple[Dtype, ...] = ("float64", "float32")


@dataclass(frozen=True)
class Case:
    """One layout to train in."""

    layout: str
    zero: int | None = None
    schedule: str = "1f1b"
    context: str = "zigzag"
    balance: str = "none"
    recompute: str = "none"
    sp: bool = True

    def __str__(self) -> str:
        usual = Case(self.layout)
        said = {name: getattr(self, name) for name in self.__dataclass_fields__}
        words = [f"{name}={one}" for name, one in said.items() if one != getattr(usual, name)]
        return " ".join([self.layout, *words])

    def plan(self, layers: int) -> Plan:
        """The same model and the same text for every case of one balance."""
        options = PlanOptions(
            "tiny-moe",
            layout=self.layout,
            zero=self.zero,
            schedule=self.schedule,
            context=self.context,
            balance=self.balance,
            recompute=self.recompute,
            sp=self.sp,
            seq=SEQ,
            batch=ROWS,
            microbatch_size=MICROBATCH_SIZE,
            packed=True,
            set={"layers": str(layers)} | ({"moe.bias": "true"} if self.balance == "bias" else {}),
        )
        return resolve(options)


CASES = (
    Case("dp=2"),
    Case("dp=8", zero=2),
    Case("dp=2x2 ep=2", zero=3, balance="aux+z"),
    Case("tp=2", balance="bias"),
    Case("tp=2 cp=2", context="ring", sp=False),
    Case("cp=4 ep=4", context="allgather", balance="aux+z"),
    Case("pp=2", schedule="dualpipe", balance="bias"),
    Case("pp=4", schedule="zb-h1", recompute="full"),
    Case("dp=2 pp=2 ep=2", schedule="interleaved", zero=1),
    Case("tp=2 pp=2 cp=2", schedule="dualpipe-v", context="ulysses"),
    Case("dp=2 tp=2 ep=2 etp=2", zero=0, balance="capacity-position:1.25"),
    Case("dp=2 cp=2 ep=4", zero=1, context="hybrid", balance="bias"),
    Case("dp=2 tp=2 pp=2 cp=2 ep=2", zero=1, schedule="zb-h1", balance="aux+z"),
    Case("dp=4 tp=2 pp=2 ep=8", zero=1, schedule="zb-v", recompute="selective"),
    Case("dp=2 pp=4 cp=2 ep=4", zero=3, schedule="1f1b", balance="capacity-position:1.25"),
)
LEGS = (
    Case("dp=8"),
    Case("tp=2 pp=2 cp=2", schedule="zb-h1"),
    Case("dp=2 pp=2 ep=2", schedule="interleaved"),
    Case("dp=1"),
)


@dataclass
class Trainings:
    """Trains cases on a pool, and keeps what one process has shown for each balance and dtype."""

    pool: Pool
    steps: int = STEPS
    layers: int = LAYERS
    known: dict[tuple[str, Dtype], list[TrainedRank]] = field(
        default_factory=dict[tuple[str, Dtype], list[TrainedRank]]
    )

    def settings(self, dtype: Dtype) -> TrainSettings:
        return TrainSettings(Recipe(steps=self.steps), dtype, options=RunOptions(check=True))

    def references(self, balance: str, dtype: Dtype) -> list[TrainedRank]:
        """One process alone, and in float32 a second time in another order of sums."""
        if (balance, dtype) not in self.known:
            plan, settings = Case("dp=1", balance=balance).plan(self.layers), self.settings(dtype)
            tasks = [(run_rank, each) for each in reference_runs(plan, settings)]
            self.known[balance, dtype] = self.pool.run_each(tasks)
        return self.known[balance, dtype]

    def check(self, case: Case, dtype: Dtype) -> Check:
        """All steps in one layout."""
        plan, settings = case.plan(self.layers), self.settings(dtype)
        references = self.references(case.balance, dtype)
        runs = self.pool.run_each([(run_rank, (plan, settings))] * plan.layout.world)
        check = check_runs(plan, settings, runs, references, self.run_alone)
        assert check is not None
        return check

    def run_alone(self, arguments: RankArguments) -> TrainedRank:
        """One process more."""
        return self.pool.run_each([(run_rank, arguments)])[0]

    def change(self, dtype: Dtype, folder: Path) -> Iterator[Check]:
        """One run through all legs, an equal number of steps each; a check of each leg.

        A leg may differ by as much as the whole run may.
        """
        references = self.references("none", dtype)
        whole = judge(Case("dp=1").plan(self.layers), references[:1], references)
        for number, case in enumerate(LEGS):
            first, last = self.leg(number)
            runs = self._resume(case, dtype, folder, last)
            assert all(run.first_step == first + 1 for run in runs)
            part = [
                replace(one, losses=one.losses[first:last], routes=one.routes[first:last])
                for one in references
            ]
            check = judge(case.plan(self.layers), runs, part)
            yield replace(check, spread=whole.spread, allowed=whole.allowed)

    def leg(self, number: int) -> tuple[int, int]:
        """The steps before a leg and behind it."""
        return number * self.steps // len(LEGS), (number + 1) * self.steps // len(LEGS)

    def _resume(self, case: Case, dtype: Dtype, folder: Path, until: int) -> list[TrainedRank]:
        """As the command does it with --resume and --until."""
        plan, resume = case.plan(self.layers), folder.exists()
        RunFolder.create(folder, plan.to_toml(folder, full=True), {}, resume)
        settings = self.settings(dtype)
        options = replace(settings.options, resume=resume, until=until)
        settings = replace(settings, folder=folder, options=options)
        tasks = [(run_rank, (plan, settings))] * plan.layout.world
        return self.pool.run_each(tasks)

    def consumed(self, folder: Path) -> tuple[list[int], set[tuple[str, int]]]:
        """The sample numbers of a run in the order of its log, and the rows that they are."""
        samples = [
            record.first_sample + number
            for record in read_records(folder / METRICS)
            for number in range(record.num_samples)
        ]
        source = source_of(Case("dp=1").plan(self.layers), self.settings("float64"))
        return samples, {source.source_row(each) for each in samples}


def main() -> int:
    """Both tables; the exit code."""
    routed = STEPS * ROWS * SEQ * (LAYERS - 1)
    numbers = {"steps": STEPS, "layers": LAYERS, "rows": ROWS, "seq": SEQ, "size": MICROBATCH_SIZE}
    print(HEAD.format(date=date.today(), routed=routed, **numbers))
    _print([*COLUMNS], ["---"] * len(COLUMNS))
    began, passed = time.perf_counter(), list[bool]()
    with Pool(MOST_RANKS, _PATIENCE) as pool:
        trainings = Trainings(pool)
        for dtype in DTYPES:
            for case in CASES:
                trainings.references(case.balance, dtype)  # not in the seconds of the first case
                start = time.perf_counter()
                check = trainings.check(case, dtype)
                passed.append(check.passed)
                _print([*_cells(case), dtype, *_result(check, time.perf_counter() - start)])
        print(f"\n{sum(passed)} of {len(passed)} trainings pass")
        print(CHANGING)
        changed = [_changes(trainings, dtype) for dtype in DTYPES]
    print(NOTE, end="")
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    return 0 if all((*passed, *changed)) else 1


def _changes(trainings: Trainings, dtype: Dtype) -> bool:
    """The table of a run that changes its layout, and what its log says."""
    columns = ["steps", *COLUMNS]
    _print(columns, ["---"] * len(columns))
    good = True
    with tempfile.TemporaryDirectory() as parent:
        folder, start = Path(parent) / "run", time.perf_counter()
        for number, check in enumerate(trainings.change(dtype, folder)):
            first, last = trainings.leg(number)
            now, start = start, time.perf_counter()
            said = [*_cells(LEGS[number]), dtype, *_result(check, start - now)]
            _print([f"{first + 1} to {last}", *said])
            good = good and check.passed
        samples, places = trainings.consumed(folder)
    once = samples == [*range(STEPS * ROWS)]
    good = good and once and len(places) == len(samples)
    which = "each once and in order" if once else "NOT each once"
    print(
        f"\nSamples in `metrics.jsonl`: {len(samples):,}, those of {STEPS} steps, {which}: "
        f"{len(places):,} different rows of the text.\n"
    )
    return good


def _cells(case: Case) -> list[object]:
    plan = case.plan(LAYERS)
    schedule = plan.schedule.name if plan.layout.pp > 1 else ""
    context = plan.layout.context if plan.layout.cp > 1 else ""
    layout = case.layout if case.sp else f"{case.layout} no-sp"
    words = [schedule, context, case.balance, case.recompute]
    return [layout, plan.layout.world, plan.layout.zero, *words]


def _result(check: Check, seconds: float) -> list[object]:
    spread = "" if check.spread is None else f"{check.spread:.0e}"
    losses = [f"{check.difference:.0e}", spread, f"{check.allowed:.0e}"]
    return [*losses, check.flips, f"{seconds:.1f}", "pass" if check.passed else "FAIL"]


def _print(*lines: Sequence[object]) -> None:
    for cells in lines:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
