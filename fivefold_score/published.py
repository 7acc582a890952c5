"""Published runs, in the schema of the data files, as cases that can be estimated.

A row says what ran: the sizes of the model, the GPUs, the layout, the batch, the recomputation. If
it leaves open what time depends on (microbatch size, chunks, recomputation, how far a custom
schedule runs ahead), it becomes several cases, and their times are a range. Whatever else it leaves
out is an assumption, which is noted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, cast, get_args

import numpy as np

from fivefold.core import PRECISIONS, FivefoldError, Machine, UnknownName, build, tables
from fivefold.core import hardware as machines
from fivefold.core.layout import Fp8
from fivefold.core.model import Activation, Moe, Shape, parameters
from fivefold.core.model import presets as models
from fivefold.core.schedule import family as schedule_family
from fivefold.core.schedule import named
from fivefold.core.schedule import names as schedule_names
from fivefold.cost import FAMILIES, RECOMPUTE, RULES, LayoutGrid
from fivefold.cost.hardware import EAGER_LAUNCH, FIVEFOLD, SoftwareStack, load_preset, load_stack
from fivefold_score.rows import Row, RowOverlap, RowSoftware, unknown_keys
from fivefold_score.spelling import (
    RowReader,
    family_of,
    is_usual_network,
    network_rate,
    source_of,
    spellings,
)

# The model of a measured run, from the sizes of its row.
#
# Rows seldom say whether an MLP is gated and whether the head is tied. Their number of parameters
# tells both; without it, an MLP of four times the width is taken for an ungated one. What no size
# tells (latents, shared experts, dense layers) is in the table `shape` of a row.

GPT_VOCAB = 51_200  # GPT-2's vocabulary, padded as Megatron does, if a row does not say


def read_shape(reader: RowReader) -> Shape:
    """The model by the sizes of a row and its table `shape`. Without that table, a row that is
    named like a preset has what its sizes do not describe, such as latents, from there."""
    keys: dict[str, Any] = dict(reader.row.get("shape") or {})
    base, model = keys.pop("base", None), reader.text("model")
    if reader.row.get("shape") is None:
        named = spellings().models.items()
        base = next((name for like, name in named if re.search(like, model, re.IGNORECASE)), None)
    if base is not None:
        preset = models.load(str(base))
        if reader.row.get("shape") is None:
            mtp = preset.mtp if re.search(r"w/ MTP", model) else 0
            preset = replace(preset, mtp=mtp)
            if preset.layers != reader.integer("layers", preset.layers):
                reader.assume(f"shape is not said: all but the sizes of the row is that of {base}")
        return _with_table(_resized(reader, preset), keys)
    width, heads = reader.integer("hidden"), reader.integer("heads")
    plain = Shape(
        name=reader.text("id"),
        layers=reader.integer("layers"),
        width=width,
        heads=heads,
        kv_heads=reader.assumed_integer("kv_heads", heads, "as many as heads"),
        head_dim=reader.integer("head_dim", max(2, width // heads // 2 * 2)),
        ffn=reader.integer("ffn_hidden", 4 * width),
        vocab=reader.integer("vocab", GPT_VOCAB),
        max_seq=reader.integer("seq_len"),
    )
    if reader.row.get("experts") is not None:
        routed = Moe(reader.integer("experts"), reader.integer("topk"), plain.ffn)
        plain = replace(plain, moe=routed)
    if reader.row.get("shape") is not None:
        return _with_table(_finished(reader, plain), keys)
    for pattern, sizes in spellings().sizes.items():
        if re.search(pattern, model, re.IGNORECASE):
            reader.assume(f"attention of {model}: heads of {sizes.head_dim}, window {sizes.window}")
            plain = replace(
                plain,
                head_dim=sizes.head_dim,
                window=sizes.window,
                global_every=sizes.global_every,
            )
    return _finished(reader, plain)


def _resized(reader: RowReader, preset: Shape) -> Shape:
    """A preset with the sizes that a row says; heads with latents have sizes of their own."""
    fields = {"layers": "layers", "width": "hidden", "heads": "heads", "vocab": "vocab"}
    fields |= {"max_seq": "seq_len"}
    if preset.mla is None:
        fields |= {"kv_heads": "kv_heads", "head_dim": "head_dim"}
    sizes = {key: reader.integer(name, getattr(preset, key)) for key, name in fields.items()}
    if preset.mla is not None:
        sizes["kv_heads"] = sizes["heads"]
    options = {
        key: reader.row[key] for key in ("activation", "tied") if reader.row.get(key) is not None
    }
    moe, inner = preset.moe, reader.integer("ffn_hidden", preset.ffn)
    if moe is None:
        sizes["ffn"] = inner
    else:
        counts = {"experts": reader.integer("experts", moe.experts)}
        counts |= {"top_k": reader.integer("topk", moe.top_k)}
        counts |= {"ffn": moe.ffn if inner == preset.ffn else inner}
        moe = replace(moe, **counts, first_dense=min(moe.first_dense, sizes["layers"] - 1))
    return replace(preset, **sizes, **options, moe=moe)


def _with_table(shape: Shape, keys: Mapping[str, Any]) -> Shape:
    """The shape with the keys of a row's table `shape`."""
    if not keys:
        return shape
    table = tables.table_of(shape)
    for key, value in keys.items():
        inner = isinstance(value, Mapping) and isinstance(table.get(key), Mapping)
        table[key] = {**table[key], **value} if inner else value
    latents: dict[str, Any] = table.get("mla") or {}
    counts: dict[str, Any] = keys.get("moe") or {}
    if latents:
        table["kv_heads"] = shape.heads
        table["head_dim"] = latents.get("nope_dim", 0) + latents.get("rope_dim", 0)
    if "shared" in counts and "shared_ffn" not in counts:
        table["moe"]["shared_ffn"] = counts["shared"] * table["moe"].get("ffn", 0)
    table = {key: value for key, value in table.items() if value is not None}
    return tables.build(Shape, table, "shape of the row")


