"""Published runs, in the schema of the data files, as cases that can be estimated.

A row says what ran: the sizes of the model, the GPUs, the layout, the batch, the recomputation. If
it leaves open what time depends on (microbatch size, chunks, recomputation, how far a custom
schedule runs ahead), it becomes several cases, and their times are a range. The software is known
from the family, the first part of the id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from fivefold.core import machine as machines
from fivefold.core import models
from fivefold.core.count import parameters
from fivefold.core.errors import FivefoldError
from fivefold.core.machine import Machine
from fivefold.core.schedule.catalog import family as schedule_family
from fivefold.core.schedule.catalog import names as schedule_names
from fivefold.core.shape import Moe, Shape
from fivefold.cost import stack as stacks
from fivefold.cost.grid import RECOMPUTE, LayoutGrid
from fivefold.cost.stack import SoftwareStack
from fivefold.score.rows import Row

# How the data files spell GPUs, if not by the preset's name.
GPUS = {"a100-80g": "a100", "h100-sxm": "h100", "tpu_v4": "tpu-v4"}
# Networks that differ from the preset: words in a row's `interconnect`, and bytes/s per GPU.
NETWORKS = {
    "4x100 Gb RoCE per node": 6.25e9,
    "AWS EFA 400 Gb/s": 6.25e9,
    "vTrain config uses 12.5 GB/s": 12.5e9,
}
# Machines that differ from the preset, by words in `interconnect`.
VARIANTS = {"500 W power cap": "h100-500w", "AWS p5": "h100-p5", "EFA across nodes": "h100-p5"}
# Slices of a pod, which are separate tori, by their number of chips; a job has one or several.
SLICES = {"tpu-v4": {3072: "tpu-v4-3072"}}
# Models that the sizes in a row do not describe in full.
PRESETS = {
    r"qwen3.?30b": "qwen3-30b-a3b",
    r"qwen3.?235b": "qwen3-235b-a22b",
    r"deepseek.?v3": "deepseek-v3",
    r"palm": "palm-540b",
}
# Families with GPT layers: two matrices in the MLP and a tied head. All others have Llama layers.
GPT = ("sc21", "korth", "mtnlg", "vtrain", "llmf", "zb", "opt")
GPT_VOCAB = 51_200  # GPT-2's vocabulary, padded as Megatron does, if a row does not say
OPEN_MICROBATCH_SIZES = (1, 2, 4)  # if a row does not say
OPEN_CHUNKS = (1, 2, 3, 4, 6, 8)
# The first job of the Hugging Face sweep with repaired pipeline messages.
HF_REPAIRED = 14_050_000
# Share of dispatch and combine that is hidden if two microbatches overlap in a layer.
OVERLAPPED = 0.9
STACKS = {
    "sc21": stacks.MEGATRON_2021,
    "korth": stacks.MEGATRON_2021,
    "opt": stacks.MEGATRON_2021,
    "mtnlg": stacks.DEEPSPEED_PIPELINE,
    "sc21-zero3": stacks.DEEPSPEED_2021,
    "vtrain-multi": stacks.MEGATRON_DEEPSPEED,
    "vtrain-single": stacks.MEGATRON_DEEPSPEED_SMALL,
    "hfbench": stacks.NANOTRON,
    "hfplaybook": stacks.NANOTRON,
    "dgxc2502": stacks.NEMO,
    "mbridge": stacks.BRIDGE,
    "modelzoo": stacks.MODELZOO,
    "llama3": stacks.META,
    "llmf": stacks.FOUNDRY,
    "tt": stacks.TITAN,
    "tt2412": stacks.TITAN,
    "tt2408": stacks.TITAN,
    "tt2404": stacks.TITAN_EAGER,
    "zb": stacks.ZERO_BUBBLE,
    "internevo": stacks.INTERN,
}
# For other families: words in a row's source and notes, in this order.
WORDS = {
    r"nanotron": stacks.NANOTRON,
    r"torchtitan|fsdp2": stacks.TITAN,
    r"llm-foundry|composer|mosaic": stacks.FOUNDRY,
    r"megatron-bridge": stacks.BRIDGE,
    r"nemo|dgxc": stacks.NEMO,
    r"internevo": stacks.INTERN,
    r"zero bubble": stacks.ZERO_BUBBLE,
    r"megatron": stacks.MEGATRON_2021,
}
# Names of models with GPT layers, in families that also have others.
GPT_NAMES = r"gpt|\bopt\b|bloom|\bmpt\b|megatron|turing|nlg"


@dataclass(frozen=True)
class Case:
    """One run that can be estimated; its grid has one layout."""

    shape: Shape
    machine: Machine
    stack: SoftwareStack
    grid: LayoutGrid
    seq: int
    precision: str
    family: str

    @property
    def arguments(self) -> tuple[Shape, Machine, SoftwareStack, LayoutGrid, int, str]:
        """The arguments of cost functions, in their order."""
        return self.shape, self.machine, self.stack, self.grid, self.seq, self.precision

    def require_runnable_schedule(self) -> None:
        """Refuse a schedule that cannot run the numbers of the row."""
        columns = (self.grid.pp, self.grid.microbatches, self.grid.chunks)
        numbers = tuple(int(each.item()) for each in columns)
        family = schedule_family(schedule_names()[int(self.grid.schedule.item())])
        if family.problems(*numbers):
            raise FivefoldError(family.refusal(*numbers))

    @property
    def choices(self) -> str:
        """The choices of this case that a row may leave open."""
        columns = (self.grid.microbatch_size, self.grid.chunks, self.grid.recompute)
        rows, chunks, recompute = (int(each.item()) for each in columns)
        said = f"rows={rows} chunks={chunks} recompute={RECOMPUTE[recompute]}"
        return f"{said} ahead={self.stack.hop_forwards}"


def cases(row: Row) -> list[Case]:
    """The run of a row; several cases if the row leaves choices open that time depends on."""
    family = family_of(row)
    shape, machine = _shape(row, family), _machine(row, family)
    stack, precision = _stack(row, family), _precision(row)
    # How far ahead the custom schedule of this stack runs is not published.
    variants = (stack, stacks.META_LEAN) if stack is stacks.META else (stack,)
    return [
        Case(shape, machine, each, grid, _integer(row, "seq_len"), precision, family)
        for grid, each in product(_grids(row, shape), variants)
    ]


def family_of(row: Row) -> str:
    """The source of a row: the first part of its id; DeepSpeed's rows of SC21 are separate."""
    name = str(row.get("id", ""))
    if name.startswith("vtrain-"):
        return "-".join(name.split("-")[:2])
    if name.startswith("sc21") and "zero3" in name:
        return "sc21-zero3"
    return re.split(r"[-_]", name)[0]


