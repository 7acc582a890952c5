"""Model size and tokens for a budget of FLOPs: Chinchilla's rule, by active parameters.

C = 6·N·D, with N the parameters that a token uses and D the tokens. The rule of Hoffmann et al.
(2203.15556), 20 tokens per parameter, was found for dense models. For a model with experts N counts
what is active: the same FLOPs then buy the same tokens, while memory and traffic follow all
parameters. Whether more experts lower the loss at that budget is not modelled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from fivefold.core import FivefoldError
from fivefold.core import hardware as machine
from fivefold.core import hardware as machines
from fivefold.core.model import Shape, parameters
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import Plan, PlanOptions, resolve

# The formulas of textbooks, each with its numbers for one model.
#
# They hold for mixed-precision Adam, GPT layers and half precision, and round what a plan counts:
# `fivefold plan` without `--set textbook=true` derives every byte of the model at hand. Ψ is the
# number of parameters, by the model's name where it says one (70B), s the tokens of a sequence, b
# the sequences of a microbatch, h the width, a the heads, L the layers, N the data ranks, t the
# tensor ranks, p the stages, m the microbatches.
#
# Sources: Rajbhandari et al., ZeRO (1910.02054) for states and volumes; Korthikanti et al.
# (2205.05198) for activations; Narayanan et al. (2104.04473) for FLOPs and the bubble.

BYTES_PER_PARAMETER = {"weights": 2, "gradients": 2, "master": 4, "momentum": 4, "variance": 4}
STATES = sum(BYTES_PER_PARAMETER.values())  # 16
VOLUMES = {"DDP": 2, "ZeRO-1": 2, "ZeRO-2": 2, "ZeRO-3": 3}  # elements a rank moves, in Ψ
GPU_MEMORY = 80e9
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_SIZE = r"(?<![0-9x.])(\d{1,6}(?:\.\d{1,3})?)([mbt])(?![a-z0-9])"
_LONGEST_DEFAULT = 8192  # tokens of a sequence
_NEAR = 0.1  # a size in a name counts if the model has about as many parameters


class Formula(NamedTuple):
    """One formula, the same with numbers in it, and what it gives."""

    topic: str
    name: str
    formula: str
    numbers: str
    value: float
    unit: str


@dataclass(frozen=True)
class TextbookJob:
    """What the formulas are about; `shape` is None if only a size was given."""

    name: str
    parameters: float  # Ψ
    shape: Shape | None = None
    counted: int | None = None  # the parameters that a plan counts
    active: float | None = None  # of them, what a token uses, if there are experts
    seq: int = 2048
    microbatch_size: int = 1
    dp: int = 64
    tp: int = 8
    pp: int = 8
    microbatches: int = 32
    gpu_memory: float = GPU_MEMORY


def size_of(text: str) -> float | None:
    """The number of parameters that a text such as `70b` or `1.3T` means; None if it is a name.

    >>> size_of("70b"), size_of("llama-3.1-70b")
    (70000000000.0, None)
    """
    match = re.fullmatch(_SIZE, text.strip().lower())
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def nominal_parameters(shape: Shape) -> float:
    """Ψ as people say it: the size in the model's name, if it has about as many parameters."""
    exact = parameters(shape).total
    sizes = (float(n) * _UNITS[unit] for n, unit in re.findall(_SIZE, shape.name.lower()))
    return next((size for size in sizes if abs(size / exact - 1) < _NEAR), float(exact))


def textbook_job(options: PlanOptions, is_open: bool) -> TextbookJob:
    """The job of a command line: a model or a size, and degrees if a layout was given."""
    memory = GPU_MEMORY if options.machine is None else machine.load(options.machine).memory
    size = size_of(options.model)
    job = TextbookJob(
        options.model.upper(),
        size or 0.0,
        microbatch_size=options.microbatch_size or TextbookJob.microbatch_size,
        dp=options.gpus or TextbookJob.dp,
        microbatches=options.microbatches or TextbookJob.microbatches,
        gpu_memory=memory,
    )
    if size is not None:
        return job
    shape = models.with_overrides(models.load(options.model), options.set)
    sizes = parameters(shape)
    job = replace(
        job,
        name=shape.name,
        parameters=nominal_parameters(shape),
        shape=shape,
        counted=sizes.total,
        active=None if shape.moe is None else float(sizes.active),
        seq=options.seq or min(_LONGEST_DEFAULT, shape.max_seq),
    )
    return job if is_open else _with_layout(job, resolve(options))