def _finished(reader: RowReader, plain: Shape) -> Shape:
    """The shape with its activation and its head."""
    activation = reader.row.get("activation")
    if activation is not None and activation not in get_args(Activation):
        raise UnknownName("activation", str(activation), get_args(Activation))
    kinds = ("swiglu", "gelu") if activation is None else (cast(Activation, activation),)
    tied = (True, False) if reader.row.get("tied") is None else (bool(reader.row["tied"]),)
    shapes = [_with(reader, plain, *choice) for choice in product(kinds, tied)]
    if reader.row.get("ffn_hidden") is None:
        # A gated MLP of 8/3 of the width has as many parameters as one of 4 times it.
        shapes = [shape for shape in shapes if shape.activation != "gelu"] or shapes
        of = shapes[0]
        reader.assume(f"ffn_hidden is not said: {of.ffn / of.width:.3g} x hidden, {of.activation}")
    known = reader.row.get("vocab") is not None
    if not known:
        reader.assume(f"vocab is not said: {GPT_VOCAB}")
    number = reader.row.get("params_b")
    if len(shapes) == 1:
        return shapes[0]
    if known and isinstance(number, int | float) and number > 0:
        return min(shapes, key=lambda candidate: abs(parameters(candidate).total - number * 1e9))
    return _assumed(reader, shapes)


