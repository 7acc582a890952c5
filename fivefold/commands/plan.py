"""`fivefold plan`: resolve a job or search its layout; print memory, time and reasons."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fivefold.bridges import (
    NAMES_NO_MODEL,
    EmittedPlan,
    Price,
    Priced,
    Values,
    emit_plan,
    options_of,
)
from fivefold.commands.job import (
    GivenJob,
    Model,
    above,
    foreign_answer,
    foreign_plan,
    given_job,
    one_of,
    reopened,
)
from fivefold.commands.options import (
    HeadroomKey,
    ImbalanceKey,
    PrecisionOption,
    SetKey,
    as_given,
    json_text,
    known_machines,
    only_with,
    option_name,
    progress_bar,
    require_known,
    shown_progress,
    tokens_of,
    typed,
    warn,
    with_machine,
    with_plan_options,
)
from fivefold.commands.search import (
    PlannedJob,
    SearchedPlans,
    best_of,
    checked_costs,
    estimate_given,
    estimate_options,
    estimated_job,
    fixed_values,
    plan,
    request_of,
    search,
    with_steps,
    write_plan,
)
from fivefold.core import FivefoldError, Machine, bullets
from fivefold.core import hardware as machines
from fivefold.core.layout import Layout, rules
from fivefold.core.model import KV_FORMATS, Shape
from fivefold.core.model import presets as models
from fivefold.core.plan import (
    TOKENS_PER_PARAMETER,
    USUAL_MFU,
    Plan,
    PlanOptions,
    parse_budget,
    resolve,
)
from fivefold.render import (
    Printed,
    RunCosts,
    before_after,
    budget_answer,
    estimate_json,
    job_table_answer,
    run_answer,
    strategies_json,
    strategies_text,
    sweep_json,
    sweep_text,
    textbook_answer,
    write_text,
)

if TYPE_CHECKING:
    from fivefold.planner import Estimate, PlanRequest
    from fivefold.planner.serving import EngineCommand, ServingChoice

# What is learned, and not how fast: no other value is near.
_OF_LEARNING = (
    *("optimizer", "lr_curve", "weight_decay", "clip", "lora", "lora_alpha", "lora_targets"),
    *("train_only", "dpo_beta", "packed", "balance"),
)


def emit(
    plan: Plan,
    target: str,
    assumptions: Mapping[str, Any] | None = None,
    precision: str | None = None,
) -> EmittedPlan:
    """The plan as a file of another framework. What that cannot express is listed, with the nearest
    that it can; with a machine each is priced under the `assumptions`. Raises if the file would
    learn something else, or does not fit the machine. Defaults that nobody planned are left out."""
    if assumptions is None:
        assumptions = estimate_options(0.05, "compiled", None, None)
    recipe = plan.options.train
    unplanned = {"lr", "steps"} & recipe.still_yours().keys()
    if unplanned and recipe.warmup is None:
        unplanned.add("warmup")
    emitted = emit_plan(target, plan, _priced(plan, assumptions, precision), unplanned)
    title = emitted.target.title
    lost = [loss for loss in emitted.losses if loss.key in _OF_LEARNING and not loss.left]
    if lost := [
        *lost,
        *(model_loss for model_loss in emitted.losses if model_loss.replacement == NAMES_NO_MODEL),
    ]:
        texts = [
            f"{change.key}={change.was}; {change.replacement} would be another job"
            for change in lost
        ]
        raise FivefoldError(
            bullets(f"{title} cannot say what this plan learns:", texts)
            + "\nleave it out of the plan, or choose another target"
        )
    if emitted.after is not None and emitted.after.too_large:
        raise FivefoldError(
            bullets(f"{title} cannot run this plan, {emitted.after}", emitted.lines)
            + "\nplan with more GPUs or more recomputation, or let `fivefold compare-frameworks` "
            "find the best layout that it has"
        )
    return emitted


def _priced(plan: Plan, assumptions: Mapping[str, Any], precision: str | None) -> Price:
    """The estimate of a plan like this one, with other values; None without a machine."""
    options = plan.options

    def price(values: Values) -> Priced | None:
        if options.machine is None:
            return None
        changed = options_of(values, options.model, options.set)
        changed = replace(changed, machine=options.machine)
        try:
            estimate = estimate_given(changed, assumptions, precision)[1]
        except FivefoldError:
            return None
        gib, limit = estimate.total / 2**30, estimate.setting.machine.memory / 2**30
        return Priced(estimate.step, gib, limit, estimate.verdict)

    return price


def emitted_answer(emitted: EmittedPlan) -> Printed:
    """What `fivefold plan --emit` prints."""
    losses = [
        {
            "key": loss.key,
            "was": loss.was,
            "now": None if loss.left else loss.replacement,
            "slower": loss.slower,
            "memory": None if loss.after is None else str(loss.after),
            "text": text,
        }
        for loss, text in zip(emitted.losses, emitted.lines, strict=True)
    ]
    table: dict[str, Any] = {"target": emitted.target.name, "file": emitted.text}
    table |= {"losses": losses, "notes": list(emitted.notes)}
    return table, [emitted.text.rstrip("\n")]


# Formats of weights that some engine serves; fivefold's own has the first.
_PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class ServingAnswer:
    """A serving plan: `choice` has the layouts. `str()` is the text of `fivefold plan --serve`,
    `to_json()` its JSON, `flags` the command of another engine."""

    choice: ServingChoice

    @cached_property
    def _answer(self) -> Printed:
        from fivefold.render import serving_answer

        return serving_answer(self.choice)

    def to_json(self) -> dict[str, Any]:
        """What `fivefold plan --serve --json` prints."""
        return self._answer[0]

    def flags(self, engine: str) -> EngineCommand:
        """The choice as the command line of vllm, sglang or trtllm."""
        from fivefold.planner.serving import emit_flags

        return emit_flags(engine, self.choice.chosen)

    def __str__(self) -> str:
        return "\n".join(self._answer[1])


def plan_serving(
    model: Model,
    *,
    prompt: int = 2048,
    output: int = 256,
    rate: float | None = None,
    concurrency: int | None = None,
    ttft: float | None = None,
    tpot: float | None = None,
    kv: str = "bf16",
    precision: str | None = None,
    headroom: float = 0.05,
    imbalance: float = 1.0,
    price: float | None = None,
    **keys: Any,
) -> ServingAnswer:
    """The best layouts to serve a model on `gpus` GPUs of a `machine`, or a given `layout`.

    `rate` (requests a second) or `concurrency`: the load. `ttft` and `tpot`: bounds in seconds.
    `kv` and `precision`: formats of the cache and of weights. `keys` as for `plan`.
    """
    from fivefold.cost import require_possible_imbalance
    from fivefold.planner.serving import fit as serving_fit
    from fivefold.planner.serving import plans as serving

    job = reopened(given_job(model, keys))
    options = job.options
    if options.machine is None:
        raise FivefoldError(
            f"serving needs the machine: give one of {', '.join(machines.presets())}"
        )
    if not 0 <= headroom < 1:
        raise FivefoldError(f"headroom {headroom}: give a share of the memory from 0 to below 1")
    shape, machine = _shape_of(options), machines.load(options.machine)
    one_of("kv", kv, KV_FORMATS)
    machine.peak(one_of("--precision", precision or "bf16", _PRECISIONS))  # the chip may lack it
    require_possible_imbalance(shape, imbalance)
    layout = None if job.is_open else _layout_of(options, shape, machine, prompt)
    gpus = options.gpus or (1 if layout is None else layout.world)
    request = serving_fit.ServingRequest(
        *(shape, machine, gpus, prompt, output, rate, concurrency, ttft, tpot),
        *(precision or "bf16", kv, headroom, imbalance, price, layout),
    )
    return ServingAnswer(serving.plan_serving(request))


def _shape_of(options: PlanOptions) -> Shape:
    return models.with_overrides(models.load(options.model), options.set)


def _layout_of(options: PlanOptions, shape: Shape, machine: Machine, prompt: int) -> Layout:
    """The layout that was given."""
    layout = Layout.parse(options.layout, zero=0)
    if layout.cp > 1:
        raise FivefoldError(
            f"cp={layout.cp}: serving plans have no context parallelism; leave cp out"
        )
    layout = replace(layout, sp=shape.moe is not None and layout.tp > 1)
    rules.check(layout, shape, seq=max(prompt, layout.tp, 1), gpus=options.gpus)
    machine.tier_of((0, layout.world - 1))
    return layout


TokensOption = Annotated[
    float | None, typer.Option(help="Tokens of the full run, for days and GPU-hours.")
]
SweepOption = Annotated[
    str | None, typer.Option(help="Curves: seq=4k..1m, gpus=8..16384, tp=1..8, or tp.")
]
TableOption = Annotated[
    str | None, typer.Option(help="zero3-or-pipeline, data-or-model or memory.")
]
RunOption = Annotated[
    str | None, typer.Option("--run", help="A great run by name, beside our estimate of it.")
]
EmitOption = Annotated[
    str | None,
    typer.Option(
        help="Print the plan for another program: megatron, bridge, torchtitan, torchtitan-main, "
        "deepspeed, nanotron, accelerate, axolotl; with --serve vllm, sglang or trtllm.",
        show_default=False,
    ),
]
FixKey = Annotated[
    str | None, SetKey("Values that a search must use, as in fix=tp=8 or fix='tp=8 pp=2'.")
]
MtbfKey = Annotated[
    float | None,
    SetKey(
        "Hours between two failures of one GPU, for days with failures (default: the machine's)."
    ),
]


@partial(with_plan_options, default_target="")
def run(
    plan_options: PlanOptions,
    command: typer.Context,
    tokens: TokensOption = None,
    precision: PrecisionOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Each dimension alone.")] = False,
    sweep: SweepOption = None,
    table: TableOption = None,
    great_run: RunOption = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Plan to serve the model, not to train it.")
    ] = False,
    prompt: Annotated[
        int | None, typer.Option(help="With --serve: tokens of a prompt (default 2048).")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="With --serve: tokens of an answer (default 256).")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="With --serve: requests at a time.")
    ] = None,
    emit: EmitOption = None,
    file: Annotated[
        Path | None,
        typer.Option("-o", help="File to write: the plan as TOML, or what --emit prints."),
    ] = None,
    fix: FixKey = None,
    top: Annotated[int, SetKey("Layouts in the ranked table.")] = 10,
    objective: Annotated[
        str, SetKey("Best by: tokens (per second), gpus (fewest), gpu-hours (fewest).")
    ] = "tokens",
    price: Annotated[float | None, SetKey("Price of a GPU-hour.")] = None,
    mtbf_gpu: MtbfKey = None,
    headroom: HeadroomKey = 0.05,
    kernels: Annotated[
        str, SetKey("compiled, eager or graphs: what blocks save, how they launch.")
    ] = "compiled",
    stack: Annotated[
        str | None, SetKey("Price other people's software: nemo, torchtitan, a file.")
    ] = None,
    imbalance: ImbalanceKey = None,
    what_if: Annotated[
        str | None, SetKey("Compare with a changed job: what_if=gpus=2x, what_if=machine=gb200.")
    ] = None,
    textbook: Annotated[bool, SetKey("The textbook's formulas with their numbers.")] = False,
    budget: Annotated[
        str | None,
        SetKey("Compute-optimal size and tokens: budget=1e24 FLOPs or budget='512 h100 30 days'."),
    ] = None,
    tokens_per_parameter: Annotated[
        float, SetKey("Tokens per active parameter, for budget.")
    ] = TOKENS_PER_PARAMETER,
    mfu: Annotated[float, SetKey("Share of the peak that budget assumes of GPUs.")] = USUAL_MFU,
    rate: Annotated[float | None, SetKey("With --serve: requests a second.")] = None,
    ttft: Annotated[float | None, SetKey("With --serve: most seconds to the first token.")] = None,
    tpot: Annotated[float | None, SetKey("With --serve: most seconds between two tokens.")] = None,
    kv: Annotated[
        str | None, SetKey("With --serve: format of the cache, bf16 or fp8 (default bf16).")
    ] = None,
    model: Annotated[
        str | None, SetKey("The model of another framework's file, if that names none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Resolve a job or search its layout: memory, time and reasons."""
    question = PlanQuestion(
        command=command,
        as_json=as_json,
        file=file,
        emit=emit,
        great_run=great_run,
        budget=budget,
        tokens_per_parameter=tokens_per_parameter,
        mfu=mfu,
        textbook=textbook,
        compare=compare,
        sweep=sweep,
        table=table,
        what_if=what_if,
        fix=fix,
        top=above("top", top, 0),
        objective=objective,
        costs=checked_costs(tokens, price, mtbf_gpu),
        precision=precision,
        assumptions=estimate_options(headroom, kernels, imbalance, stack),
    )
    serving = ServingOptions(prompt, output, rate, concurrency, ttft, tpot, kv)
    require_known(plan_options.machine)
    if serve:
        _serve(plan_options, serving, question)
        return
    _require_together(serving, question)
    printed = _answer_of(plan_options, question)
    foreign = foreign_plan(command.params["target"], plan_options.gpus, model)
    if foreign is not None and not emit:
        printed = foreign_answer(foreign, printed)
    typer.echo(json_text(printed[0]) if as_json else "\n".join(printed[1]))


