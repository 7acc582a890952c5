"""`fivefold verify`: compare a layout with one device, and its collectives with the prediction."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fivefold.commands.job import (
    Model,
    OnProgress,
    TaskProgress,
    above,
    asked_backend,
    given_job,
    one_of,
    positive,
    reopened,
)
from fivefold.commands.options import (
    FP8,
    PACKED,
    BackendOption,
    SetKey,
    as_given,
    exit_on_lost_rank,
    print_answer,
    shown_progress,
    with_plan_options,
)
from fivefold.commands.search import with_first_choice
from fivefold.core import PRECISIONS, FivefoldError, RankLost, run_keys
from fivefold.core.layout import Layout, fp8_of, rules, weights, wider_keys, wider_seq
from fivefold.core.model import is_large, load, scale_down, scaling_note, with_overrides
from fivefold.core.plan import OPTIMIZERS, Plan, PlanOptions, resolve
from fivefold.cost.traffic import traffic_entries
from fivefold.render import comparison_text, generated_text
from fivefold.verify import FORMULA, Dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from fivefold.verify import GeneratedSettings, GeneratedVerdict, VerifySettings, VerifyVerdict


VERIFIED_OPTIMIZERS = [name for name, kind in OPTIMIZERS.items() if not kind.full_matrices]


@partial(with_plan_options, default_target="tiny", flags={"packed": PACKED, "fp8": FP8})
def run(
    options: PlanOptions,
    command: typer.Context,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 2,
    optimizer: Annotated[str, SetKey(f"{' or '.join(VERIFIED_OPTIMIZERS)}.")] = "adamw",
    offload: Annotated[str, SetKey("Offload weights and optimizer states: none or cpu.")] = "none",
    precision: Annotated[
        str | None, typer.Option(help="fp8 or mxfp8: round matmuls on both sides (docs/fp8.md).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: processes take the GPUs in turn.")
    ] = "cpu",
    backend: BackendOption = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the kernels of the ranks, as training does.")
    ] = False,
    generate: Annotated[bool, SetKey("Compare generation with the plain forward.")] = False,
    batch_invariant: Annotated[
        bool, SetKey("With generate: the requests of a batch may not change a bit.")
    ] = False,
    patience: Annotated[
        float | None, SetKey("Seconds without a sign of any rank after which it is lost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove that a layout computes the same as one device: run both here and compare."""
    job = as_given(options, command)
    with exit_on_lost_rank(as_json), shown_progress("verify") as on_progress:
        verdict = verify(
            job,
            dtype=dtype,
            steps=steps,
            optimizer=optimizer,
            offload=offload,
            precision=precision,
            seed=seed,
            device=device,
            backend=backend,
            compile=compiled,
            generate=generate,
            batch_invariant=batch_invariant,
            patience=patience,
            on_progress=on_progress,
        )
    print_answer(verdict, as_json)
    raise typer.Exit(0 if verdict.passed else 1)


_MOST_RANKS = 64  # processes on one machine
# Of a search's first choice; its batch and sequence are larger than a proof needs.
_OF_CHOICE = ("layout", "zero", "context", "schedule", "chunks", "recompute")
_PATIENCE_WITH_KERNELS = 300.0  # seconds: starting a GPU and compiling kernels send no message


@dataclass(frozen=True)
class VerifiedPlan:
    """What ranks and one process computed, compared. `plan` is the one that ran here, scaled down.

    `str()` is the text of `fivefold verify`, `to_json()` its JSON.
    """

    plan: Plan
    settings: VerifySettings | GeneratedSettings
    verdict: VerifyVerdict | GeneratedVerdict
    seconds: float

    @property
    def passed(self) -> bool:
        return self.verdict.passed

    @cached_property
    def _table(self) -> dict[str, Any]:
        from fivefold.verify import VerifyVerdict

        if isinstance(self.verdict, VerifyVerdict):
            return describe(self.plan, self.verdict, self.seconds)
        layout, verdict = self.plan.layout, self.verdict
        facts = {"model": self.plan.shape.name, "layout": str(layout), "world": layout.world}
        facts |= {"dtype": self.settings.dtype, "passed": verdict.passed} | asdict(verdict)
        return facts | {"seconds": round(self.seconds, 3), "notes": list(self.plan.notes)}

    def to_json(self) -> dict[str, Any]:
        """What `fivefold verify --json` prints."""
        return self._table

    def __repr__(self) -> str:
        passed = "passed" if self.passed else "failed"
        return f"VerifiedPlan({self.plan.shape.name} on {self.plan.layout}: {passed})"

    def __str__(self) -> str:
        if "traffic" not in self._table:
            return generated_text(self._table)
        formula = f"tolerance: {FORMULA}"
        return comparison_text(self.plan, asdict(self.settings), self._table, formula)

    def _repr_html_(self) -> str:
        from fivefold.render import verdict_html

        return verdict_html(self._table)


