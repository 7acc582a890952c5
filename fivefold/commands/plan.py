"""`fivefold plan`: resolve a job or search its layout; print memory, time and reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    positive,
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
from fivefold.core.model import Shape
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

    pass

# What is learned, and not how fast: no other value is near.
_OF_LEARNING = (
    *("optimizer", "lr_curve", "weight_decay", "clip", "lora", "lora_alpha", "lora_targets"),
    *("train_only", "dpo_beta", "packed", "balance"),
)


def emit(
    plan: Plan, target: str, how: Mapping[str, Any] | None = None, precision: str | None = None
) -> EmittedPlan:
    """The plan as a file of another framework. What that cannot express is listed, with the nearest
    that it can; with a machine each is priced under the assumptions `how`. Raises if the file would
    learn something else, or does not fit the machine. Defaults that nobody planned are left out."""
    usual = estimate_options(0.05, "compiled", None, None) if how is None else how
    recipe = plan.options.train
    unplanned = {"lr", "steps"} & recipe.still_yours().keys()
    if unplanned and recipe.warmup is None:
        unplanned.add("warmup")
    emitted = emit_plan(target, plan, _priced(plan, usual, precision), unplanned)
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


def _priced(plan: Plan, how: Mapping[str, Any], precision: str | None) -> Price:
    """The estimate of a plan like this one, with other values; None without a machine."""
    options = plan.options

    def price(values: Values) -> Priced | None:
        if options.machine is None:
            return None
        changed = options_of(values, options.model, options.set)
        try:
            estimate = estimate_given(replace(changed, machine=options.machine), how, precision)[1]
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
    one_of("kv", kv, serving_fit.KV_FORMATS)
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
    serving = {"prompt": prompt, "rate": rate, "concurrency": concurrency}
    serving |= {"ttft": ttft, "tpot": tpot, "kv": kv, "output": output}
    options: dict[str, Any] = {
        "fix": fix,
        "top": above("top", top, 0),
        "tokens": None if tokens is None else positive("--tokens", tokens),
        "price": None if price is None else positive("price", price),
        "objective": objective,
        "precision": precision,
        "how": estimate_options(headroom, kernels, imbalance, stack),
        "what_if": what_if,
        "compare": compare,
        "sweep": sweep,
        "table": table,
        "file": file,
        "great_run": great_run,
        "textbook": textbook,
        "budget": budget,
        "ratio": tokens_per_parameter,
        "mfu": mfu,
    }
    options |= {"emit": emit, "mtbf_gpu": mtbf_gpu, "as_json": as_json}
    require_known(plan_options.machine)
    if serve:
        _serve(plan_options, serving, options, command)
        return
    _require_together(command, serving, options)
    printed = _answer_of(plan_options, options, command)
    read = foreign_plan(command.params["target"], plan_options.gpus, model)
    if read is not None and not emit:
        printed = foreign_answer(read, printed)
    typer.echo(json_text(printed[0]) if as_json else "\n".join(printed[1]))


def _require_together(
    command: typer.Context, serving: dict[str, Any], options: dict[str, Any]
) -> None:
    """Refuse what is for --serve alone, and what --emit has no file for."""
    output = serving["output"]
    if output is not None and not output.replace("_", "").isalnum():
        raise FivefoldError(f"--output {output} is a number of tokens: write a file with -o")
    if alone := [name for name, value in serving.items() if value is not None]:
        raise FivefoldError(f"{option_name(command, alone[0])} is for --serve: give both")
    if options["emit"] and (extras := [name for name in _NOT_EMITTED if options[name]]):
        extra = option_name(command, extras[0])
        raise FivefoldError(f"--emit prints one plan: leave {extra} out")


def _answer_of(
    plan_options: PlanOptions, options: dict[str, Any], command: typer.Context
) -> Printed:
    """What the command line asks: a run, a formula, a given layout or a search."""
    job = as_given(plan_options, command)
    if options["great_run"] is not None:
        only_with(command, "great_run", _OF_A_RUN)
        return _great_run(options["great_run"], options)
    if options["budget"] is not None:
        only_with(command, "budget", _OF_A_BUDGET)
        spent = parse_budget(options["budget"], options["mfu"], options["precision"] or "bf16")
        return budget_answer(spent, options["ratio"], plan_options.model or None)
    job = estimated_job(job, options["how"]["kernels"], options["precision"])
    if options["textbook"]:
        only_with(command, "textbook", _OF_A_TEXTBOOK)
        return textbook_answer(job.options, job.is_open)
    if alone := [key for key in ("mfu", "tokens_per_parameter") if typed(command, key)]:
        raise FivefoldError(f"{alone[0]} is for budget: give both")
    return _planned(job, options)


def _serve(
    plan_options: PlanOptions,
    serving: dict[str, Any],
    options: dict[str, Any],
    command: typer.Context,
) -> None:
    """Print a serving plan, or with `--emit` the command of another engine."""
    only_with(command, "serve", _OF_SERVING)
    plan_args = {name: serving[name] for name in ("rate", "concurrency", "ttft", "tpot")}
    plan_args |= {"kv": serving["kv"] or "bf16", "precision": options["precision"]}
    plan_args |= {name: options["how"][name] for name in ("headroom", "imbalance")}
    plan_args |= {"prompt": 2048 if serving["prompt"] is None else serving["prompt"]}
    plan_args |= {"output": tokens_of("--output", serving["output"] or 256)}
    job = as_given(plan_options, command)
    job = replace(job, options=with_machine(plan_options, options["as_json"]))
    serving_plan = plan_serving(job, price=options["price"], **plan_args)
    emitted = None if options["emit"] is None else serving_plan.flags(options["emit"])
    text = str(serving_plan) if emitted is None else emitted.script.rstrip("\n")
    if (path := options["file"]) is not None:
        write_text(path, text + "\n")
    typer.echo(json_text(serving_plan.to_json()) if options["as_json"] else text)


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


def _great_run(name: str, options: dict[str, Any]) -> Printed:
    """A published run beside our estimate; `-o` writes its plan."""
    settings = options["how"]
    costs = RunCosts(*(options[key] for key in _COSTS))
    plan, table, lines = run_answer(name, settings["headroom"], settings["stack"], costs)
    if (output := options["file"]) is not None:
        write_plan(output, plan)
    return table, lines


def _planned(job: GivenJob, options: dict[str, Any]) -> Printed:
    """A search over GPUs, which need a machine; else the estimate of one layout, or without a
    machine the plan alone."""
    if job.options.gpus is not None and job.is_open:
        named = with_machine(job.options, options["as_json"])
        return _searched(replace(job, options=named), options)
    if job.options.machine is None:
        _require_no_estimates(job.keys)
        return _written(plan(job), options)
    return _given(job, options)


def _require_no_estimates(set_options: Collection[str]) -> None:
    """Refuse options that need a machine."""
    needs = ("fix", *_COSTS, "what_if", "compare", "sweep", "table", "precision")
    needs = (*needs, "imbalance", "stack")
    if conflicts := [name for name in needs if name in set_options]:
        raise FivefoldError(
            f"{conflicts[0]} is for estimates: name the machine with --machine ({known_machines()})"
        )


def _written(found: PlannedJob | SearchedPlans, options: dict[str, Any]) -> Printed:
    """An answer as JSON and lines; `-o` writes its plan, or what is emitted."""
    if options["emit"] is not None:
        return _emitted(found.plan, options)
    if (output := options["file"]) is not None:
        write_plan(output, found.plan, options["tokens"])
    return found.to_json(), [str(found)]


def _emitted(chosen: Plan, options: dict[str, Any]) -> Printed:
    """The plan for another framework; losses are comments in its file, or else said beside it."""
    name, output = options["emit"], options["file"]
    if name == "torchtitan" and output is not None and output.suffix == ".py":
        name = "torchtitan-main"
    emitted = emit(chosen, name, options["how"], options["precision"])
    if output is not None:
        write_text(output, emitted.text)
    if not emitted.target.comments and not options["as_json"]:
        for line in (*emitted.lines, *emitted.notes):
            warn(line)
    return emitted_answer(emitted)


def _given(job: GivenJob, options: dict[str, Any]) -> Printed:
    """A plan with a given layout, and its estimates."""
    from fivefold.planner import parse_changes, scale_plan

    if options["fix"] is not None or options["objective"] != "tokens":
        raise FivefoldError("fix and objective are for a search: leave --layout out")
    settings, precision = options["how"], options["precision"]
    if options["compare"] or options["sweep"] or options["table"]:
        resolved = resolve(job.options)
        plan_options = replace(job.options, gpus=resolved.layout.world)
        if options["table"]:
            batch = resolved.batch
            plan_options = replace(plan_options, seq=batch.seq, batch=batch.sequences)
        return _tables(request_of(plan_options, {}, settings, precision), options, resolved)
    if options["what_if"] is None:
        costs = {key: options[key] for key in _COSTS}
        return _written(plan(job, precision=precision, **costs, **settings), options)
    base_plan, estimate = estimate_given(job.options, settings, precision)
    if (output := options["file"]) is not None:
        write_plan(output, with_steps(base_plan, options["tokens"]), options["tokens"])
    scaled = scale_plan(base_plan, parse_changes(options["what_if"]))
    _, changed = estimate_given(scaled, settings, precision or job.options.precision)
    return _what_if(estimate, changed, options["what_if"])


def _searched(job: GivenJob, options: dict[str, Any]) -> Printed:
    """The best layouts of the search space."""
    settings, precision = options["how"], options["precision"]
    if options["compare"] or options["sweep"] or options["table"]:
        fixed = fixed_values(job, options["fix"])
        return _tables(request_of(job.options, fixed, settings, precision), options)
    with shown_progress("search") as on_progress:
        if options["what_if"] is not None:
            base_result, then = (
                best_of(request, options["objective"], 1, on_progress)
                for request in _both(job, options)
            )
            return _what_if(base_result.plans[0], then.plans[0], options["what_if"])
        chosen = {key: options[key] for key in ("fix", "top", "objective", *_COSTS)}
        chosen |= {"precision": precision, **settings}
        return _written(search(job, **chosen, on_progress=on_progress), options)


def _both(job: GivenJob, options: dict[str, Any]) -> Iterator[PlanRequest]:
    """What is searched now, and what if it were changed."""
    from fivefold.planner import apply_changes, parse_changes

    fixed, precision = fixed_values(job, options["fix"]), options["precision"]
    request = request_of(job.options, fixed, options["how"], precision)
    yield request
    question = request.space
    sizes = {"gpus": question.gpus, "seq": question.seq, "batch": question.batch}
    plan_options = replace(request.options, batch=question.batch)
    changed = apply_changes(plan_options, parse_changes(options["what_if"]), **sizes)
    yield request_of(changed, fixed, options["how"], precision)


def _what_if(before: Estimate, after: Estimate, words: str) -> Printed:
    table = {
        "what_if": words,
        "layouts": [estimate_json(before, []), estimate_json(after, [])],
    }
    return table, before_after(before, after, words)


def _tables(asked: PlanRequest, options: dict[str, Any], given: Plan | None = None) -> Printed:
    """The tables of `--table`, `--compare` and `--sweep`."""
    from fivefold.planner import TABLES, job_table, single_axis_strategies, sweep, sweep_values

    if options["table"]:
        chosen = job_table(one_of("--table", options["table"], TABLES), asked, given)
        return job_table_answer(chosen)

    if options["compare"]:
        strategies = list(single_axis_strategies(asked))
        best = _first_choice(asked)
        table: dict[str, Any] = {"strategies": strategies_json(strategies)}
        table["best"] = None if best is None else estimate_json(best, [])
        return table, strategies_text(strategies, best)
    axis, values = sweep_values(asked, options["sweep"])
    with progress_bar("sweep") as bar:
        points = list(sweep(asked, axis, values, bar.update))
    table = {"axis": axis, "points": sweep_json(axis, points)}
    return table, sweep_text(axis, values, points)


def _first_choice(asked: PlanRequest) -> Estimate | None:
    """The first choice of a search, or None if nothing fits."""
    from fivefold.planner import best_plans

    try:
        return best_plans(asked, 1).plans[0]
    except FivefoldError:
        return None