@dataclass(frozen=True)
class PlanQuestion:
    """What a command line asks of a job."""

    command: typer.Context
    as_json: bool
    file: Path | None  # to write
    emit: str | None
    great_run: str | None
    budget: str | None
    tokens_per_parameter: float
    mfu: float
    textbook: bool
    compare: bool
    sweep: str | None
    table: str | None
    what_if: str | None
    fix: str | None
    top: int
    objective: str
    costs: RunCosts
    precision: str | None
    assumptions: Mapping[str, Any]  # of estimates


class ServingOptions(NamedTuple):
    """What is for --serve alone."""

    prompt: int | None
    output: str | None
    rate: float | None
    concurrency: int | None
    ttft: float | None
    tpot: float | None
    kv: str | None


def _require_together(serving: ServingOptions, question: PlanQuestion) -> None:
    """Refuse what is for --serve alone, and what --emit has no file for."""
    output, command = serving.output, question.command
    if output is not None and not output.replace("_", "").isalnum():
        raise FivefoldError(f"--output {output} is a number of tokens: write a file with -o")
    if alone := [name for name, value in serving._asdict().items() if value is not None]:
        raise FivefoldError(f"{option_name(command, alone[0])} is for --serve: give both")
    if question.emit and (extras := [name for name in _NOT_EMITTED if getattr(question, name)]):
        extra = option_name(command, extras[0])
        raise FivefoldError(f"--emit prints one plan: leave {extra} out")