def verify(
    model: Model = "tiny",
    *,
    dtype: str = "float64",
    steps: int = 2,
    optimizer: str = "adamw",
    offload: str = "none",
    precision: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    backend: str | None = None,
    compile: bool = False,
    generate: bool = False,
    batch_invariant: bool = False,
    patience: float | None = None,
    on_progress: OnProgress | None = None,
    **keys: Any,
) -> VerifiedPlan:
    """Prove that a layout computes the same as one device: run both here and compare.

    With `generate` it is generation against the plain forward. A large model is scaled down. Ranks
    are processes, forked from this one; one that dies raises `RankLost`.
    """
    dtype = one_of("--dtype", dtype, get_args(Dtype))
    job = reopened(given_job(model, keys))
    options = job.options
    if job.is_open and options.gpus is not None:
        first = with_first_choice(job)
        options = replace(options, **{key: getattr(first, key) for key in _OF_CHOICE})
    if precision is not None:
        run: dict[str, Any] = run_keys(one_of("--precision", precision, PRECISIONS))
        options = replace(options, **run)
    plan = runnable(options, trains=not generate)
    _require_meaning(plan, dtype, generate, batch_invariant)
    chosen = {
        "dtype": dtype,
        "seed": above("--seed", seed, -1),
        "device": device,
        "backend": asked_backend(backend),
    }
    if generate:
        chosen["batch_invariant"] = batch_invariant
        plan = _placed(plan, chosen)
        return _verify_generated(plan, chosen, patience, on_progress)
    chosen |= {
        "steps": above("--steps", steps, 0),
        "optimizer": one_of("optimizer", optimizer, VERIFIED_OPTIMIZERS),
        "offload": one_of("offload", offload, ("none", "cpu")) == "cpu",
        "compiled": compile,
    }
    plan = _placed(plan, chosen)
    return _verify(plan, chosen, patience, on_progress)


def _require_meaning(plan: Plan, dtype: str, generated: bool, batch_invariant: bool) -> None:
    """Refuse a comparison that rounding alone would decide."""
    if batch_invariant and not generated:
        raise FivefoldError(
            "batch_invariant is about the batches of generation: add generate=true, or leave it out"
        )
    if plan.fp8 is not None and dtype != "float64" and not generated:
        raise FivefoldError(
            f"--dtype {dtype} with fp8: sums in another order would round some values to another "
            "fp8 number; leave --dtype out, which emulates fp8 in float64"
        )
    if plan.fp8 is not None and plan.units.grad_dtype == "bf16" and not generated:
        raise FivefoldError(
            "grad_dtype bf16 with fp8: gradients that are rounded to bf16 in another order change "
            "the weights, and so which fp8 numbers the next step rounds to; verify grad_dtype=fp32 "
            "with fp8, or grad_dtype=bf16 without it"
        )
    if plan.shape.moe is None or dtype != "bfloat16" or batch_invariant:
        return
    differing = "batches and layouts" if generated else "layouts"
    way_out = ", or with batch_invariant=true" if generated else ""
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
        rules.check(plan.layout, small, seq=plan.batch.seq, fp8=plan.fp8)
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
    text = ", ".join(f"{key} {value}" for key, value in changes.items())
    blocks, rows = f"blocks of {rounding.block}", f"rows of {options.seq} tokens"
    note = f"{shape.name} is widened for {blocks}: {text}; {rows}"
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
        raise FivefoldError("offload cpu is not available on a GPU: leave it or --device out")
    if chosen["device"] == "cuda" or chosen["backend"] is not None:
        notes += _choose_backend(plan, chosen)
    chosen["backend"] = chosen["backend"] or "gloo"
    return replace(plan, notes=(*plan.notes, *notes))