def _integer(row: Row, key: str) -> int:
    value = row.get(key)
    if not isinstance(value, int | float) or value < 1 or value != int(value):
        raise FivefoldError(f"{key} = {value!r}: this row does not say what the time depends on")
    return int(value)


def _optional_integer(row: Row, key: str, default: int) -> int:
    return default if row.get(key) is None else _integer(row, key)


def _shape(row: Row, family: str) -> Shape:
    model = str(row.get("model") or "")
    for pattern, name in PRESETS.items():
        if re.search(pattern, model, re.IGNORECASE):
            preset = models.load(name)
            mtp = preset.mtp if re.search(r"w/ MTP", model) else 0
            return replace(preset, mtp=mtp, max_seq=_integer(row, "seq_len"))
    width, heads = _integer(row, "hidden"), _integer(row, "heads")
    gated = not (family.startswith(GPT) or re.search(GPT_NAMES, model, re.IGNORECASE))
    ffn = _optional_integer(
        row, "ffn_hidden", -(-width * 8 // (3 * 256)) * 256 if gated else 4 * width
    )
    routed = row.get("experts") is not None
    shape = Shape(
        name=str(row.get("id")),
        layers=_integer(row, "layers"),
        width=width,
        heads=heads,
        kv_heads=_optional_integer(row, "kv_heads", heads),
        head_dim=64 if "OSS" in model else max(2, width // heads // 2 * 2),
        ffn=ffn,
        vocab=_optional_integer(row, "vocab", GPT_VOCAB) if not gated else _integer(row, "vocab"),
        max_seq=_integer(row, "seq_len"),
        activation="swiglu" if gated else "gelu",
        positions="rotary" if gated else "learned",
        tied=not gated,
        window=128 if "OSS" in model else None,
        global_every=2 if "OSS" in model else None,
        moe=Moe(_integer(row, "experts"), _integer(row, "topk"), ffn) if routed else None,
    )
    return replace(shape, tied=True) if _is_tied(row, shape) else shape


def _is_tied(row: Row, shape: Shape) -> bool:
    """Whether a row's number of parameters is that of a model with a tied head."""
    said = row.get("params_b")
    if not isinstance(said, int | float) or shape.tied:
        return shape.tied
    tied = parameters(replace(shape, tied=True)).total
    return abs(said * 1e9 - tied) < abs(said * 1e9 - parameters(shape).total)


def _machine(row: Row, family: str) -> Machine:
    gpu = str(row.get("gpu"))
    wires = str(row.get("interconnect") or "")
    name = GPUS.get(gpu, gpu)
    if family == "hfbench":
        wires = wires or "AWS p5"  # the sweep's own file leaves it out
    for words, variant in VARIANTS.items():
        if words in wires and name == "h100":
            name = variant
    for chips, part in SLICES.get(name, {}).items():
        if _integer(row, "gpus") % chips == 0:
            name = part
    machine = _loaded(name)
    for words, bandwidth in NETWORKS.items():
        if words in wires:
            machine = _with_network(machine, bandwidth)
    return machine


@lru_cache
def _loaded(name: str) -> Machine:
    return machines.load(name)


@lru_cache
def _with_network(machine: Machine, bandwidth: float) -> Machine:
    *inner, network = machine.tiers
    link = replace(network.link, bandwidth=bandwidth)
    return replace(machine, tiers=(*inner, replace(network, link=link, links_per_gpu=1.0)))


def _precision(row: Row) -> str:
    said = str(row.get("precision") or "bf16").lower()
    return next((each for each in ("fp8", "fp16", "bf16") if each in said), "bf16")


def _stack(row: Row, family: str) -> SoftwareStack:
    """The stack of a family, changed as the row's notes say."""
    stack, notes = STACKS.get(family) or _stack_by_words(row), str(row.get("notes") or "")
    if stack is stacks.NANOTRON:
        job = re.search(r"-(\d+)$", str(row.get("id")))
        return stacks.NANOTRON_OLD if job and int(job[1]) < HF_REPAIRED else stack
    if stack is stacks.TITAN and "compile" not in notes and "FSDP;" in notes:
        return stacks.TITAN_EAGER
    if stack is stacks.BRIDGE and "full_iteration" in notes:
        return stacks.BRIDGE_GRAPHS
    if "A2A dispatcher" in notes:
        return replace(stack, crosses_once=False)
    if "A2A overlap" in notes:
        return replace(stack, experts_hidden=OVERLAPPED)
    some = re.search(r"full recompute of (\d+) layers per \(virtual\) stage", notes)
    if some:
        chunks = _integer(row, "pp") * _optional_integer(row, "vpp", 1)
        return replace(stack, recomputed=min(1.0, int(some[1]) * chunks / _integer(row, "layers")))
    return stack


def _stack_by_words(row: Row) -> SoftwareStack:
    """The stack of an unknown family, by words in the row."""
    text = f"{row.get('source')} {row.get('notes')}"
    found = (each for words, each in WORDS.items() if re.search(words, text, re.IGNORECASE))
    stack = next(found, stacks.FIVEFOLD)
    # Megatron after 2022 has fused attention and overlaps reductions, as NVIDIA's later stacks do.
    modern = stack is stacks.MEGATRON_2021 and _precision(row) != "fp16"
    return stacks.NEMO if modern else stack


def _grids(row: Row, shape: Shape) -> list[LayoutGrid]:
    dp, batch = _integer(row, "dp"), _integer(row, "global_batch")
    pp = _integer(row, "pp")
    said = str(row.get("schedule") or "").lower()
    chunks: tuple[int, ...] = (1,)
    if _schedule(row, 1) == said and said != "1f1b" and schedule_family(said).max_chunks:
        chunks = (schedule_family(said).min_chunks,)  # of the schedule, whatever a row calls them
    elif row.get("vpp"):
        chunks = (_integer(row, "vpp"),)
    elif pp > 1 and "interleaved" in said:
        chunks = tuple(each for each in OPEN_CHUNKS if 1 < each <= -(-shape.layers // pp))
    if row.get("micro_batch") is None:
        # Assume at least as many microbatches as stages, if a smaller microbatch allows it.
        fewest = min(pp, batch // dp)
        rows = tuple(each for each in OPEN_MICROBATCH_SIZES if batch // (dp * each) >= fewest)
    else:
        rows = (_integer(row, "micro_batch"),)
    kinds = RECOMPUTE if row.get("recompute") is None else (str(row["recompute"]),)
    if kinds[0] not in RECOMPUTE:
        raise FivefoldError(f"recompute = {kinds[0]!r}: say none, selective or full")
    if not rows or not chunks:
        raise FivefoldError("no number of rows or chunks fits the batch and the layers")
    return [_grid(row, *each) for each in product(rows, chunks, kinds)]


def _grid(row: Row, rows: int, chunks: int, recompute: str) -> LayoutGrid:
    dp, tp, pp = (_integer(row, key) for key in ("dp", "tp", "pp"))
    zero = int(row.get("zero") or 0)
    shard = _zero_group(row) or dp
    numbers = {
        "tp": tp,
        "cp": _optional_integer(row, "cp", 1),
        "pp": pp,
        "replicate": dp // shard,
        "shard": shard,
        "ep": _optional_integer(row, "ep", 1),
        "etp": _optional_integer(row, "etp", 1),
        "zero": zero,
        "chunks": chunks,
        "microbatch_size": rows,
        "microbatches": max(1, round(_integer(row, "global_batch") / (dp * rows))),
        "recompute": RECOMPUTE.index(recompute),
        "schedule": schedule_names().index(_schedule(row, chunks)),
    }
    columns = {name: np.array([float(each)]) for name, each in numbers.items()}
    sp = bool(row.get("sp")) and tp > 1
    return LayoutGrid(**columns, sp=np.array([sp]), offload=np.zeros(1))


def _zero_group(row: Row) -> int:
    """Number of data ranks that shard the states, if the row says so; else 0."""
    extra: Row = row.get("extra") or {}
    said = extra.get("zero_group")
    return said if isinstance(said, int) and said > 0 else 0


def _schedule(row: Row, chunks: int) -> str:
    said = str(row.get("schedule") or "").lower()
    zero_bubble = {"zb1p": "zb-h1", "zb2p": "zb-h2"}
    if said in zero_bubble:
        return zero_bubble[said]
    if said in schedule_names() and not (said == "1f1b" and chunks > 1):
        return said
    return "interleaved" if chunks > 1 else "1f1b"