def _answer_of(plan_options: PlanOptions, question: PlanQuestion) -> Printed:
    """What the command line asks: a run, a formula, a fixed layout or a search."""
    command = question.command
    job = as_given(plan_options, command)
    if question.great_run is not None:
        only_with(command, "great_run", _OF_A_RUN)
        headroom, stack = question.assumptions["headroom"], question.assumptions["stack"]
        run_plan, table, lines = run_answer(question.great_run, headroom, stack, question.costs)
        if question.file is not None:
            write_plan(question.file, run_plan)
        return table, lines
    if question.budget is not None:
        only_with(command, "budget", _OF_A_BUDGET)
        spent = parse_budget(question.budget, question.mfu, question.precision or "bf16")
        return budget_answer(spent, question.tokens_per_parameter, plan_options.model or None)
    job = estimated_job(job, question.assumptions["kernels"], question.precision)
    if question.textbook:
        only_with(command, "textbook", _OF_A_TEXTBOOK)
        return textbook_answer(job.options, job.is_open)
    if alone := [key for key in ("mfu", "tokens_per_parameter") if typed(command, key)]:
        raise FivefoldError(f"{alone[0]} is for budget: give both")
    if job.options.gpus is not None and job.is_open:
        options = with_machine(job.options, question.as_json)
        return _searched(replace(job, options=options), question)
    if job.options.machine is None:
        _require_no_estimates(job.keys)
        return _written(plan(job), question)
    return _estimated(job, question)


