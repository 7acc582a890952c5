"""`fivefold verify`: compare a layout with one device, and its collectives with the prediction."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from fivefold.core import legality
from fivefold.core.errors import FivefoldError, counted
from fivefold.core.fp8 import fp8_of, require_whole_blocks, wider_keys, wider_seq
from fivefold.core.layout import Layout
from fivefold.core.models import is_large, load, scale_down, scaling_note, with_overrides
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.core.precision import Precision
from fivefold.core.recipe import OPTIMIZERS
from fivefold.core.weights import weights
from fivefold.cost.collectives import TrafficEntry, traffic_entries
from fivefold.verbs import (
    BackendOption,
    above,
    asked_backend,
    json_text,
    one_of,
    positive,
    progress_bar,
    with_plan_options,
)
from fivefold.verify.compare import FORMULA, NARROW_FORMULA, Dtype

if TYPE_CHECKING:
    from fivefold.verify.trial import VerifySettings, VerifyVerdict


_OPTIMIZERS = [name for name, kind in OPTIMIZERS.items() if not kind.full_matrices]
_MOST_RANKS = 64  # processes on one machine
_PATIENCE_WITH_KERNELS = 300.0  # seconds: starting a GPU and compiling kernels send no message
_WORDS = {
    "loss_err": "loss",
    "grad_err": "gradients",
    "norm_err": "gradient norm",
    "clip_err": "clip coefficient",
    "weight_err": "weights",
}


@partial(with_plan_options, default_target="tiny")
def run(
    options: PlanOptions,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 2,
    optimizer: Annotated[str, typer.Option(help=f"{' or '.join(_OPTIMIZERS)}.")] = "adamw",
    offload: Annotated[
        str, typer.Option(help="Offload weights and optimizer states: none or cpu.")
    ] = "none",
    precision: Annotated[
        str | None, typer.Option(help="fp8: round matmuls on both sides (docs/fp8.md).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: processes take the GPUs in turn.")
    ] = "cpu",
    backend: BackendOption = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the kernels of the ranks, as training does.")
    ] = False,
    generated: Annotated[
        bool, typer.Option("--generate", help="Generation against the plain forward.")
    ] = False,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="With --generate: batches may not change a bit."),
    ] = False,
    patience: Annotated[
        float | None,
        typer.Option(help="Seconds without a sign of any rank after which one is lost."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove that a layout computes the same as one device: run both here and compare."""
    dtype = one_of("dtype", dtype, get_args(Dtype))
    if precision is not None:
        chosen_precision = one_of("precision", precision, get_args(Precision))
        options = replace(options, precision=cast("Any", chosen_precision))
    plan = runnable(options, trains=not generated)
    _require_meaning(plan, dtype, generated, batch_invariant)
    chosen = {
        "dtype": dtype,
        "seed": above("seed", seed, -1),
        "device": device,
        "backend": asked_backend(backend),
    }
    if generated:
        chosen["batch_invariant"] = batch_invariant
        plan = _placed(plan, chosen)
        raise typer.Exit(_verify_generated(plan, chosen, patience, as_json))
    chosen |= {
        "steps": above("steps", steps, 0),
        "optimizer": one_of("optimizer", optimizer, _OPTIMIZERS),
        "offload": one_of("offload", offload, ("none", "cpu")) == "cpu",
        "compiled": compiled,
    }
    plan = _placed(plan, chosen)
    raise typer.Exit(_verify(plan, chosen, patience, as_json))


def _require_meaning(plan: Plan, dtype: str, generated: bool, batch_invariant: bool) -> None:
    """Refuse a comparison that rounding alone would decide."""
    if batch_invariant and not generated:
        raise FivefoldError(
            "--batch-invariant is about the batches of generation: add --generate, or leave it out"
        )
    if plan.fp8 is not None and dtype != "float64" and not generated:
        raise FivefoldError(
            f"--dtype {dtype} with fp8: sums in another order would round some values to another "
            "fp8 number; leave --dtype out, which emulates fp8 in float64"
        )
    if plan.shape.moe is None or dtype != "bfloat16" or batch_invariant:
        return
    differing = "batches and layouts" if generated else "layouts"
    way_out = ", or with --batch-invariant" if generated else ""
    raise FivefoldError(
        f"bfloat16 rounds the router scores so much that {differing} choose different experts: "
        f"verify a model with experts in float64 or float32{way_out}"
    )