def _with_layout(job: TextbookJob, plan: Plan) -> TextbookJob:
    layout, batch = plan.layout, plan.batch
    numbers = {"seq": batch.seq, "microbatch_size": batch.microbatch_size}
    numbers |= {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp}
    return replace(job, **numbers, microbatches=batch.microbatches)


def textbook(job: TextbookJob) -> list[Formula]:
    """Every formula that the job has numbers for."""
    if min(job.seq, job.microbatch_size, job.dp, job.tp, job.pp, job.microbatches) < 1:
        raise FivefoldError("textbook: seq, batch and degrees are whole numbers from 1")
    rows = [*_states(job), *_zero(job), *_volumes(job), *_work(job)]
    if job.shape is not None:
        rows += [*_activations(job, job.shape), *_model_traffic(job, job.shape)]
    return [*rows, _bubble(job)]


def gpus_for_states(job: TextbookJob) -> int:
    """GPUs whose memory together holds the 16 bytes per parameter, and nothing else."""
    return math.ceil(STATES * job.parameters / job.gpu_memory)


def _states(job: TextbookJob) -> Iterator[Formula]:
    psi = _scaled(job.parameters)
    for name, size in BYTES_PER_PARAMETER.items():
        yield Formula(
            "states", name, f"{size}Ψ", f"{size} × {psi}", size * job.parameters / 1e9, "GB"
        )
    total = STATES * job.parameters / 1e9
    parts = " + ".join(map(str, BYTES_PER_PARAMETER.values()))
    yield Formula("states", "16 bytes a parameter", f"({parts})Ψ", f"{STATES} × {psi}", total, "GB")
    memory = f"{job.gpu_memory / 1e9:g} GB"
    yield Formula(
        "states",
        f"GPUs of {memory}",
        "⌈16Ψ / memory⌉",
        f"⌈{total:,.0f} GB / {memory}⌉",
        gpus_for_states(job),
        "GPUs",
    )


def _zero(job: TextbookJob) -> Iterator[Formula]:
    psi, n = job.parameters / 1e9, job.dp
    for stage, unsharded in enumerate((16, 4, 2, 0)):
        sharded = STATES - unsharded
        terms = [(f"{unsharded}Ψ", f"{unsharded} × {psi:,g}")] if unsharded else []
        terms += [(f"{sharded}Ψ/N", f"{sharded} × {psi:,g} / {n}")] if sharded else []
        formula, numbers = (" + ".join(column) for column in zip(*terms, strict=True))
        value = unsharded * psi + sharded * psi / n
        name = f"ZeRO-{stage}" if stage else "DDP"
        yield Formula("states a GPU", name, formula, numbers, value, "GB")


def _volumes(job: TextbookJob) -> Iterator[Formula]:
    """Elements that one rank sends in a step, at (N − 1)/N ≈ 1; in bytes at 2 each."""
    made_of = {2: "reduce-scatter Ψ + all-gather Ψ", 3: "2 all-gathers Ψ + reduce-scatter Ψ"}
    for name, times in VOLUMES.items():
        size = 2 * times * job.parameters / 1e9
        numbers = f"{made_of[times]}: {times} × {_scaled(job.parameters)} × 2 bytes"
        yield Formula("communication", name, f"{times}Ψ", numbers, size, "GB")


def _work(job: TextbookJob) -> Iterator[Formula]:
    used = job.parameters if job.active is None else job.active
    word = "Ψ" if job.active is None else "Ψ_active"
    for name, times in (("forward and backward", 6), ("with full recomputation", 8)):
        yield Formula(
            "FLOPs a token",
            name,
            f"{times}{word}",
            f"{times} × {_scaled(used)}",
            times * used,
            "FLOPs",
        )
    if job.shape is not None:
        layers, width, seq = job.shape.layers, job.shape.width, job.seq
        yield Formula(
            "FLOPs a token",
            "attention, the full square",
            "12Lhs",
            f"12 × {layers} × {width} × {seq}",
            12.0 * layers * width * seq,
            "FLOPs",
        )