def _serve(plan_options: PlanOptions, serving: ServingOptions, question: PlanQuestion) -> None:
    """Print a serving plan, or with `--emit` the command of another engine."""
    only_with(question.command, "serve", _OF_SERVING)
    job = as_given(plan_options, question.command)
    serving_plan = plan_serving(
        replace(job, options=with_machine(plan_options, question.as_json)),
        prompt=2048 if serving.prompt is None else serving.prompt,
        output=tokens_of("--output", serving.output or 256),
        rate=serving.rate,
        concurrency=serving.concurrency,
        ttft=serving.ttft,
        tpot=serving.tpot,
        kv=serving.kv or "bf16",
        precision=question.precision,
        headroom=question.assumptions["headroom"],
        imbalance=question.assumptions["imbalance"],
        price=question.costs.price,
    )
    text = str(serving_plan)
    if question.emit is not None:
        text = serving_plan.flags(question.emit).script.rstrip("\n")
    if question.file is not None:
        write_text(question.file, text + "\n")
    typer.echo(json_text(serving_plan.to_json()) if question.as_json else text)


_OF_SERVING = (
    *("target", "layout", "machine", "gpus", "set", "precision", "headroom", "imbalance", "price"),
    *("output", "file", "serve", "prompt", "rate", "concurrency", "ttft", "tpot", "kv", "emit"),
    "model",
)
_COSTS = ("tokens", "price", "mtbf_gpu")
_NOT_EMITTED = ("great_run", "textbook", "budget", "what_if", "compare", "sweep", "table")
_OF_A_RUN = ("great_run", "stack", "headroom", "file", *_COSTS)
_OF_A_BUDGET = ("target", "budget", "tokens_per_parameter", "mfu", "precision")
_OF_A_TEXTBOOK = (
    *("target", "textbook", "layout", "gpus", "machine", "seq", "batch", "microbatch_size"),
    *("microbatches", "schedule", "chunks", "set"),
)


