"""Plans and searches: the answers of `ff.plan` and `ff.search`, and of `fivefold plan`."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.commands.job import (
    GivenJob,
    Model,
    OnProgress,
    TaskProgress,
    above,
    given_job,
    one_of,
    positive,
    reopened,
)
from fivefold.core import PRECISIONS, FivefoldError, counted
from fivefold.core import hardware as machines
from fivefold.core import plan_keys as precision_keys
from fivefold.core.plan import (
    FailureRates,
    Plan,
    PlanOptions,
    resolve,
)
from fivefold.core.schedule import family
from fivefold.render import (
    Printed,
    RunCosts,
    duration,
    first_reasons,
    given_answer,
    ranked_answer,
    reasons_text,
    resolved_answer,
    write_text,
)

if TYPE_CHECKING:
    from fivefold.planner import Estimate, PlanRequest, PlanResult


_ALSO_FIXED = ("zero", "schedule", "chunks", "microbatch_size", "recompute", "context")
NOT_SEARCHED = ("microbatches", "stage_layers", "gather", "sp")  # only for a given layout
_TOP = 10
_NOT_ASKED = RunCosts()


@dataclass(frozen=True)
class PlannedJob:
    """A plan; with a machine also its `estimate`, and `why` the layout is as it is.

    `str()` is the text of `fivefold plan`, `to_json()` its JSON.
    """

    plan: Plan
    estimate: Estimate | None
    why: tuple[str, ...]
    seconds: float  # that the answer took
    costs: RunCosts = _NOT_ASKED

    @property
    def fits(self) -> str | None:
        """`fits`, `tight` or `does not fit`; None without a machine."""
        return None if self.estimate is None else self.estimate.verdict

    @cached_property
    def _answer(self) -> Printed:
        if self.estimate is None:
            return resolved_answer(self.plan)
        return given_answer(self.plan, self.estimate, self.why, self.seconds, self.costs)

    def to_json(self) -> dict[str, Any]:
        """What `fivefold plan --json` prints."""
        return self._answer[0]

    def to_toml(self, path: str | Path) -> None:
        """Write the plan as a file that every verb and every function reads."""
        write_plan(Path(path), self.plan, self.costs.tokens)

    def __repr__(self) -> str:
        known = "" if self.estimate is None else f": {self.fits}, {duration(self.estimate.step)}"
        return f"PlannedJob({self.plan.shape.name} on {self.plan.layout}{known})"

    def __str__(self) -> str:
        return "\n".join(self._answer[1])

    def _repr_html_(self) -> str:
        from fivefold.render import plan_html

        return plan_html(self.plan, self.estimate, self.why)


@dataclass(frozen=True)
class SearchedPlans:
    """The ranking of a search: `plans` are estimates, the first choice first.

    `str()` is the text of `fivefold plan --gpus`, `to_json()` its JSON.
    """

    result: PlanResult
    why: tuple[str, ...]  # of the first choice
    costs: RunCosts = _NOT_ASKED

    @property
    def plans(self) -> tuple[Estimate, ...]:
        return self.result.plans

    @property
    def best(self) -> PlannedJob:
        """The first choice."""
        first = self.plans[0]
        return PlannedJob(self.plan, first, self.why, self.result.seconds, self.costs)

    @property
    def plan(self) -> Plan:
        """That of the first choice."""
        return with_steps(self.plans[0].plan, self.costs.tokens)

    @cached_property
    def _answer(self) -> Printed:
        return ranked_answer(self.result, self.costs, self.why)

    def to_json(self) -> dict[str, Any]:
        """What `fivefold plan --gpus --json` prints."""
        return self._answer[0]

    def __repr__(self) -> str:
        return f"SearchedPlans({len(self.plans)} plans, the first {self.best!r})"

    def __str__(self) -> str:
        return "\n".join(self._answer[1])

    def _repr_html_(self) -> str:
        from fivefold.render import search_html

        return search_html(self.result, self.why)


def plan(
    model: Model,
    *,
    tokens: float | None = None,
    price: float | None = None,
    mtbf_gpu: float | None = None,
    headroom: float = 0.05,
    precision: str | None = None,
    kernels: str = "compiled",
    stack: str | None = None,
    imbalance: float | None = None,
    **keys: Any,
) -> PlannedJob:
    """The plan of a job: its layout, and with a `machine` its memory, its time and why.

    `keys` are those of a plan file, of training and of the model: `layout`, `machine`, `gpus`,
    `seq`, `batch`, `zero`, `schedule`, `lr`, `layers`, … With `gpus` and without a `layout` it is
    the first choice of `search`.
    """
    costs = checked_costs(tokens, price, mtbf_gpu)
    keywords = estimate_options(headroom, kernels, imbalance, stack)
    job = estimated_job(given_job(model, keys), kernels, precision)
    _require_one_length(tokens, job.keys)
    if job.options.gpus is not None and job.is_open:
        return search(job, **costs._asdict(), precision=precision, **keywords).best
    if job.options.machine is None:
        return PlannedJob(with_steps(resolve(job.options), tokens), None, (), 0.0, costs)
    from fivefold.planner import compare_neighbours

    began = time.perf_counter()
    resolved, estimate = estimate_given(job.options, keywords, precision)
    why = tuple(reasons_text(estimate, compare_neighbours(estimate), None))
    seconds = time.perf_counter() - began
    return PlannedJob(with_steps(resolved, tokens), estimate, why, seconds, costs)


def search(
    model: Model,
    *,
    fix: str | Mapping[str, Any] | None = None,
    top: int = _TOP,
    objective: str = "tokens",
    tokens: float | None = None,
    price: float | None = None,
    mtbf_gpu: float | None = None,
    headroom: float = 0.05,
    precision: str | None = None,
    kernels: str = "compiled",
    stack: str | None = None,
    imbalance: float | None = None,
    on_progress: OnProgress | None = None,
    **keys: Any,
) -> SearchedPlans:
    """The best layouts for `gpus` GPUs of a `machine`, ranked, with reasons.

    `fix`: values that every layout must have, as in "tp=8 zero=1". `objective`: tokens (most per
    second), gpus (fewest) or gpu-hours (fewest). `keys` as for `plan`.
    """
    above("top", top, 0)
    costs = checked_costs(tokens, price, mtbf_gpu)
    keywords = estimate_options(headroom, kernels, imbalance, stack)
    job = estimated_job(given_job(model, keys), kernels, precision)
    _require_one_length(tokens, job.keys)
    if not job.is_open:
        raise FivefoldError("a search chooses the layout: leave it out, or call plan")
    request = request_of(job.options, fixed_values(job, fix), keywords, precision)
    plans = best_of(request, objective, top, on_progress)
    return SearchedPlans(plans, tuple(first_reasons(plans)), costs)


def _require_one_length(tokens: float | None, keys: Collection[str]) -> None:
    """Refuse a length in tokens beside one in steps."""
    if tokens is not None and "steps" in keys:
        raise FivefoldError("tokens and steps are both the length of the run: leave one out")


def with_steps(plan: Plan, tokens: float | None) -> Plan:
    """The plan with the steps in which its batch reads a budget of tokens."""
    if tokens is None:
        return plan
    train = replace(plan.options.train, steps=math.ceil(tokens / plan.batch.tokens))
    return replace(plan, options=replace(plan.options, train=train))


def write_plan(path: Path, plan: Plan, tokens: float | None = None) -> None:
    """Write a plan file: what is planned, and as comments what is still to be said of a real run.

    The steps of a token budget hold for one batch, which is written too: another layout of the
    file keeps it.
    """
    lines: list[str] = []
    batch, recipe = plan.batch, plan.options.train
    if tokens is not None:
        plan = replace(plan, options=replace(plan.options, batch=batch.sequences))
        rows = f"{counted(batch.sequences, 'sequence')} of {counted(batch.seq, 'token')}"
        lines.append(f"# {tokens:.4g} tokens are {counted(recipe.steps, 'step')} of {rows}")
    lines.append(plan.to_toml(path.parent).rstrip("\n"))
    if yours := recipe.still_yours():
        names = {"data": "data, tokenizer", "save_every": "saves", "lr": "learning rate"}
        lines += ["", "# still yours: " + ", ".join(names.get(key, key) for key in yours)]
        lines += [f"# {line}; now {default}" for default, line in yours.values()]
    write_text(path, "\n".join(lines) + "\n")


def estimate_options(
    headroom: float, kernels: str, imbalance: float | None, stack: str | None
) -> dict[str, Any]:
    """The assumptions of the estimates."""
    if stack is not None:
        from fivefold.cost.hardware import OUR_OWN, load_preset

        if stack != OUR_OWN:
            load_preset(stack)  # refuses an unknown one
        if kernels != "compiled":
            raise FivefoldError(
                f"kernels {kernels} is for fivefold's own software: leave it or stack out"
            )
    if not 0 <= headroom < 1:
        raise FivefoldError(f"headroom {headroom}: give a share of the memory from 0 to below 1")
    return {
        "headroom": headroom,
        "kernels": one_of("kernels", kernels, ("compiled", "eager", "graphs")),
        "imbalance": 1.0 if imbalance is None else imbalance,
        "stack": stack,
    }


def checked_costs(tokens: float | None, price: float | None, mtbf_gpu: float | None) -> RunCosts:
    """The tokens of a run, the price of a GPU-hour, and the rate of failures, each checked."""
    if mtbf_gpu is not None:
        FailureRates(mtbf_gpu)  # refuses what is no rate
    return RunCosts(
        None if tokens is None else positive("--tokens", tokens),
        None if price is None else positive("price", price),
        mtbf_gpu,
    )


def estimated_job(job: GivenJob, kernels: str, precision: str | None) -> GivenJob:
    """The plan says in which precision, and whether with compiled kernels."""
    job = reopened(job)
    keys: dict[str, Any] = precision_keys(precision) if precision in PRECISIONS else {}
    train = replace(job.options.train, compile=kernels != "eager")
    return replace(job, options=replace(job.options, train=train, **keys))


def with_first_choice(job: GivenJob) -> PlanOptions:
    """The options of a job; where it has GPUs and no layout, those of a search's first choice."""
    job = reopened(job)
    if not job.is_open or job.options.gpus is None:
        return job.options
    keywords = estimate_options(0.05, job.options.train.kernels, None, None)
    request = request_of(job.options, fixed_values(job, None), keywords, None)
    return best_of(request, "tokens", 1).plans[0].plan.options


