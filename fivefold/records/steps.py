"""What is recorded of a training run: its steps, where the time went, and a summary.

`StepRecord` is one line of `metrics.jsonl`. A run may be started several times. Steps that a
restart repeats are lost: they count as time, but not as training. Other modules of this package
write the run folder (`run_folder`), read it back (`run_reader`), describe what the ranks did in a
step (`spans`), and compare a measured step with the plan (`deviation`). Nothing here loads torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fivefold.core.layout import computed_flops
from fivefold.core.plan import Plan
from fivefold.records.stored_types import check_record

if TYPE_CHECKING:
    from fivefold.planner import Estimate


GIB = 1 << 30
BUILD, LOAD, SAVE, EVAL = "build", "load", "save", "eval"  # besides the steps
STEPS, LOST, SKIPPED, DOWN, OTHER = "steps", "lost", "skipped", "down", "other"
_NAMES = (STEPS, BUILD, LOAD, SAVE, EVAL, SKIPPED, LOST, DOWN, OTHER)
_RATES = ("tokens_per_s", "tokens_per_s_per_gpu")
_ADDED = (
    "data",
    "wall_s",
    "evals",
    "preference",
    "again",
    "slow",
)  # records of older versions do not have them
_TIMES = ("seconds", "wall_s", "wall")
_ENDLESS = 1e12  # seconds: no run takes so long, and many of them still have a finite sum
_WINDOW = 100  # the last steps, from which the remaining time is estimated


@dataclass(frozen=True)
class PlannedStep:
    """The planner's estimate of a step."""

    step_s: float
    tokens_per_s: float
    mfu: float
    memory_gib: float

    @classmethod
    def of(cls, outlook: Estimate) -> PlannedStep:
        """From the estimate of a plan."""
        rate = outlook.tokens_per_s_per_gpu * outlook.plan.layout.world
        return cls(outlook.step, rate, outlook.mfu, outlook.allocated / GIB)


@dataclass(frozen=True)
class StepRecord:
    """One step. Unknown values are None. A step whose loss or norm is not finite is skipped.

    `data` has the seconds that the rank waited for its rows. `seconds` go from its question for
    them, or from the end of what the device had to run before if that was later, to the end of this
    update on the device, and `wall_s` from the end of the previous update, or from the start, to
    the end of this one: their sum is the wall time. Records of older versions have neither `data`
    nor `wall_s`, and their `seconds` begin after the data and end before clipping and update. Times
    that cannot be, because they are not finite or not above 0, are None.

    `spent` has the seconds between the previous record and this one outside of the step, by what
    they were spent on. `wall` has the seconds since the first start of the run. `restart` counts
    the starts from 0.
    """

    step: int  # from 1
    loss: float
    norm: float
    lr: float
    seconds: float | None
    tokens: int
    world: int
    first_sample: int
    num_samples: int
    wall: float | None
    restart: int = 0
    mfu: float | None = None
    memory_gib: float | None = None  # peak of any rank
    planned: PlannedStep | None = None
    skipped: str | None = None  # why
    scale: float | None = None  # loss scale, in fp16
    fullest: float | None = None  # load of the fullest expert over the mean, averaged over layers
    load: tuple[float, ...] | None = None  # the same for each layer with experts
    eval_loss: float | None = None
    spent: dict[str, float] = field(default_factory=dict[str, float])
    data: float | None = None
    wall_s: float | None = None
    evals: dict[str, dict[str, float | None]] | None = None  # by set
    preference: dict[str, float | None] | None = None  # of DPO: accuracy, margin and rewards
    again: dict[str, Any] | None = None  # of a step that ran twice: why, same, ranks
    slow: list[dict[str, Any]] | None = None  # ranks, hosts and links that make it longer

    @property
    def elapsed(self) -> float | None:
        """The seconds of the step that are shown and give its rates: `wall_s` where it is known."""
        return self.seconds if self.wall_s is None else self.wall_s

    @property
    def interval(self) -> float | None:
        """The seconds from record to record."""
        if self.wall_s is not None or self.seconds is None:
            return self.wall_s
        return self.seconds + sum(self.spent.values())

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.elapsed is None else self.tokens / self.elapsed

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        return None if self.tokens_per_s is None else self.tokens_per_s / self.world

    def to_json(self) -> dict[str, Any]:
        """One line of the file. Numbers that are not finite become null."""
        return _finite({**asdict(self), **{name: getattr(self, name) for name in _RATES}})

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> StepRecord:
        """The record of a line; raises KeyError, TypeError or ValueError if it is none."""
        values = {
            field.name: table[field.name] for field in fields(cls) if field.name not in _ADDED
        }
        values |= {name: table.get(name) for name in _ADDED}
        for key in _TIMES:
            values[key] = possible_time(values[key])
        check_record(values)
        for key in ("loss", "norm"):
            values[key] = math.nan if values[key] is None else float(values[key])
        if values["planned"] is not None:
            values["planned"] = PlannedStep(**values["planned"])
        if values["load"] is not None:
            values["load"] = tuple(values["load"])
        return cls(**values)

    def scalars(self) -> dict[str, float]:
        """The numbers that a tracker such as TensorBoard draws."""
        values = {
            "loss": self.loss,
            "norm": self.norm,
            "lr": self.lr,
            "step_s": self.elapsed,
            "data": self.data,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "memory_gib": self.memory_gib,
            "scale": self.scale,
            "fullest_expert": self.fullest,
            "eval_loss": self.eval_loss,
        }
        for name, numbers in (self.evals or {}).items():
            values |= {f"eval/{name}/{key}": value for key, value in numbers.items()}
        values |= {f"dpo/{key}": value for key, value in (self.preference or {}).items()}
        if self.planned is not None:
            values |= {f"planned/{name}": value for name, value in asdict(self.planned).items()}
        return {name: float(value) for name, value in values.items() if value is not None}