def runnable(options: PlanOptions, trains: bool = True) -> Plan:
    """The plan, scaled down for this machine; refused if it cannot run. `trains`: with steps of an
    optimizer."""
    options, widening = _wide_enough(options)
    plan = resolve(options, small=True)
    weights(plan.shape)  # refuses what cannot be built
    if plan.fp8 is not None:
        plan.fp8.require_runnable(plan.schedule.asynchronous)
    if plan.layout.world > _MOST_RANKS:
        raise FivefoldError(
            f"verify forks a process for every rank, and {plan.layout.world} are too many for one "
            f"machine: lower the degrees to at most {_MOST_RANKS} ranks"
        )
    eps = "AdamW's eps is 1e-2 on both sides: with 1e-8 it turns rounding errors into whole steps"
    notes = [eps] if trains else []
    if plan.schedule.asynchronous:
        notes.append(
            "the one process emulates the same delays, stage by stage; a step is one update of the "
            "weights, and nothing is clipped"
        )
    if widening is not None:
        notes.append(widening)
    elif is_large(plan.shape):
        small = scale_down(plan.shape, plan.layout)
        if plan.fp8 is not None and plan.fp8.scaling != "tensorwise":
            small = with_overrides(small, wider_keys(small, plan.layout))
        notes.append(scaling_note(plan.shape, small))
        legality.check(plan.layout, small, seq=plan.batch.seq)
        require_whole_blocks(plan.fp8, plan.layout, small, plan.batch.seq)
        if plan.stage_layers is not None:
            notes.append("stages are chosen again: stage_layers is for all layers of the model")
        plan = replace(plan, shape=small, stage_layers=None)
    return replace(plan, notes=(*plan.notes, *notes))


def _wide_enough(options: PlanOptions) -> tuple[PlanOptions, str | None]:
    """A small model, widened where blocks of fp8 need it, and a note that says so."""
    rounding, shape = fp8_of(options), load(options.model)
    if rounding is None or rounding.scaling == "tensorwise":
        return options, None
    layout = Layout.parse(options.layout, sp=options.sp, context=options.context)
    if options.seq is None:
        options = replace(options, seq=wider_seq(shape, layout))
    if is_large(shape):
        return options, None
    changes = {**wider_keys(shape, layout), **options.set}
    said = ", ".join(f"{key} {value}" for key, value in changes.items())
    blocks, rows = f"blocks of {rounding.block}", f"rows of {options.seq} tokens"
    note = f"{shape.name} is widened for {blocks}: {said}; {rows}"
    return replace(options, set=changes), note


def _placed(plan: Plan, chosen: dict[str, Any]) -> Plan:
    """The plan with notes on device and compilation; refused if they are not available.

    Also chooses the backend, if none was given.
    """
    notes: list[str] = []
    if chosen["device"] not in ("cpu", "cuda"):  # a suggestion for gpu would be cpu
        raise FivefoldError(f"unknown --device {chosen['device']!r}: choose from cpu, cuda")
    if chosen.get("compiled"):
        notes.append("the kernels of the ranks are compiled; those of the one process are not")
    if chosen["device"] == "cuda" and chosen.get("offload"):
        raise FivefoldError("--offload cpu is not available on a GPU: leave it or --device out")
    if chosen["device"] == "cuda" or chosen["backend"] is not None:
        notes += _choose_backend(plan, chosen)
    chosen["backend"] = chosen["backend"] or "gloo"
    return replace(plan, notes=(*plan.notes, *notes))


def _choose_backend(plan: Plan, chosen: dict[str, Any]) -> list[str]:
    """Choose the backend for the devices of this machine; notes on what was chosen."""
    from fivefold.launch.backend import NcclLibrary, choose_backend, forked_device, num_gpus

    device, world, gpus = chosen["device"], plan.layout.world, num_gpus()
    if device == "cuda" and not gpus:
        raise FivefoldError(
            "this machine has no CUDA device; leave --device out to verify on CPU processes"
        )
    chosen["backend"] = choose_backend(chosen["backend"], device, world, gpus, NcclLibrary.here())
    if device == "cpu":
        return []
    notes = ["all processes share one GPU"] if gpus == 1 else []
    if world > 1:
        notes.append(forked_device(device, chosen["backend"], 0, world).describe())
    return [*notes, "TF32 is off: float32 matmuls are not rounded to 10 bits"]