def estimate_given(
    options: PlanOptions, assumptions: Mapping[str, Any], precision: str | None
) -> tuple[Plan, Estimate]:
    """A plan with a machine, and its estimate."""
    from fivefold.planner import estimate_on_machine

    plan = resolve(options)
    assert plan.machine is not None, "estimates are for a machine"
    precision = precision or options.precision
    return plan, estimate_on_machine(plan, plan.machine, **assumptions, precision=precision)


def fixed_values(job: GivenJob, fix: str | Mapping[str, Any] | None) -> dict[str, int | str]:
    """What every layout of a search has; keys of one layout are refused."""
    from fivefold.planner import parse_fixed

    if closed := [name for name in NOT_SEARCHED if name in job.keys]:
        raise FivefoldError(f"{closed[0]} is for a given layout: leave it out, or give --layout")
    fixed = {name: getattr(job.options, name) for name in _ALSO_FIXED if name in job.keys}
    text = fix if isinstance(fix, str) else " ".join(f"{k}={v}" for k, v in (fix or {}).items())
    fixed |= parse_fixed(text)
    if "schedule" in fixed:
        fixed["schedule"] = family(fixed["schedule"]).name
    return fixed


def request_of(
    options: PlanOptions,
    fixed: Mapping[str, int | str],
    assumptions: Mapping[str, Any],
    precision: str | None,
) -> PlanRequest:
    """A request to the planner."""
    from fivefold.planner import plan_request

    if options.machine is None:
        raise FivefoldError(
            f"a search needs the machine: give one of {', '.join(machines.presets())}, or a file; "
            f'or give the layout, such as "dp={options.gpus}"'
        )
    checked_precision = one_of("--precision", precision or options.precision, PRECISIONS)
    machine = machines.load(options.machine)
    return plan_request(options, machine, fixed, precision=checked_precision, **assumptions)


def best_of(
    request: PlanRequest, objective: str, top: int, on_progress: OnProgress | None = None
) -> PlanResult:
    """The best plans by an objective."""
    from fivefold.planner import OBJECTIVES, best_plans, fewest_gpu_hours, fewest_gpus

    def on_share(share: float) -> None:
        if on_progress is not None:
            on_progress(TaskProgress(share, 1.0, "search"))

    chosen = one_of("objective", objective, OBJECTIVES)
    find = {"tokens": best_plans, "gpus": fewest_gpus, "gpu-hours": fewest_gpu_hours}[chosen]
    return find(request, top, on_share)