def _choose_backend(plan: Plan, chosen: dict[str, Any]) -> list[str]:
    """Choose the backend for the devices of this machine; notes on what was chosen."""
    from fivefold.launch import NcclLibrary, choose_backend, forked_device, num_gpus

    device, world, gpus = chosen["device"], plan.layout.world, num_gpus()
    if device == "cuda" and not gpus:
        raise FivefoldError(
            "this machine has no CUDA device; leave --device out to verify on CPU processes"
        )
    chosen["backend"] = choose_backend(
        chosen["backend"], device, world, gpus, NcclLibrary.current()
    )
    if device == "cpu":
        return []
    notes = ["all processes share one GPU"] if gpus == 1 else []
    if world > 1:
        notes.append(forked_device(device, chosen["backend"], 0, world).describe())
    return [*notes, "TF32 is off: float32 matmuls are not rounded to 10 bits"]


def _patience(seconds: float | None, slow: bool) -> float:
    """Seconds without a message; `slow`: with kernels that have to be compiled or loaded."""
    from fivefold.launch import PATIENCE

    if seconds is not None:
        return positive("patience", seconds)
    return _PATIENCE_WITH_KERNELS if slow else PATIENCE


def _phases(total: int, on_progress: OnProgress | None) -> Callable[[], None]:
    """What is called when a phase begins."""
    begun = 0

    def on_phase() -> None:
        nonlocal begun
        begun += 1
        if on_progress is not None:
            on_progress(TaskProgress(begun, total, "verify"))

    return on_phase


def _verify(
    plan: Plan, chosen: dict[str, Any], patience: float | None, on_progress: OnProgress | None
) -> VerifiedPlan:
    """Run the ranks and one process."""
    # Imported here, so that a bad option is refused before torch is loaded.
    from fivefold.launch import Pool
    from fivefold.verify import VerifySettings, num_phases, run_trial

    settings = VerifySettings(**chosen)
    slow = settings.device == "cuda" or settings.compiled
    patience = _patience(patience, slow)
    began = time.perf_counter()
    on_phase = _phases(num_phases(plan, settings), on_progress)
    try:
        with Pool(plan.layout.world + 1, patience) as pool:
            verdict = run_trial(pool, plan, settings, on_phase)
    except RankLost as lost:
        raise lost.named("the reference") if lost.rank == plan.layout.world else lost from None
    return VerifiedPlan(plan, settings, verdict, time.perf_counter() - began)


def _verify_generated(
    plan: Plan, chosen: dict[str, Any], patience: float | None, on_progress: OnProgress | None
) -> VerifiedPlan:
    """Run the proof of generation."""
    from fivefold.generate import forward_plan, invariant_plan
    from fivefold.launch import Pool
    from fivefold.verify import GeneratedSettings, num_generation_phases, run_generated

    settings = GeneratedSettings(**chosen)
    plan = forward_plan(plan)
    plan = invariant_plan(plan) if settings.batch_invariant else plan
    patience = _patience(patience, settings.device == "cuda")
    began = time.perf_counter()
    on_phase = _phases(num_generation_phases(plan, settings), on_progress)
    with Pool(plan.layout.world, patience) as pool:
        verdict = run_generated(pool, plan, settings, on_phase)
    return VerifiedPlan(plan, settings, verdict, time.perf_counter() - began)


def describe(plan: Plan, verdict: VerifyVerdict, seconds: float) -> dict[str, Any]:
    """The verdict as JSON, with the traffic of rank 0 or of the first rank that differs."""
    steps = [(rank, step) for rank, steps in enumerate(verdict.traffic) for step in steps]
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
            "predicted": [asdict(entry) for entry in traffic_entries(shown.predicted.items())],
            "observed": [asdict(entry) for entry in traffic_entries(shown.observed.items())],
            "match": verdict.traffic_match,
        },
        "seconds": round(seconds, 3),
        "notes": list(plan.notes),
    }