def _patience(asked: float | None, slow: bool) -> float:
    """Seconds without a message; `slow`: with kernels that have to be compiled or loaded."""
    from fivefold.launch.processes import PATIENCE

    if asked is not None:
        return positive("patience", asked)
    return _PATIENCE_WITH_KERNELS if slow else PATIENCE


def _verify(plan: Plan, chosen: dict[str, Any], asked: float | None, as_json: bool) -> int:
    """Run and print; returns the exit code."""
    # Imported here, so that a bad command line is refused before torch is loaded.
    from fivefold.launch.processes import Pool, RankLost
    from fivefold.verify.trial import VerifySettings, num_phases, run_trial

    settings = VerifySettings(**chosen)
    slow = settings.device == "cuda" or settings.compiled
    patience = _patience(asked, slow)
    began = time.perf_counter()
    try:
        with (
            Pool(plan.layout.world + 1, patience) as pool,
            progress_bar("verify", num_phases(plan, settings)) as bar,
        ):
            verdict = run_trial(pool, plan, settings, lambda: bar.advance(1))
    except RankLost as lost:
        who = "the reference" if lost.rank == plan.layout.world else f"rank {lost.rank}"
        reason = f"lost {who} at {lost.doing}: it {lost.cause}"
        if as_json:
            typer.echo(json_text({"passed": False, "error": reason}))
        typer.echo(f"fivefold: {reason}", err=True)
        return 1
    table = describe(plan, verdict, time.perf_counter() - began)
    typer.echo(json_text(table) if as_json else render(plan, settings, table))
    return 0 if verdict.passed else 1


def _verify_generated(
    plan: Plan, chosen: dict[str, Any], asked: float | None, as_json: bool
) -> int:
    """Run the proof of generation and print it; returns the exit code."""
    from fivefold.generate.layout import forward_plan, invariant_plan
    from fivefold.launch.processes import Pool, RankLost
    from fivefold.verify.generated_ranks import GeneratedSettings, num_phases, run_generated

    settings = GeneratedSettings(**chosen)
    plan = forward_plan(plan)
    plan = invariant_plan(plan) if settings.batch_invariant else plan
    patience = _patience(asked, settings.device == "cuda")
    began = time.perf_counter()
    try:
        with (
            Pool(plan.layout.world, patience) as pool,
            progress_bar("verify", num_phases(plan, settings)) as bar,
        ):
            verdict = run_generated(pool, plan, settings, lambda: bar.advance(1))
    except RankLost as lost:
        reason = f"lost rank {lost.rank} at {lost.doing}: it {lost.cause}"
        if as_json:
            typer.echo(json_text({"passed": False, "error": reason}))
        typer.echo(f"fivefold: {reason}", err=True)
        return 1
    facts = {"model": plan.shape.name, "layout": str(plan.layout), "world": plan.layout.world}
    facts |= {"dtype": settings.dtype, "passed": verdict.passed} | asdict(verdict)
    facts |= {"seconds": round(time.perf_counter() - began, 3), "notes": list(plan.notes)}
    typer.echo(json_text(facts) if as_json else render_generated(facts))
    return 0 if verdict.passed else 1


def render_generated(table: dict[str, Any]) -> str:
    """The verdict on generation as text."""
    same = "the same" if table["tokens_equal"] else "DIFFERENT"
    most = "none" if table["tolerance"] is None else f"{table['tolerance']:.1e}"
    lines = [
        f"{table['model']} on {table['layout']}, {table['dtype']}: generation against the forward "
        "of the whole text on one device",
        "",
        f"{'':<18}{'largest error of logits':>24}{'tolerance':>12}",
        *(f"{way:<18}{error:>24.1e}{most:>12}" for way, error in table["errors"].items()),
        f"log-probabilities: largest error {table['logprob_err']:.1e}; against the training "
        f"forward in {table['trained_layout']} {table['trained_err']:.1e}",
        *_batch_lines(table),
        f"{table['tokens']:,} tokens, {same} every way; {table['reused']:,} from shared blocks, "
        f"{counted(table['preempted'], 'preemption')}",
        *(f"note: {note}" for note in table["notes"]),
        f"{'PASS' if table['passed'] else 'FAIL'} in {table['seconds']:.1f} s",
    ]
    return "\n".join(lines)


