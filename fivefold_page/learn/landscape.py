"""Learn: what each dimension shards, one after the other.

    view(params) -> {"choices", "rows", "axes", "factors", "frames", "sentences"}

Every frame adds one dimension. Its numbers are those of rank 0 with the plan so far: local sizes,
static bytes, and the collectives of a step. Gradients are counted while they accumulate over
microbatches, as in the memory panel of Explore: full with ZeRO-0 and 1, shards from stage 2 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

from fivefold.core import PRECISIONS, counted, kind_text
from fivefold.core.model import presets as models
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.cost.memory import static_bytes
from fivefold.cost.traffic import TrafficEntry, message_bytes, predict_traffic
from fivefold.render import wrapped
from fivefold_page import Params, View
from fivefold_page.learn.layer_parts import shares, tier_name
from fivefold_page.learn.lesson import (
    GROUPS,
    Choice,
    chosen,
    rank_sentences,
    sentence_lines,
    size_text,
)

TITLE = "The landscape: what cuts what"
CHOICES: Mapping[str, Choice] = {
    "model": Choice(
        "Model", ("mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "tiny-moe"), "mixtral-8x7b"
    ),
    "dp": Choice("Data (dp)", ("1", "2", "4", "8"), "4"),
    "cp": Choice("Context (cp)", ("1", "2", "4"), "2"),
    "tp": Choice("Tensor (tp)", ("1", "2", "4", "8"), "2"),
    "pp": Choice("Pipeline (pp)", ("1", "2", "4", "8"), "2"),
    "ep": Choice("Expert (ep)", ("1", "2", "4", "8"), "2"),
    "zero": Choice("ZeRO stage", ("0", "1", "2", "3"), "1"),
    "machine": Choice("Machine", ("h100", "gb200", "laptop"), "h100"),
}
DIMENSIONS = ("dp", "cp", "tp", "pp", "ep", "zero")
_NAMES = {
    "dp": "Data",
    "cp": "Context",
    "tp": "Tensor, with sequence parallelism",
    "pp": "Pipeline",
    "ep": "Expert",
    "zero": "ZeRO",
}
# The groups in which each dimension communicates.
_GROUPS = {
    "dp": ("dp-cp", "edp"),
    "cp": ("ring", "ulysses"),
    "tp": ("tp", "replica"),
    "pp": ("pp", "twin"),
    "ep": ("ep", "ep-near", "ep-far"),
    "zero": ("fsdp", "edp"),
}
_WHEN = {
    "dp": "gradients, once a step, hidden by the last backward",
    "cp": "keys and values, in the attention of every layer and microbatch",
    "tp": "tokens, around attention and MLP of every layer and microbatch",
    "pp": "activations of a microbatch, between two stages",
    "ep": "tokens, to their experts and back, in every layer with experts",
    "zero": "slices of gradients and weights",
}
_ROWS = {
    "batch": "sequences of a step",
    "sequence": "tokens of a row, in attention",
    "between": "tokens of a row, between matmuls",
    "heads": "heads of attention",
    "layers": "layers",
    "experts": "experts of a layer",
    "activations": "activations between two layers",
    "weights": "weights",
    "gradients": "gradients, while they add up",
    "optimizer": "optimizer states",
}
_IN_BYTES = ("activations", "weights", "gradients", "optimizer")
_SEQ, _BATCH = 4096, 32


class _Step(NamedTuple):
    """A plan with the first dimensions, what its rank 0 has, and what the last dimension moves."""

    plan: Plan
    holds: dict[str, int]
    moves: list[View]


def view(params: Params) -> View:
    """One device, then a frame for every dimension."""
    choices = chosen(CHOICES, params)
    degrees = [(name, int(choices[name])) for name in DIMENSIONS]
    steps = [
        _step(choices["model"], choices["machine"], tuple(degrees[:count]))
        for count in range(len(degrees) + 1)
    ]
    frames = [_first(steps[0]), *map(_next, degrees, steps, steps[1:])]
    return {
        "choices": choices,
        "layout": str(steps[-1].plan.layout),
        "layers": steps[0].plan.shape.layers,
        "rows": [
            {"name": name, "what": what, "bytes": name in _IN_BYTES} for name, what in _ROWS.items()
        ],
        "axes": list(DIMENSIONS),
        "factors": {
            name: [after.holds[name] / before.holds[name] for before, after in pairwise(steps)]
            for name in _ROWS
        },
        "frames": frames,
        "sentences": _sentences(steps),
    }


@lru_cache(maxsize=128)
def _step(model: str, machine: str, degrees: tuple[tuple[str, int], ...]) -> _Step:
    """The plan with these dimensions; it does not depend on later ones."""
    label = " ".join(f"{axis}={degree}" for axis, degree in degrees if axis != "zero")
    plan = resolve(
        PlanOptions(
            model,
            label or "dp=1",
            machine=machine,
            zero=dict(degrees).get("zero", 0),
            seq=min(_SEQ, models.load(model).max_seq),
            batch=_BATCH,
        )
    )
    last, degree = degrees[-1] if degrees else ("dp", 1)
    still = degree == (0 if last == "zero" else 1)
    return _Step(plan, _holds(plan), [] if still else _moves(last, plan))


def _holds(plan: Plan) -> dict[str, int]:
    shape, layout, moe = plan.shape, plan.layout, plan.shape.moe
    assert moe is not None, "the panel's models have experts"
    itemsize = PRECISIONS[plan.precision].itemsize
    grad_itemsize = plan.units.grad_itemsize(itemsize)
    sizes = partial(static_bytes, itemsize=itemsize)
    static = sizes(plan, 0, optimizer="adamw", master=True)
    # Below stage 3 the weights are full, and below stage 2 the accumulating gradients too.
    full_grads = static.weights // itemsize * grad_itemsize
    message = message_bytes(plan, itemsize)
    row = shape.width * itemsize * plan.batch.microbatch_size
    return {
        "batch": plan.batch.sequences // layout.dp,
        "sequence": plan.local_seq,
        "between": message // row,
        "heads": shape.heads // layout.tp,
        "layers": len(plan.stages[0]),
        "experts": moe.experts // layout.ep,
        "activations": message,
        "weights": static.weights,
        "gradients": full_grads if layout.zero < 2 else static.gradients,
        "optimizer": static.master + static.optimizer + static.scalars,
    }


def _first(step: _Step) -> View:
    shape, holds = step.plan.shape, step.holds
    says = (
        f"One device has all of {shape.name}: {shape.layers} layers, {holds['experts']} experts in "
        f"each that has some, {size_text(holds['weights'])} of weights. Now one dimension after "
        "the other cuts it."
    )
    return _frame(says, None, 1, step)


def _next(dimension: tuple[str, int], before: _Step, after: _Step) -> View:
    name, degree = dimension
    cut = [
        f"{_ROWS[row]} {_amount(row, before.holds[row])} → {_amount(row, after.holds[row])}"
        for row in _ROWS
        if after.holds[row] != before.holds[row]
    ]
    what = "; ".join(cut) if cut else "nothing is cut any further"
    says = f"{_NAMES[name]}, {'stage' if name == 'zero' else name} {degree}: {what}."
    return _frame(says, name, degree, after)


def _frame(says: str, axis: str | None, degree: int, step: _Step) -> View:
    return {
        "says": says,
        "axis": axis,
        "degree": degree,
        "holds": step.holds,
        "cuts": _cuts(step.plan),
        "when": _WHEN[axis] if axis else "",
        "moves": step.moves,
    }


def _cuts(plan: Plan) -> View:
    """The number of shards of each dim, and the shard of rank 0 as a share of the whole."""
    layout, stage = plan.layout, plan.stages[0]
    tokens = plan.split.rank_tokens(plan.padded_seq, 0)
    return {
        "batch": layout.dp,
        "sequence": layout.cp,
        "between": layout.cp * (layout.tp if layout.sp else 1),
        "width": layout.tp,
        "layers": layout.pp,
        "experts": layout.ep,
        "tokens": [list(share) for share in shares(tokens, plan.padded_seq)],
        "stage": [stage.start, stage.stop],
        "stages": [[layer_range.start, layer_range.stop] for layer_range in plan.stages],
    }


def _moves(name: str, plan: Plan) -> list[View]:
    """The collectives of rank 0 in a step by group and kind, with the link that they cross."""
    listed = predict_traffic(plan, 0, itemsize=PRECISIONS[plan.precision].itemsize)
    groups: dict[tuple[str, str], list[TrafficEntry]] = {}
    for entry in listed:
        if entry.axis in _GROUPS[name] and entry.kind != "recv":
            groups.setdefault((entry.axis, entry.kind), []).append(entry)
    return [
        {
            "axis": axis,
            "who": GROUPS[axis],
            "kind": kind,
            "count": sum(call.count for call in entries),
            "bytes": sum(call.count * call.bytes for call in entries),
            "group": entries[0].group,
            "tier": tier_name(plan, axis),
        }
        for (axis, kind), entries in groups.items()
    ]


def _move_text(move: View) -> str:
    where = f"among {move['group']} {move['who']} over {move['tier']}"
    what = f"{move['count']:,} × {kind_text(move['kind'])} {where}"
    return f"{what}: {size_text(move['bytes'])} a step in all"


def _amount(row: str, number: int) -> str:
    return size_text(number) if row in _IN_BYTES else f"{number:,}"


def _sentences(steps: list[_Step]) -> list[str]:
    first, last = steps[0], steps[-1]
    layout = last.plan.layout
    static = [
        sum(step.holds[row] for row in ("weights", "gradients", "optimizer")) for step in steps
    ]
    experts = first.plan.shape.num_moe_layers
    sentences = [
        *rank_sentences(layout),
        f"Weights, gradients and optimizer states, while gradients add up: {size_text(static[0])} "
        f"on one device, {size_text(static[-1])} on rank 0 of {layout.world}.",
        f"dp and cp cut data and leave weights alone; tp, pp and ep cut weights; ZeRO slices what "
        f"the {layout.dp * layout.cp} ranks of dp · cp hold alike.",
    ]
    if layout.tp > 1 and experts:
        sentences.append(
            f"tp cuts dense weights, not the experts of {counted(experts, 'layer')}: their tokens "
            "travel instead (ep)."
        )
    return sentences


def text(view: View) -> list[str]:
    """The same for a terminal: the sentence of each frame, and the factors of each dimension."""
    lines = [f"{view['choices']['model']}, {view['layout']}", ""]
    for frame in view["frames"]:
        lines += wrapped(frame["says"], "", "  ")
        if frame["moves"]:
            lines += wrapped(f"moves {frame['when']}:", "    ")
        lines += [f"      {_move_text(move)}" for move in frame["moves"]]
    first, last = (view["frames"][index]["holds"] for index in (0, -1))
    lines += ["", _line("", "one device", view["axes"], "rank 0")]
    for row in view["rows"]:
        name = row["name"]
        factors = ["·" if factor == 1 else f"×{factor:.3g}" for factor in view["factors"][name]]
        before, after = (_amount(name, holds[name]) for holds in (first, last))
        lines.append(_line(row["what"], before, factors, after))
    return [*lines, "", *sentence_lines(view, "- ")]


def _line(name: str, first: str, between: list[str], last: str) -> str:
    cells = "".join(f"{cell:>7}" for cell in between)
    return f"{name:<34}{first:>12}{cells}{last:>11}".rstrip()
