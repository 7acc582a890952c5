"""A great run beside our estimate of it, and the published step part by part.

The parts sum to the published step: model FLOPs at the peak, what each cost of the estimate adds,
and what no part explains. What a source leaves open is estimated in the other ways as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from fivefold.core import FivefoldError, counted
from fivefold.core.model import training_flops
from fivefold.core.plan import (
    Change,
    FigurePair,
    GoodputFacts,
    GreatRun,
    Plan,
    PlanOptions,
    PublishedStep,
    ScalingPoint,
    compared_figures,
    counted_flops,
    goodput_facts,
    published_step,
    resolve,
)
from fivefold.planner.estimate import Estimate, estimate_plan
from fivefold.planner.setting import EstimateSetting, estimate_setting


class ExplainedPart(NamedTuple):
    """Seconds of the published step, and what they are."""

    part: str
    seconds: float
    sentence: str


class OpenChoice(NamedTuple):
    """The estimate with another choice that the source allows; None and the reason if illegal."""

    change: Change
    estimate: Estimate | None
    refused: str = ""


class ScaledRun(NamedTuple):
    """One size of the run: TFLOP/s per GPU as the source counts, and over those of the first."""

    point: ScalingPoint
    estimate: Estimate
    tflops: float
    efficiency: float
    published_efficiency: float | None


@dataclass(frozen=True)
class RunComparison:
    """A run as published and as estimated."""

    run: GreatRun
    estimate: Estimate
    published: PublishedStep | None
    figures: tuple[FigurePair, ...]
    explained: tuple[ExplainedPart, ...]
    choices: tuple[OpenChoice, ...]
    scaling: tuple[ScaledRun, ...]
    goodput: GoodputFacts | None

    @property
    def difference(self) -> float | None:
        """Seconds of the estimate above the published step."""
        return None if self.published is None else self.estimate.step - self.published.seconds


def compare_run(run: GreatRun, headroom: float, stack: str | None = None) -> RunComparison:
    """Estimate a run with its own software, or with another stack."""
    plan = resolve(run.options())
    assert plan.machine is not None, "the plan of a great run names its machine"
    software = stack or run.stack
    setting, _ = estimate_setting(plan.machine, run.precision, headroom, "compiled", 1.0, software)
    estimate = estimate_plan(plan, setting)
    batch, world = plan.batch, plan.layout.world
    step = published_step(run.figures, plan.shape, batch.seq, batch.tokens, world)
    rate, peak = estimate.tokens_per_s_per_gpu, plan.machine.peak(setting.precision)
    choices = tuple(_choices(run, setting))
    return RunComparison(
        run=run,
        estimate=estimate,
        published=step,
        figures=tuple(compared_figures(run.figures, plan.shape, batch.seq, rate, peak)),
        explained=tuple(_explained(estimate, step, choices)),
        choices=choices,
        scaling=tuple(_scaling(run, setting)),
        goodput=None if run.goodput is None else goodput_facts(run.goodput, world),
    )


def _choices(run: GreatRun, setting: EstimateSetting) -> Iterator[OpenChoice]:
    for change in run.open:
        try:
            plan = resolve(run.options(change))
        except FivefoldError as error:
            yield OpenChoice(change, None, str(error))
        else:
            yield OpenChoice(change, estimate_plan(plan, setting))


def _scaling(run: GreatRun, setting: EstimateSetting) -> Iterator[ScaledRun]:
    first: float | None = None
    published: float | None = None
    for point in run.scaling:
        estimate = estimate_plan(resolve(run.options(point.change)), setting)
        flops = counted_flops(estimate.plan.shape, estimate.plan.batch.seq, run.figures.flops)
        tflops = flops * estimate.tokens_per_s_per_gpu / 1e12
        first = first or tflops
        published = published or point.tflops_per_gpu
        efficiency = point.efficiency
        if efficiency is None and point.tflops_per_gpu is not None and published is not None:
            efficiency = point.tflops_per_gpu / published
        yield ScaledRun(point, estimate, tflops, tflops / first, efficiency)


# --- The published step, part by part


def _explained(
    estimate: Estimate, step: PublishedStep | None, choices: tuple[OpenChoice, ...]
) -> Iterator[ExplainedPart]:
    plan, parts = estimate.plan, estimate.breakdown()
    ideal = _at_peak(estimate)
    again = _recomputation(estimate)
    reached = ideal.seconds / (parts["compute"] - again)
    yield ideal
    yield ExplainedPart(
        "kernels",
        parts.pop("compute") - again - ideal.seconds,
        f"the kernels of the busiest rank reach {reached:.0%} of the peak, elementwise kernels and "
        "layers that do not divide evenly included",
    )
    if again > 0:
        sentence = f"compute that the backward repeats (recompute {plan.recompute})"
        yield ExplainedPart("recomputation", again, sentence)
    for name, seconds in parts.items():
        yield ExplainedPart(name, seconds, _sentence(name, estimate))
    if step is not None:
        seconds = step.seconds - estimate.step
        yield ExplainedPart("not explained", seconds, _remainder(estimate, step, choices))


def _at_peak(estimate: Estimate) -> ExplainedPart:
    plan, setting = estimate.plan, estimate.setting
    flops = training_flops(plan.shape, plan.batch.seq).total
    tokens, world = plan.batch.tokens, plan.layout.world
    peak = setting.machine.peak(setting.precision)
    sentence = (
        f"{flops:.3g} model FLOPs a token × {tokens:,} tokens on {world:,} × "
        f"{peak / 1e12:g} TFLOP/s ({setting.precision})"
    )
    return ExplainedPart("FLOPs at the peak", flops * tokens / (world * peak), sentence)


def _recomputation(estimate: Estimate) -> float:
    """Seconds of compute that would go away if everything were saved."""
    if str(estimate.plan.recompute) == "none":
        return 0.0
    plan = _changed(estimate.plan, recompute="none")
    other = estimate_plan(plan, estimate.setting)
    return max(0.0, estimate.breakdown()["compute"] - other.breakdown()["compute"])


def _changed(plan: Plan, **changes: str) -> Plan:
    options: PlanOptions = replace(plan.options, **changes)
    return resolve(options)


def _sentence(part: str, estimate: Estimate) -> str:
    plan, layout = estimate.plan, estimate.plan.layout
    spans = {axis: layout.tier(axis, estimate.setting.machine).name for axis in ("tp", "cp", "dp")}
    hidden = "what the stack does not overlap"
    named = f"{plan.options.schedule}, {counted(plan.batch.microbatches, 'microbatch')}"
    texts = {
        "launch": "the GPU waits for the host that launches kernels",
        "bubble": f"ranks of the pipeline wait: pp={layout.pp}, {named}",
        "tp": f"collectives of tensor parallelism, tp={layout.tp} over {spans['tp']}, {hidden}",
        "cp": f"keys and values of other ranks, cp={layout.cp} over {spans['cp']}, {hidden}",
        "ep": f"tokens to experts and back, ep={layout.ep}, {hidden}",
        "pp": f"messages between stages in the fill and drain of the pipeline, pp={layout.pp}",
        "dp": f"gradients and weights of {layout.dp * layout.cp} data ranks, ZeRO-{layout.zero}, "
        f"over {spans['dp']}, {hidden}",
        "optimizer": "the update of weights and states",
        "offload": "states to host memory and back",
        "fixed": "seconds of every step that no part of the model explains",
    }
    return texts[part]


def _remainder(estimate: Estimate, step: PublishedStep, choices: tuple[OpenChoice, ...]) -> str:
    """How the estimate differs, and whether what the source leaves open could be the reason."""
    share = estimate.step / step.seconds - 1
    if abs(share) < 5e-4:
        return "the estimate is the published step"
    text = f"the estimate is {abs(share):.1%} {'above' if share > 0 else 'below'} the published "
    text += f"step ({step.origin})"
    fitting = [
        candidate
        for choice in choices
        if (candidate := choice.estimate) and candidate.verdict != "does not fit"
    ]
    if not fitting:
        return text
    steps = [estimate.step, *(alternative.step for alternative in fitting)]
    inside = "inside" if min(steps) <= step.seconds <= max(steps) else "outside"
    span = f"{min(steps):.2f} to {max(steps):.2f} s"
    return f"{text}, which is {inside} the {span} of the choices left open that fit"