def _require_no_estimates(set_options: Collection[str]) -> None:
    """Refuse options that need a machine."""
    needs = ("fix", *_COSTS, "what_if", "compare", "sweep", "table", "precision")
    needs = (*needs, "imbalance", "stack")
    if conflicts := [name for name in needs if name in set_options]:
        raise FivefoldError(
            f"{conflicts[0]} is for estimates: name the machine with --machine ({known_machines()})"
        )


def _written(answer: PlannedJob | SearchedPlans, question: PlanQuestion) -> Printed:
    """An answer as JSON and lines; `-o` writes its plan, or what is emitted."""
    if question.emit is not None:
        # The plan for another framework; losses are comments in its file, or else said beside it.
        name, file = question.emit or "", question.file
        if name == "torchtitan" and file is not None and file.suffix == ".py":
            name = "torchtitan-main"
        emitted = emit(answer.plan, name, question.assumptions, question.precision)
        if file is not None:
            write_text(file, emitted.text)
        if not emitted.target.comments and not question.as_json:
            for line in (*emitted.lines, *emitted.notes):
                warn(line)
        return emitted_answer(emitted)
    if question.file is not None:
        write_plan(question.file, answer.plan, question.costs.tokens)
    return answer.to_json(), [str(answer)]


def _estimated(job: GivenJob, question: PlanQuestion) -> Printed:
    """A plan with a fixed layout, and its estimates."""
    from fivefold.planner import parse_changes, scale_plan

    if question.fix is not None or question.objective != "tokens":
        raise FivefoldError("fix and objective are for a search: leave --layout out")
    assumptions, precision = question.assumptions, question.precision
    if question.compare or question.sweep or question.table:
        resolved = resolve(job.options)
        plan_options = replace(job.options, gpus=resolved.layout.world)
        if question.table:
            batch = resolved.batch
            plan_options = replace(plan_options, seq=batch.seq, batch=batch.sequences)
        request = request_of(plan_options, {}, assumptions, precision)
        return _tables(request, question, resolved)
    if question.what_if is None:
        costs = question.costs._asdict()
        return _written(plan(job, precision=precision, **costs, **assumptions), question)
    base_plan, estimate = estimate_given(job.options, assumptions, precision)
    if question.file is not None:
        tokens = question.costs.tokens
        write_plan(question.file, with_steps(base_plan, tokens), tokens)
    scaled = scale_plan(base_plan, parse_changes(question.what_if))
    _, changed = estimate_given(scaled, assumptions, precision or job.options.precision)
    return _what_if(estimate, changed, question.what_if)


