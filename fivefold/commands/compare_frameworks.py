"""`fivefold compare-frameworks`: the best layout that each framework can express."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fivefold.bridges import (
    TARGETS,
    Expressed,
    Priced,
    Target,
    Values,
    express,
    model_losses,
    options_of,
    possible_values,
    values_of,
)
from fivefold.commands.job import GivenJob, Model, OnProgress, TaskProgress, given_job, is_foreign
from fivefold.commands.options import (
    HeadroomKey,
    PrecisionOption,
    SetKey,
    only_with,
    print_answer,
    require_known,
    shown_progress,
    with_machine,
    with_plan_options,
)
from fivefold.commands.search import estimate_given, estimate_options, estimated_job, request_of
from fivefold.core import PRESETS, FivefoldError, tables
from fivefold.core.plan import PlanOptions
from fivefold.render import FrameworkRow, frameworks_json, frameworks_text

if TYPE_CHECKING:
    from fivefold.planner import Estimate, PlanRequest, PlanResult


@with_plan_options
def run(
    plan_options: PlanOptions,
    command: typer.Context,
    stack: Annotated[bool, SetKey("Price each as its own software runs it, where known.")] = False,
    headroom: HeadroomKey = 0.05,
    precision: PrecisionOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Price the best layout that each framework can express, beside fivefold's best."""
    only_with(command, "gpus", _TAKEN)
    require_known(plan_options.machine)
    target: str = command.params["target"]
    closed = target.endswith(".toml") or is_foreign(target)
    if plan_options.gpus is not None:
        plan_options = with_machine(plan_options, as_json)
    job = GivenJob(plan_options, frozenset(), not closed)
    with shown_progress("compare") as on_progress:
        comparison = compare_frameworks(
            job, stack=stack, headroom=headroom, precision=precision, on_progress=on_progress
        )
    print_answer(comparison, as_json)


_TAKEN = ("target", "gpus", "machine", "seq", "batch", "set", "stack", "headroom", "precision")


_TRIED = 6  # of the restricted search, the fastest
_TOO_LARGE = "does not fit"


@dataclass(frozen=True)
class FrameworkComparison:
    """fivefold's best layout, and the best that each framework can express.

    `str()` is the text of `fivefold compare-frameworks`, `to_json()` its JSON.
    """

    request: PlanRequest
    best: Estimate
    rows: tuple[FrameworkRow, ...]

    @cached_property
    def _job(self) -> dict[str, Any]:
        space, setting = self.request.space, self.request.setting
        return {
            "model": self.request.shape.name,
            "machine": setting.machine.name,
            "gpus": space.gpus,
            "seq": space.seq,
            "batch": space.batch,
            "precision": setting.precision,
        }

    def to_json(self) -> dict[str, Any]:
        """What `fivefold compare-frameworks --json` prints."""
        return frameworks_json(self._job, self.best, self.rows)

    def __str__(self) -> str:
        return "\n".join(frameworks_text(self._job, self.best, self.rows))


def compare_frameworks(
    model: Model,
    *,
    stack: bool = False,
    headroom: float = 0.05,
    precision: str | None = None,
    on_progress: OnProgress | None = None,
    **keys: Any,
) -> FrameworkComparison:
    """The best layout for `gpus` GPUs of a `machine` that each framework can express, beside ours.

    `stack`: price each as its own software runs it, where `presets/frameworks.toml` names a stack.
    """
    from fivefold.planner import best_plans

    job = estimated_job(given_job(model, keys), "compiled", precision)
    if not job.is_open or job.options.gpus is None:
        raise FivefoldError(
            "frameworks are compared by a search: give a model and the number of GPUs, as in "
            "llama-3.1-8b --gpus 64, and leave the layout out"
        )
    named = stack_names() if stack else {}
    keywords = estimate_options(headroom, "compiled", None, None)
    request = request_of(job.options, {}, keywords, precision)
    results: dict[str, _BestPlan] = {}
    searched: dict[Any, PlanResult] = {}
    for index, target in enumerate(TARGETS.values()):
        if on_progress is not None:
            on_progress(TaskProgress(index, len(TARGETS), target.title))
        own = {**keywords, "stack": named.get(target.name)}
        results[target.name] = _best_of(target, job.options, own, precision, searched)
    # What another framework can say fivefold runs as well.
    ours = [
        result.estimate for result in results.values() if result.estimate and result.stack is None
    ]
    best = min([best_plans(request, 1).fastest, *ours], key=lambda estimate: estimate.step)
    rows = [_row(TARGETS[name], result, best) for name, result in results.items()]
    return FrameworkComparison(request, best, tuple(rows))