def _finite(value: Any) -> Any:
    """A JSON value whose numbers are all finite: None where one is not."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {key: _finite(inner) for key, inner in table.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def possible_time(seconds: Any) -> Any:
    """Seconds that a step can have taken: None for a number that is not finite or not above 0."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    return None if is_number and not 0 < seconds < math.inf else seconds


def mfu(plan: Plan, tokens_per_s: float) -> float | None:
    """Model FLOPs over the peak FLOPs of the plan's GPUs; None if the plan has no machine."""
    if plan.machine is None:
        return None
    flops = computed_flops(plan.shape, plan.batch.seq) * tokens_per_s
    return flops / (plan.layout.world * plan.machine.peak(plan.precision))


class Pace:
    """Estimates the remaining time from the last steps of this start and the time between them.

    The first step compiles kernels and allocates memory, so it does not count.
    """

    def __init__(self) -> None:
        self.seconds: deque[float] | None = None

    def eta(self, record: StepRecord, steps: int) -> float | None:
        """Seconds from this record to the last of `steps`; None after the first step, and while no
        step has a time."""
        if self.seconds is None:
            self.seconds = deque(maxlen=_WINDOW)
            return None
        if record.interval is not None:
            self.seconds.append(record.interval)
        if not self.seconds:
            return None
        return sum(self.seconds) / len(self.seconds) * (steps - record.step)


class RunStart(NamedTuple):
    """One start of a run, in seconds since the first start.

    `ended` is None if the start died. Otherwise `spent` has the seconds after its last step.
    """

    began: float
    ended: float | None
    spent: dict[str, float]


class Rate(NamedTuple):
    """Tokens per second: over all steps together, and the median of the steps."""

    mean: float
    median: float


@dataclass(frozen=True)
class Summary:
    """A run. `spent` sums to `wall_s`. Rates, MFU and losses are those of steps that count."""

    num_steps: int
    num_tokens: int
    wall_s: float
    spent: dict[str, float]
    goodput: float  # share of the wall time in steps that count
    step_s: float | None  # median
    tokens_per_s: Rate | None
    tokens_per_s_per_gpu: Rate | None
    mfu: float | None  # median
    memory_gib: float | None  # peak
    planned: PlannedStep | None  # of the newest step
    world: int | None  # of the newest step
    last_loss: float | None
    best_loss: float | None
    best_step: int | None
    eval_loss: float | None  # newest
    best_eval_loss: float | None
    evals: dict[str, dict[str, float | None]]  # newest, by set
    num_skipped: int
    num_untimed: int  # whose clock gave no time that can be
    num_proven: int  # which `replay` ran twice, with equal bits
    num_lost: int
    num_restarts: int
    num_checkpoints: int

    def to_json(self) -> dict[str, Any]:
        """For `summary.json`."""
        table = asdict(self)
        for key in _RATES:
            rate: Rate | None = getattr(self, key)
            table[key] = None if rate is None else rate._asdict()
        return table