def _searched(job: GivenJob, question: PlanQuestion) -> Printed:
    """The best layouts of the search space."""
    from fivefold.planner import apply_changes, parse_changes

    assumptions, precision = question.assumptions, question.precision
    if question.compare or question.sweep or question.table or question.what_if is not None:
        fixed = fixed_values(job, question.fix)
        request = request_of(job.options, fixed, assumptions, precision)
        if question.what_if is None:
            return _tables(request, question)
        space = request.space
        changed = apply_changes(
            replace(request.options, batch=space.batch),
            parse_changes(question.what_if),
            gpus=space.gpus,
            seq=space.seq,
            batch=space.batch,
        )
        requests = (request, request_of(changed, fixed, assumptions, precision))
        with shown_progress("search") as on_progress:
            before, after = (
                best_of(request, question.objective, 1, on_progress).plans[0]
                for request in requests
            )
        return _what_if(before, after, question.what_if)
    with shown_progress("search") as on_progress:
        plans = search(
            job,
            fix=question.fix,
            top=question.top,
            objective=question.objective,
            precision=precision,
            **question.costs._asdict(),
            **assumptions,
            on_progress=on_progress,
        )
    return _written(plans, question)


def _what_if(before: Estimate, after: Estimate, change: str) -> Printed:
    layouts = [estimate_json(before, []), estimate_json(after, [])]
    return {"what_if": change, "layouts": layouts}, before_after(before, after, change)


def _tables(request: PlanRequest, question: PlanQuestion, plan: Plan | None = None) -> Printed:
    """The tables of `--table`, `--compare` and `--sweep`."""
    from fivefold.planner import TABLES, job_table, single_axis_strategies, sweep, sweep_values

    if question.table:
        return job_table_answer(job_table(one_of("--table", question.table, TABLES), request, plan))
    if question.compare:
        strategies = list(single_axis_strategies(request))
        best = _first_choice(request)
        table: dict[str, Any] = {"strategies": strategies_json(strategies)}
        table["best"] = None if best is None else estimate_json(best, [])
        return table, strategies_text(strategies, best)
    axis, values = sweep_values(request, question.sweep or "")
    with progress_bar("sweep") as bar:
        points = list(sweep(request, axis, values, bar.update))
    table = {"axis": axis, "points": sweep_json(axis, points)}
    return table, sweep_text(axis, values, points)


def _first_choice(request: PlanRequest) -> Estimate | None:
    """The first choice of a search, or None if nothing fits."""
    from fivefold.planner import best_plans

    try:
        return best_plans(request, 1).plans[0]
    except FivefoldError:
        return None