def stack_names() -> dict[str, str]:
    """The stack of each target that has one."""
    stacks: dict[str, str] = tables.read_toml(PRESETS / "frameworks.toml")["stacks"]
    return stacks


class _BestPlan(NamedTuple):
    """The best plan that a target can say, or why there is none."""

    stack: str | None
    estimate: Estimate | None = None
    changed: tuple[str, ...] = ()
    refused: str | None = None


def _best_of(
    target: Target,
    options: PlanOptions,
    assumptions: Mapping[str, Any],
    precision: str | None,
    searched: dict[Any, PlanResult],
) -> _BestPlan:
    """The best that a target can express; `searched`: answers for others that can say the same."""
    from fivefold.planner import NothingFits, best_plans

    request = request_of(options, {}, assumptions, precision)
    everything = possible_values(target, request.shape, request.space.gpus)
    fixed = {} if True in everything.get("sp", {True}) else {"sp": False}
    spaces, refused = [everything], ""
    fitting: list[tuple[Expressed, Estimate]] = []
    while spaces:
        only = spaces.pop()
        narrow = replace(request, space=replace(request.space, only=only, fixed=fixed))
        same = (assumptions["stack"], *sorted(only), *(only[name] for name in sorted(only)))
        try:
            result = searched.get(same) or best_plans(narrow, _TRIED)
        except NothingFits as error:
            refused = refused or f"of what it can say, {error}"
            continue
        searched[same] = result
        plans = (result.fastest, *result.plans)
        priced = [_expressed(target, candidate, assumptions, precision) for candidate in plans]
        fitting += [pair for pair in priced if pair and pair[1].verdict != _TOO_LARGE]
        if only is everything:  # degrees that cannot be beside others: without them, too
            lost = {loss.key for pair in priced if pair for loss in pair[0].losses}
            alone = sorted(lost & {"tp", "cp", "ep"})
            spaces += [{**everything, axis: frozenset({1})} for axis in alone]
    if not fitting:
        refused = refused or f"its {_TRIED} fastest layouts do not fit as it can say them"
        return _BestPlan(assumptions["stack"], refused=refused)
    nearest, estimate = min(fitting, key=lambda pair: pair[1].step)
    changed = tuple(change.text(target.title) for change in nearest.losses if not change.left)
    return _BestPlan(assumptions["stack"], estimate, changed)


def _row(target: Target, theirs: _BestPlan, best: Estimate) -> FrameworkRow:
    """The best of a target beside ours."""
    slower = None if theirs.estimate is None else theirs.estimate.step / best.step - 1
    return FrameworkRow(
        *(target.name, target.title, theirs.stack, _lacks(target, best)),
        *(theirs.estimate, slower, theirs.changed, theirs.refused),
    )


def _expressed(
    target: Target,
    estimate: Estimate,
    assumptions: Mapping[str, Any],
    precision: str | None,
) -> tuple[Expressed, Estimate] | None:
    """A plan as the target's file says it, and its price."""
    plan = estimate.plan
    options, before = plan.options, values_of(plan)
    try:
        nearest = express(target, before, (options.model, options.set, plan.shape), _free)
        values = {**nearest.values, **{key: before[key] for key in target.left}}
        rows, left = divmod(plan.batch.sequences, values["replicate"] * values["shard"])
        values["microbatches"], remainder = divmod(rows, values["microbatch_size"])
        if left or remainder:  # no longer the same batch
            return None
        changed = options_of(values, options.model, options.set)
        changed = replace(changed, machine=options.machine)
        return nearest, estimate_given(changed, assumptions, precision)[1]
    except FivefoldError:
        return None


def _lacks(target: Target, best: Estimate) -> tuple[str, ...]:
    """What of our best plan the target cannot say, as key=value."""
    plan = best.plan
    model = (plan.options.model, plan.options.set, plan.shape)
    unknown = [model_loss for model_loss in model_losses(target, plan.shape) if not model_loss.left]
    try:
        expressed = express(target, values_of(plan), model, _free)
    except FivefoldError as error:
        return (str(error),)
    losses = [*unknown, *(loss for loss in expressed.losses if not loss.left)]
    return tuple(loss.name for loss in losses)


def _free(_values: Values) -> Priced | None:
    """No price: the nearest is taken."""
    return None