def _activations(job: TextbookJob, shape: Shape) -> Iterator[Formula]:
    """Bytes of one layer and microbatch in half precision, and of all layers."""
    s, b, h, a, t = job.seq, job.microbatch_size, shape.width, shape.heads, job.tp
    sbh, share = f"{s} × {b} × {h}", 5 * a * s / h
    square = 5.0 * a * s * s * b
    linear = 34.0 * s * b * h
    total = linear + square
    rows = (
        ("scores, one matrix", "2as²b", f"2 × {a} × {s}² × {b}", 2.0 * a * s * s * b),
        ("the s×s scores", "5as²b", f"5 × {a} × {s}² × {b}", square),
        ("all but the scores", "34sbh", f"34 × {sbh}", linear),
        ("a layer", "sbh(34 + 5as/h)", f"{sbh} × (34 + {share:.1f})", total),
        (
            "with tp",
            "sbh(10 + 24/t + 5as/(ht))",
            f"{sbh} × (10 + 24/{t} + {share:.1f}/{t})",
            s * b * h * (10 + 24 / t) + square / t,
        ),
        ("tp and sp", "sbh(34 + 5as/h)/t", f"{sbh} × (34 + {share:.1f}) / {t}", total / t),
        ("tp, sp, selective recomputation", "34sbh/t", f"34 × {sbh} / {t}", linear / t),
        ("full recomputation", "2sbh", f"2 × {sbh}", 2.0 * s * b * h),
    )
    for name, formula, numbers, size in rows:
        yield Formula("activations a layer", name, formula, numbers, size / 1e9, "GB")
    layers = shape.layers
    every = (("nothing recomputed", total, f"L·sbh(34 + 5as/h), {layers} layers"),)
    every += (("selective recomputation", linear, f"L·34sbh, {layers} layers"),)
    every += (("full recomputation", 2.0 * s * b * h, f"L·2sbh, {layers} layers"),)
    for name, size, formula in every:
        numbers = f"{layers} × {size / 1e9:,.3g} GB"
        yield Formula("activations", name, formula, numbers, layers * size / 1e9, "GB")


def _model_traffic(job: TextbookJob, shape: Shape) -> Iterator[Formula]:
    """Bytes that one rank moves for a microbatch, in half precision."""
    s, b, h, t = job.seq, job.microbatch_size, shape.width, job.tp
    sbh = f"{s} × {b} × {h}"
    size = 2.0 * s * b * h
    tensor = 4 * 2 * (t - 1) / t * size
    yield Formula(
        "communication of a layer",
        "tp: 4 all-reduces",
        "4 · 2(t−1)/t · 2sbh",
        f"4 × 2 × {t - 1}/{t} × 2 × {sbh}",
        tensor / 1e9,
        "GB",
    )
    if shape.moe is not None:
        k = shape.moe.top_k
        yield Formula(
            "communication of a layer",
            "ep: 4 all-to-alls",
            "4 · k · 2sbh",
            f"4 × {k} × 2 × {sbh}",
            4 * k * size / 1e9,
            "GB",
        )
    yield Formula(
        "communication of a stage", "pp: one message", "2sbh", f"2 × {sbh}", size / 1e9, "GB"
    )


def _bubble(job: TextbookJob) -> Formula:
    p, m = job.pp, job.microbatches
    numbers = f"({p} − 1) / ({m} + {p} − 1)"
    value = (p - 1) / (m + p - 1)
    return Formula("pipeline", "bubble of 1F1B", "(p−1)/(m+p−1)", numbers, value, "of a step")


def _scaled(number: float) -> str:
    """70e9, as formulas are written with numbers."""
    for unit in (1e12, 1e9, 1e6):
        if number >= unit:
            return f"{number / unit:g}e{round(math.log10(unit))}"
    return f"{number:g}"


TOKENS_PER_PARAMETER = 20.0
USUAL_MFU = 0.4
SPARSITY = 8  # all parameters over active ones, in the example with experts
_SECONDS = {"hour": 3600.0, "day": 86_400.0, "week": 604_800.0, "month": 30 * 86_400.0}
_HOW = 'write FLOPs (1e24), or GPUs, machine and time ("512 h100 30 days")'
_MOST_MODELS = 6  # of each kind, in the comparison


@dataclass(frozen=True)
class Budget:
    """FLOPs, and what they were computed from."""

    flops: float
    description: str


