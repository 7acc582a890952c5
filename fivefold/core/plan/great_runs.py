"""Great runs by name: the plan of each, and what its source reports.

`presets/runs/NAME.toml` is a plan file. `presets/published.toml` has the published figures of each
run: where they are from, which FLOPs its TFLOP/s count, the software that ran it, and what the
source leaves open. Papers count FLOPs differently, so every figure is compared by its own count.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fivefold.core import BadFile, FivefoldError, UnknownName, did_you_mean, tables
from fivefold.core.layout import parse_zero
from fivefold.core.model import Shape, forward_flops
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import PlanOptions, options_from
from fivefold.core.plan.recipe import Recipe

# Settings as `key=value`: sorted into those of the plan, of training and of the model.
#
# The keys of a plan file, of its `[train]` table and of a model have the same names on the command
# line; an unknown key is an error that suggests the nearest ones.

_TABLES = ("model", "set", "train")  # not keys of their own


class ParsedSettings(NamedTuple):
    """Settings by where their keys belong; those of the model stay texts."""

    plan: dict[str, Any]
    train: dict[str, Any]
    model: dict[str, str]


def plan_keys() -> list[str]:
    """The keys of a plan file outside its tables."""
    return [field.name for field in dataclasses.fields(PlanOptions) if field.name not in _TABLES]


def train_keys() -> list[str]:
    """The keys of `[train]`."""
    return [field.name for field in dataclasses.fields(Recipe)]


def require_key(key: str) -> None:
    """Refuse a key that neither plan, training nor model has, with the nearest that one has."""
    known = [*train_keys(), *plan_keys(), *models.keys()]
    if key not in known:
        raise UnknownName("key", key, known)


def parse_settings(pairs: Mapping[str, str]) -> ParsedSettings:
    """Every setting converted to the type of its key; all problems at once."""
    settings, problems = ParsedSettings({}, {}, {}), list[str]()
    plan, train = tables.types_of(PlanOptions), tables.types_of(Recipe)
    of_model = models.keys()
    for key, text in pairs.items():
        require_key(key)
        if key in of_model:
            settings.model[key] = text
            continue
        into, hint = (settings.train, train[key]) if key in train else (settings.plan, plan[key])
        try:
            into[key] = parse_zero(text) if key == "zero" else tables.from_text(hint, text, key)
        except ValueError as error:
            problems.append(f"{key} = {text!r}: {error}")
    if problems:
        raise BadFile("--set", problems)
    return settings


PRESETS = Path(__file__).parents[2] / "presets"

# Which FLOPs a source counts. model: ours, causal attention at half. full-attention: the full
# square. hardware: the full square, and the recomputed forward of every layer.
FlopsCount = Literal["model", "full-attention", "hardware"]
FLOPS_WORDS: dict[FlopsCount, str] = {
    "model": "model FLOPs, causal attention at half",
    "full-attention": "model FLOPs, the full square of attention",
    "hardware": "hardware FLOPs: the full square of attention and the recomputed forward",
}

Change = dict[str, str]  # keys of a plan or model, as `--set` takes them


@dataclass(frozen=True)
class PublishedFigures:
    """What a source reports; `mfu` counts as `flops` says, `hfu` counts hardware FLOPs.

    `gpu_hours` are those of `tokens`, with everything that interrupted the run.
    """

    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    flops: FlopsCount = "model"
    mfu: float | None = None
    hfu: float | None = None
    gpu_hours: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Goodput:
    """The share of the time that went to steps that count, and what interrupted the rest.

    `gpu_mtbf_hours`: mean time between failures of one GPU; if it is None, it follows from
    `interruptions` in `days`.
    """

    share: float
    before: float | None = None  # of earlier runs, where the source compares
    interruptions: int | None = None
    days: float | None = None
    gpu_mtbf_hours: float | None = None
    source: str = ""


@dataclass(frozen=True)
class ScalingPoint:
    """The same run at another size: changes of its plan, and what was published of that."""

    change: Change
    tflops_per_gpu: float | None = None
    step_s: float | None = None
    efficiency: float | None = None  # FLOP/s of a GPU, over those of the first point


@dataclass(frozen=True)
class GreatRun:
    """A published run; its plan is in the file of the same name."""

    name: str
    title: str
    source: str
    stack: str
    figures: PublishedFigures
    precision: str = "bf16"
    open: tuple[Change, ...] = ()  # changes of the plan that the source allows as well
    scaling: tuple[ScalingPoint, ...] = ()
    goodput: Goodput | None = None
    notes: tuple[str, ...] = ()

    @property
    def plan_file(self) -> Path:
        return PRESETS / "runs" / f"{self.name}.toml"

    def header(self, key: str) -> str:
        """What the comments of its plan file say about `assumed` or `confidence`."""
        lines = self.plan_file.read_text("utf-8").splitlines()
        comments = [line[1:].strip() for line in lines if line.startswith("#")]
        starts = [i for i, line in enumerate(comments) if line.startswith(f"{key}: ")]
        if not starts:
            return ""
        tail = comments[starts[0] + 1 :]
        extra = takewhile(lambda line: not re.match(r"[a-z]+: ", line), tail)
        return " ".join([comments[starts[0]].removeprefix(f"{key}: "), *extra])

    def options(self, change: Change | None = None) -> PlanOptions:
        """The plan of the run, with a change if there is one."""
        settings = parse_settings(change or {})
        changes = {"set": settings.model or None, "train": settings.train or None, **settings.plan}
        return options_from(str(self.plan_file), changes)


@lru_cache
def great_runs() -> dict[str, GreatRun]:
    """All runs by name, sorted."""
    path = PRESETS / "published.toml"
    return {
        name: tables.build(GreatRun, {"name": name, **table}, f"{path.name}: {name}")
        for name, table in sorted(tables.read_toml(path).items())
    }


def load_run(name: str) -> GreatRun:
    """A run by its name; an unknown one is an error with the list of all."""
    known = great_runs()
    if name.lower() not in known:
        near = did_you_mean(name, known)
        runs = f"known runs: {', '.join(known)}"
        hint = "" if near.startswith("choose from") else f"{near} "
        raise FivefoldError(f"unknown run {name!r}: {hint}{runs}")
    return known[name.lower()]


def counted_flops(shape: Shape, seq: int, count: FlopsCount) -> float:
    """Training FLOPs per token as a source counts them."""
    forward = forward_flops(shape, seq)
    if count == "model":
        return 3 * forward.total
    total = replace(forward, scores=2 * forward.scores)
    again = total.total - total.head if count == "hardware" else 0.0
    return 3 * total.total + again


class PublishedStep(NamedTuple):
    """Seconds of a step, and how they follow from what is published."""

    seconds: float
    origin: str


def published_step(
    figures: PublishedFigures, shape: Shape, seq: int, tokens: int, gpus: int
) -> PublishedStep | None:
    """Seconds of a step of so many tokens; None if the source reports no speed."""
    if figures.step_s is not None:
        return PublishedStep(figures.step_s, "the published step time")
    if (rate := figures.tokens_per_s_per_gpu) is not None:
        return PublishedStep(tokens / (rate * gpus), f"{rate:,g} tokens/s/GPU")
    if (speed := figures.tflops_per_gpu) is not None:
        flops = counted_flops(shape, seq, figures.flops) * tokens
        text = f"{speed:g} TFLOP/s/GPU ({FLOPS_WORDS[figures.flops]})"
        return PublishedStep(flops / (speed * 1e12 * gpus), text)
    if figures.gpu_hours is not None and figures.tokens is not None:
        seconds = figures.gpu_hours * 3600 * tokens / (figures.tokens * gpus)
        text = f"{figures.gpu_hours:,.0f} GPU-hours for {figures.tokens:.3g} tokens"
        return PublishedStep(seconds, f"{text}, interruptions included")
    return None


class FigurePair(NamedTuple):
    """A published figure, and the same by our estimate."""

    name: str
    published: float
    estimate: float
    unit: str


def compared_figures(
    figures: PublishedFigures, shape: Shape, seq: int, rate: float, peak: float
) -> Iterator[FigurePair]:
    """Each published figure beside that of a run with `rate` tokens/s/GPU.

    `peak`: FLOP/s of a GPU. The step time is compared by the caller, who knows the batch.
    """
    by_count = counted_flops(shape, seq, figures.flops) * rate
    hardware = counted_flops(shape, seq, "hardware") * rate
    hours = 0.0 if figures.tokens is None else figures.tokens / rate / 3600
    pairs = (
        ("tokens/s/GPU", figures.tokens_per_s_per_gpu, rate, ""),
        (f"TFLOP/s/GPU, {figures.flops} FLOPs", figures.tflops_per_gpu, by_count / 1e12, ""),
        (f"MFU, {figures.flops} FLOPs", figures.mfu, by_count / peak, "share"),
        ("HFU, hardware FLOPs", figures.hfu, hardware / peak, "share"),
        ("GPU-hours", figures.gpu_hours, hours, ""),
    )
    for name, published, ours, unit in pairs:
        if published is not None:
            yield FigurePair(name, published, ours, unit)


class GoodputFacts(NamedTuple):
    """What a share of useful time means for a number of GPUs; None where nothing is known."""

    share: float
    before: float | None
    lost_minutes_a_day: float
    interruptions_a_day: float | None
    minutes_an_interruption: float | None
    minutes_before: float | None


def goodput_facts(goodput: Goodput, gpus: int) -> GoodputFacts:
    """Time lost a day, and what each interruption may cost at most."""
    lost = (1 - goodput.share) * 1440
    rate = None
    if goodput.gpu_mtbf_hours is not None:
        rate = 24 * gpus / goodput.gpu_mtbf_hours
    elif goodput.interruptions is not None and goodput.days is not None:
        rate = goodput.interruptions / goodput.days
    if rate is None:
        return GoodputFacts(goodput.share, goodput.before, lost, None, None, None)
    before = None if goodput.before is None else (1 - goodput.before) * 1440 / rate
    return GoodputFacts(goodput.share, goodput.before, lost, rate, lost / rate, before)