def _batch_lines(table: dict[str, Any]) -> Iterator[str]:
    bound = table["batch_bound"]
    said = "none" if bound is None else f"{bound:.1e}" if bound else "0, batch-invariant"
    yield f"between batches: largest difference {table['batch_diff']:.1e} (bound: {said})"
    if table["batch_cost"] is not None:
        yield f"batch invariance: {table['batch_cost']:.1f} times the time without it"
    if table["tolerance"] is None:
        yield "no tolerance: bfloat16 may choose other experts than the plain forward"


def describe(plan: Plan, verdict: VerifyVerdict, seconds: float) -> dict[str, Any]:
    """The verdict as JSON, with the traffic of rank 0 or of the first rank that differs."""
    steps = [(rank, each) for rank, steps in enumerate(verdict.traffic) for each in steps]
    rank, shown = next((pair for pair in steps if not pair[1].match), steps[0])
    return {
        "model": plan.shape.name,
        "layout": str(plan.layout),
        "world": plan.layout.world,
        "zero": plan.layout.zero,
        **verdict.errors,
        "tolerance": verdict.tolerance,
        "passed": verdict.passed,
        "diverges_at": verdict.diverges_at,
        "disorder": verdict.disorder,
        **({} if verdict.flips is None else {"flips": verdict.flips}),
        "traffic": {
            "rank": rank,
            "predicted": [asdict(each) for each in traffic_entries(shown.predicted.items())],
            "observed": [asdict(each) for each in traffic_entries(shown.observed.items())],
            "match": verdict.traffic_match,
        },
        "seconds": round(seconds, 3),
        "notes": list(plan.notes),
    }


def render(plan: Plan, settings: VerifySettings, table: dict[str, Any]) -> str:
    """The verdict as text."""
    lines = [
        f"{table['model']} on {table['layout']}, ZeRO-{table['zero']}, {settings.dtype}: "
        f"{counted(table['world'], 'rank')} against one process, "
        f"{counted(settings.steps, 'step')} of {settings.optimizer}",
        f"{plan.batch}",
        "",
        f"{'':<18}{'largest error':>14}{'tolerance':>12}",
        *(
            f"{word:<18}{table[name]:>14.1e}{table['tolerance'][name]:>12.1e}"
            f"{'' if table[name] <= table['tolerance'][name] else '   too large'}"
            for name, word in _WORDS.items()
        ),
        f"tolerance: {FORMULA}",
        *([NARROW_FORMULA] if plan.units.grad_dtype == "bf16" else []),
        "",
        *_traffic_lines(table["traffic"]),
        "",
        *(f"note: {note}" for note in table["notes"]),
    ]
    if "flips" in table:
        lines.append(f"values rounded to another fp8 number (flips): {table['flips']}")
    if table["diverges_at"] is not None:
        lines.append(f"first difference, in forward order: {table['diverges_at']}")
    if table["disorder"] is not None:
        lines.append(f"flat units in different orders: {table['disorder']}")
    verdict = "PASS" if table["passed"] else "FAIL"
    return "\n".join([*lines, f"{verdict} in {table['seconds']:.1f} s"])


def _traffic_lines(traffic: dict[str, Any]) -> Iterator[str]:
    """One line for each kind of collective, predicted and observed."""
    calls: dict[tuple[Any, ...], dict[str, int]] = {}
    for source in ("predicted", "observed"):
        for row in traffic[source]:
            entry = TrafficEntry(**row)
            key = (entry.axis, entry.kind, entry.bytes, entry.group)
            calls.setdefault(key, {"predicted": 0, "observed": 0})[source] = entry.count
    if not calls:
        yield "collectives: none predicted, none observed"
        return
    yield f"{'collectives of rank ' + str(traffic['rank']):<34}{'bytes':>10}{'ranks':>7}" + (
        f"{'predicted':>11}{'observed':>10}"
    )
    for (axis, kind, size, group), counts in sorted(calls.items()):
        mark = "" if counts["predicted"] == counts["observed"] else "   differs"
        yield (
            f"{axis:<16}{kind:<18}{size:>10,}{group:>7}"
            f"{counts['predicted']:>11}{counts['observed']:>10}{mark}"
        )