@dataclass(frozen=True)
class ComputeOptimal:
    """The size and the tokens that a rule chooses for a budget."""

    budget: Budget
    tokens_per_parameter: float
    parameters: float  # active
    tokens: float


@dataclass(frozen=True)
class SpentOn:
    """A model that is trained with the full budget."""

    name: str
    kind: str  # dense or MoE
    total: float
    active: float
    tokens: float
    share: float  # tokens over those of the rule for this size: below 1 is short of data

    @property
    def states(self) -> float:
        """Bytes of weights, gradients and optimizer states."""
        return STATES * self.total


def parse_budget(text: str, mfu: float = USUAL_MFU, precision: str = "bf16") -> Budget:
    """Read `1e24` or `512 h100 30 days`; GPUs run at the given MFU.

    >>> parse_budget("1e24").flops
    1e+24
    """
    if not 0 < mfu <= 1:
        raise FivefoldError(f"mfu {mfu}: give a share of the peak above 0, at most 1")
    tokens = text.lower().replace(",", " ").split()
    if plain := re.fullmatch(r"([0-9.]+(?:e\+?[0-9]{1,3})?)(?: ?flops?)?", " ".join(tokens)):
        return Budget(_number(plain[1], text), f"{_number(plain[1], text):.3g} FLOPs")
    if len(tokens) != 4 or (unit := tokens[3].rstrip("s")) not in _SECONDS:
        raise FivefoldError(f"budget {text!r}: {_HOW}")
    gpus = _number(tokens[0], text)
    machine = machines.load(tokens[1])
    span = _number(tokens[2], text)
    known = machine.peaks.known()
    used = precision if precision in known else next(iter(known))
    flops = gpus * span * _SECONDS[unit] * machine.peak(used) * mfu
    return Budget(
        flops,
        f"{gpus:,g} × {machine.peak(used) / 1e12:,g} TFLOP/s ({tokens[1]}, {used}) × "
        f"{span:g} {unit}s × MFU {mfu:.0%} = {flops:.3g} FLOPs",
    )


def _number(text: str, budget: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise FivefoldError(f"budget {budget!r}: {text!r} is not a number; {_HOW}") from None
    if not 0 < value < 1e40:
        raise FivefoldError(f"budget {budget!r}: give a number above 0; {_HOW}")
    return value


def compute_optimal(
    budget: Budget, tokens_per_parameter: float = TOKENS_PER_PARAMETER
) -> ComputeOptimal:
    """N = √(C / (6r)) and D = r·N."""
    if not 0 < tokens_per_parameter < 1e9:
        raise FivefoldError(
            f"tokens_per_parameter {tokens_per_parameter}: give a number above 0, such as 20"
        )
    size = math.sqrt(budget.flops / (6 * tokens_per_parameter))
    return ComputeOptimal(budget, tokens_per_parameter, size, tokens_per_parameter * size)


def equal_flops(best: ComputeOptimal, model: str | None = None) -> list[SpentOn]:
    """The optimum of both kinds, the named model, and the presets of each kind whose active
    parameters are nearest to the optimum: all with the same FLOPs."""
    size, sparse = best.parameters, SPARSITY * best.parameters
    rows = [
        _spent(best, "compute-optimal, dense", "dense", size, size),
        _spent(best, f"compute-optimal, {SPARSITY} × in experts", "MoE", sparse, size),
    ]
    if model is not None:
        rows.append(_of_model(best, model))
    presets = [_of_model(best, name) for name in models.presets() if name != model]
    for kind in ("dense", "MoE"):
        same = [preset for preset in presets if preset.kind == kind]
        same.sort(key=lambda preset: abs(math.log(preset.active / best.parameters)))
        rows += sorted(same[:_MOST_MODELS], key=lambda preset: preset.active)
    return rows


def _of_model(best: ComputeOptimal, name: str) -> SpentOn:
    shape = models.load(name)
    sizes = parameters(shape)
    kind = "dense" if shape.moe is None else "MoE"
    return _spent(best, shape.name, kind, sizes.total, sizes.active)


def _spent(best: ComputeOptimal, name: str, kind: str, total: float, active: float) -> SpentOn:
    tokens = best.budget.flops / (6 * active)
    return SpentOn(name, kind, total, active, tokens, tokens / (best.tokens_per_parameter * active))