def _with(reader: RowReader, plain: Shape, activation: Activation, tied: bool) -> Shape:
    gated = activation in ("swiglu", "geglu")
    ffn = plain.ffn
    if reader.row.get("ffn_hidden") is None and gated:
        ffn = -(-plain.width * 8 // (3 * 256)) * 256
    moe = None if plain.moe is None else replace(plain.moe, ffn=ffn)
    positions = "rotary" if gated else "learned"
    return replace(plain, activation=activation, tied=tied, positions=positions, ffn=ffn, moe=moe)


def _assumed(reader: RowReader, shapes: list[Shape]) -> Shape:
    """The likelier of several shapes: GPT's layers if the MLP has four times the width."""
    wide = [shape.ffn == 4 * shape.width and shape.moe is None for shape in shapes]
    likely = "gelu" if any(wide) else "swiglu"
    candidates = [shape for shape in shapes if shape.activation == likely] or shapes
    if len({shape.activation for shape in shapes}) > 1:
        reader.assume(
            f"activation is not said: {candidates[0].activation}, by the width of the MLP"
        )
    if len({shape.tied for shape in candidates}) > 1:
        candidates = [
            shape for shape in candidates if shape.tied == (candidates[0].activation == "gelu")
        ]
        reader.assume(
            f"tied is not said: {str(candidates[0].tied).lower()}, as is usual for the MLP"
        )
    return candidates[0]


# The machine and the precision of a measured run, from the words of its row.


def read_machine(reader: RowReader, without: str) -> Machine:
    """The machine of a row, with the network that it names; none of its numbers is fitted to the
    source `without`."""
    tables, label = spellings(), reader.text("gpu").lower()
    name = tables.gpus.get(label, label)
    wires = reader.text("interconnect")
    family = tables.families.get(family_of(reader.row))
    if not wires and family and family.interconnect:
        wires = family.interconnect
        reader.assume(f"interconnect is not said: {wires}, as other rows of its family")
    variants = tables.variants.get(name, {})
    variant = next((kind for text, kind in variants.items() if text in wires), "")
    name = variant or name
    for chips, part in tables.slices.get(name, {}).items():
        if reader.integer("gpus") % int(chips) == 0:
            name = part
    machine = _loaded(name, without)
    count = reader.row.get("gpus_per_node")
    if count is not None and count != machine.gpus_per_node:
        of = f"the {machine.gpus_per_node} of {machine.name}"
        reader.assume(f"gpus_per_node = {count}: priced with {of}")
    rate = reader.row.get("network_gb_s")
    if rate is not None:
        return _with_network(machine, float(rate) * 1e9)
    stated = network_rate(wires, machine.gpus_per_node)
    if stated is not None and not variant:
        return _with_network(machine, stated)
    crosses = reader.integer("gpus") > (machine.tiers[0].size or machine.gpus_per_node)
    if crosses and not variant and not is_usual_network(wires):
        label = f"{wires!r} tells no bandwidth" if wires else "interconnect is not said"
        reader.assume(f"{label}: the network of {machine.name}")
    return machine


@lru_cache
def _loaded(name: str, without: str) -> Machine:
    return machines.load_without(name, without)


@lru_cache
def _with_network(machine: Machine, bandwidth: float) -> Machine:
    *inner, network = machine.tiers
    if network.link.bandwidth * network.links_per_gpu == bandwidth:
        return machine
    link = replace(network.link, bandwidth=bandwidth)
    return replace(machine, tiers=(*inner, replace(network, link=link, links_per_gpu=1.0)))


def read_precision(reader: RowReader) -> str:
    """The precision: one word of the row, which may be followed by a recipe in brackets."""
    text = reader.text("precision").lower()
    if not text:
        reader.assume("precision is not said: bf16")
        return "bf16"
    known = {**spellings().precisions, **{precision: precision for precision in PRECISIONS}}
    names = [word for word in re.findall(r"[a-z0-9]+", text.split("(")[0]) if word in known]
    if not names:
        raise UnknownName("precision", text, known)
    precisions = {known[name] for name in names}
    if len(precisions) > 1:
        reader.assume(f"precision = {text!r}: matmuls in {known[names[-1]]}")
    elif text.split("(")[0].strip() not in known:
        reader.assume(f"precision = {text!r}: {known[names[-1]]}")
    return known[names[-1]]


OPEN_MICROBATCH_SIZES = (1, 2, 4)  # if a row does not say
OPEN_CHUNKS = (1, 2, 3, 4, 6, 8)


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
    source: str
    assumptions: tuple[str, ...]

    @property
    def arguments(self) -> tuple[Shape, Machine, SoftwareStack, LayoutGrid, int, str]:
        """The arguments of cost functions, in their order."""
        return self.shape, self.machine, self.stack, self.grid, self.seq, self.precision

    def require_runnable_schedule(self) -> None:
        """Refuse a schedule that cannot run the numbers of the row."""
        columns = (self.grid.pp, self.grid.microbatches, self.grid.chunks)
        numbers = tuple(int(column.item()) for column in columns)
        family = schedule_family(schedule_names()[int(self.grid.schedule.item())])
        if family.problems(*numbers):
            raise FivefoldError(family.refusal(*numbers))

    @property
    def choices(self) -> str:
        """The choices of this case that a row may leave open."""
        columns = (self.grid.microbatch_size, self.grid.chunks, self.grid.recompute)
        rows, chunks, recompute = (int(column.item()) for column in columns)
        text = f"rows={rows} chunks={chunks} recompute={RECOMPUTE[recompute]}"
        return f"{text} ahead={self.stack.hop_forwards}"


def cases(row: Row, without: str = "") -> list[Case]:
    """The run of a row; several cases if the row leaves choices open that time depends on.

    `without`: a source to which no number of machine or stack is fitted.
    """
    reader = RowReader(row)
    for assumption in unknown_keys(row):
        reader.assume(assumption)
    shape, machine = read_shape(reader), read_machine(reader, without)
    precision = read_precision(reader)
    stacks = _stacks(reader, precision, without)
    grids = _grids(reader, shape)
    family, source, seq = family_of(row), source_of(row), reader.integer("seq_len")
    assumed = tuple(reader.assumptions)
    return [
        Case(shape, machine, stack, grid, seq, precision, family, source, assumed)
        for grid, stack in product(grids, stacks)
    ]


def _stacks(reader: RowReader, precision: str, without: str) -> list[SoftwareStack]:
    """The software of a row, and what its source allows as well."""
    name = reader.text("stack") or _assumed_stack(reader, precision)
    preset = load_preset(name, without)
    stacks = [preset.stack, *(load_stack(stack_name, without) for stack_name in preset.open)]
    return [_as_said(reader.row, stack) for stack in stacks]


def _as_said(row: Row, stack: SoftwareStack) -> SoftwareStack:
    """The stack with the row's frozen weights, adapters, offloaded activations and software."""
    rank, away = int(row.get("lora_rank") or 0), float(row.get("offload_activations") or 0.0)
    if rank < 0 or not 0 <= away <= 1:
        raise FivefoldError("give a lora_rank of 0 or more and a share of activations up to 1")
    memory = replace(stack.memory, offloaded=away or stack.memory.offloaded)
    frozen = bool(row.get("frozen")) or rank > 0
    stack = replace(stack, frozen=frozen, lora_rank=rank, memory=memory)
    return _with_software(
        stack, build(RowSoftware, row.get("software") or {}, "software of the row")
    )


# What a compiler changes: passes over activations and bytes of the loss, ours where it runs and
# those of PyTorch's own kernels where it does not.
_COMPILED = ("wide_passes", "narrow_passes", "rotary_passes", "loss_bytes")
# What a replayed graph has none of, and what a stack without one has at least.
_HOST = ("launch", "expert_launch", "dispatch_launch", "crowding", "message_launch", "expert_wait")


def _with_software(stack: SoftwareStack, software: RowSoftware) -> SoftwareStack:
    """The stack as a row says that it ran."""
    changes: dict[str, Any] = {}
    if software.compile is not None:
        usual = FIVEFOLD if software.compile else load_stack("eager")
        nearer = min if software.compile else max
        for name in _COMPILED:
            changes[name] = nearer(getattr(stack, name), getattr(usual, name))
    if software.cuda_graphs:
        changes |= dict.fromkeys(_HOST, 0.0)
    elif software.cuda_graphs is False and not stack.launch:
        changes["launch"] = EAGER_LAUNCH
    if software.fp8 is not None:
        changes["fp8"] = Fp8.parse(software.fp8)
    overlap = software.overlap or RowOverlap()
    if overlap.dp is not None:
        changes |= {"gradients_hidden": overlap.dp, "gathers_hidden": float(overlap.dp)}
    if overlap.tp is not None:
        changes |= {"tp_hidden": overlap.tp, "tp_overlap": 0}
    if overlap.ep is not None:
        changes |= {"experts_hidden": overlap.ep, "paired_layers": False, "shared_overlap": False}
    if overlap.pp is not None:
        changes["transfers_hidden"] = overlap.pp
    return replace(stack, **changes)


def _assumed_stack(reader: RowReader, precision: str) -> str:
    """The stack of the row's family; of an unknown family, the nearest by what the row says."""
    family = spellings().families.get(family_of(reader.row))
    sharded = reader.row.get("zero") == 3
    if family:
        name = (family.zero3 if sharded else "") or family.stack
        reader.assume(f"stack is not said: {name}, as its family")
        return name
    ampere = reader.text("gpu").startswith(("a100", "a800", "v100"))
    half = precision == "fp16" or not reader.text("precision")  # as was usual on those GPUs
    if reader.text("gpu").startswith("tpu"):
        name = "xla"
    elif _schedule(reader, 1).startswith("zb"):
        name = "zero-bubble"
    elif _schedule(reader, 1).startswith("dualpipe"):
        name = "deepseek"
    elif sharded and reader.integer("pp") == 1:
        name = "fsdp" if ampere else "torchtitan"
    elif half and (ampere or precision == "fp16"):
        name = "megatron-2021"
    else:
        name = "eager" if ampere else "megatron"
    reader.assume(f"stack is not said: {name}, by zero, pp, gpu and precision")
    return name


def _grids(reader: RowReader, shape: Shape) -> list[LayoutGrid]:
    row = reader.row
    dp, batch = reader.integer("dp"), reader.integer("global_batch")
    pp = reader.integer("pp")
    chunks: tuple[int, ...] = (1,)
    text = _schedule(reader, 1)
    if text != "1f1b" and schedule_family(text).max_chunks:
        chunks = (schedule_family(text).min_chunks,)  # of the schedule, whatever a row calls them
    elif row.get("vpp"):
        chunks = (reader.integer("vpp"),)
    elif pp > 1 and "interleaved" in reader.text("schedule").lower():
        chunks = tuple(count for count in OPEN_CHUNKS if 1 < count <= -(-shape.layers // pp))
    if row.get("micro_batch") is None:
        # Assume at least as many microbatches as stages, if a smaller microbatch allows it.
        fewest = min(pp, batch // dp)
        rows = tuple(size for size in OPEN_MICROBATCH_SIZES if batch // (dp * size) >= fewest)
    else:
        rows = (reader.integer("micro_batch"),)
    text = reader.text("recompute").lower().split("(")[0].strip()
    kinds = (text,) if text else RECOMPUTE
    if kinds[0] not in RECOMPUTE:
        raise UnknownName("recompute", kinds[0], RECOMPUTE)
    if not rows or not chunks:
        raise FivefoldError("no number of rows or chunks fits the batch and the layers")
    grids = [_grid(reader, *combination) for combination in product(rows, chunks, kinds)]
    # A source that leaves the microbatch open has chosen one that its schedule can run.
    return [grid for grid in grids if _runs(grid)] or grids


def _runs(grid: LayoutGrid) -> bool:
    numbers = (int(column.item()) for column in (grid.pp, grid.microbatches, grid.chunks))
    return grid.pp.item() == 1 or not FAMILIES[int(grid.schedule.item())].problems(*numbers)


def _grid(reader: RowReader, rows: int, chunks: int, recompute: str) -> LayoutGrid:
    dp, tp, pp = (reader.integer(key) for key in ("dp", "tp", "pp"))
    # Number of data ranks that shard the states, if the row says so; else 0.
    extra: Row = reader.row.get("extra") or {}
    size = extra.get("zero_group")
    shard = (size if isinstance(size, int) and size > 0 else 0) or dp
    schedule = _schedule(reader, chunks)
    if pp > 1:  # of DualPipe, whose ranks have two stages, sources say two chunks or none
        family = named(schedule)
        chunks = min(max(chunks, family.min_chunks), family.max_chunks or chunks)
    numbers = {
        "tp": tp,
        "cp": reader.integer("cp", 1),
        "pp": pp,
        "replicate": dp // shard,
        "shard": shard,
        "ep": reader.integer("ep", 1),
        "etp": reader.integer("etp", 1),
        "zero": _zero(reader),
        "chunks": chunks,
        "microbatch_size": rows,
        "microbatches": max(1, round(reader.integer("global_batch") / (dp * rows))),
        "recompute": RECOMPUTE.index(recompute),
        "schedule": schedule_names().index(schedule),
    }
    columns = {name: np.array([float(number)]) for name, number in numbers.items()}
    if tp > 1 and reader.row.get("sp") is None:
        reader.assume("sp is not said: false")
    sp = bool(reader.row.get("sp")) and tp > 1
    return LayoutGrid(**columns, sp=np.array([sp]), offload=np.zeros(1), rules=RULES)


def _zero(reader: RowReader) -> int:
    stage = reader.row.get("zero")
    if stage is None:
        if reader.integer("dp") > 1:
            reader.assume("zero is not said: 0")
        return 0
    if stage not in (0, 1, 2, 3):
        raise FivefoldError(f"zero = {stage!r}: give a ZeRO stage, 0 to 3")
    return int(stage)


def _schedule(reader: RowReader, chunks: int) -> str:
    """The schedule by its words, which may be followed by a remark; one rank has none."""
    name = re.split(r"[(,;]", reader.text("schedule").lower())[0].strip()
    name = re.sub(r"[\s_]+", "-", name)
    name, plain = spellings().schedules.get(name, name), "interleaved" if chunks > 1 else "1f1b"
    if reader.integer("pp") == 1:
        return plain
    if not name:
        reader.assume("schedule is not said: 1f1b, interleaved with several chunks")
    if name in ("", "1f1b", "interleaved"):
        return plain
    if name not in schedule_names():
        raise UnknownName("schedule", name, [*schedule_names(), *spellings().schedules])
    return name