def summarize(
    starts: Sequence[RunStart],
    records: Sequence[StepRecord],
    lost: Sequence[StepRecord],
    num_checkpoints: int,
) -> Summary:
    """The run so far, from its records and those of `lost` steps, which restarts repeated."""
    counted = [record for record in records if record.skipped is None]
    spent = _spent(starts, records, lost)
    wall = sum(spent.values())
    best = min(counted, key=lambda record: record.loss, default=None)
    known_mfu = [record.mfu for record in counted if record.mfu is not None]
    memory = [
        step_record.memory_gib
        for step_record in (*records, *lost)
        if step_record.memory_gib is not None
    ]
    evals = [record.eval_loss for record in records if record.eval_loss is not None]
    times = [record.elapsed for record in counted if record.elapsed is not None]
    total = sum(record.tokens for record in counted)
    newest = records[-1] if records else None
    return Summary(
        num_steps=len(records),
        num_tokens=total,
        wall_s=wall,
        spent=spent,
        goodput=spent[STEPS] / wall if wall else 0.0,
        step_s=median(times) if times else None,
        tokens_per_s=_rate(counted, per_gpu=False),
        tokens_per_s_per_gpu=_rate(counted, per_gpu=True),
        mfu=median(known_mfu) if known_mfu else None,
        memory_gib=max(memory, default=None),
        planned=newest.planned if newest else None,
        world=newest.world if newest else None,
        last_loss=counted[-1].loss if counted else None,
        best_loss=best.loss if best else None,
        best_step=best.step if best else None,
        eval_loss=evals[-1] if evals else None,
        best_eval_loss=min(evals, default=None),
        evals=next((record.evals for record in reversed(records) if record.evals), None) or {},
        num_skipped=len(records) - len(counted),
        num_untimed=sum(record.elapsed is None for record in records),
        num_proven=sum(
            step_record.again is not None
            and step_record.again["why"] is None
            and step_record.again["same"]
            for step_record in records
        ),
        num_lost=len(lost),
        num_restarts=len(starts) - 1,
        num_checkpoints=num_checkpoints,
    )


def _rate(records: Sequence[StepRecord], per_gpu: bool) -> Rate | None:
    steps = [
        (record.tokens, record.elapsed * (record.world if per_gpu else 1))
        for record in records
        if record.elapsed is not None
    ]
    if not steps:
        return None
    tokens, seconds = map(sum, zip(*steps, strict=True))
    return Rate(tokens / seconds, median(count / time for count, time in steps))


def _spent(
    starts: Sequence[RunStart], records: Sequence[StepRecord], lost: Sequence[StepRecord]
) -> dict[str, float]:
    """Wall time by what it was spent on; no part is negative.

    A start that died ended at its last record; from there to the next start the run was down.
    The time between a regular end and the next start does not count. A start that fails over to
    another host may read an earlier time than the one before wrote: such a gap counts as none.
    """
    totals: dict[str, float] = dict.fromkeys(_NAMES, 0.0)
    for source in (*records, *lost, *starts):
        for name, seconds in source.spent.items():
            totals[name] = totals.get(name, 0.0) + _seconds(seconds)
    for record in records:
        totals[STEPS if record.skipped is None else SKIPPED] += _seconds(record.seconds)
    totals[LOST] += sum(_seconds(record.seconds) for record in lost)
    up = 0.0
    for number, start in enumerate(starts):
        same = [record for record in (*records, *lost) if record.restart == number]
        walls = [record.wall for record in same if record.wall is not None]
        end = max(walls, default=start.began) if start.ended is None else start.ended
        up += _seconds(end - start.began)
        if start.ended is None and number + 1 < len(starts):
            totals[DOWN] += _seconds(starts[number + 1].began - end)
    named = sum(totals.values()) - totals[DOWN]
    totals[OTHER] += max(0.0, up - named)
    return totals


def _seconds(measured: float | None) -> float:
    """A length of time: what no clock can have measured counts as none.

    Clocks that were set back make negative times, damaged records endless ones.
    """
    return measured if measured is not None and 0.0 < measured < _ENDLESS else 0.0


def shares_of(amounts: Sequence[float]) -> list[float]:
    """Each amount over the sum of all, in thousandths that sum to 1; the sign does not count.

    >>> shares_of([1, 1, -1])
    [0.334, 0.333, 0.333]
    """
    sizes = [abs(amount) if math.isfinite(amount) else 0.0 for amount in amounts]
    most = max(sizes, default=0.0)
    if most == 0.0:
        return [0.0] * len(sizes)
    scaled = [size / most for size in sizes]  # their sum cannot overflow
    exact = [1000 * size / sum(scaled) for size in scaled]
    floors = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: floors[i] - exact[i])
    for i in by_rest[: 1000 - sum(floors)]:
        floors[i] += 1
    return [count / 1000 for count in floors]
