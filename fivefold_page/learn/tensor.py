"""Learn: column-parallel, then row-parallel, on integers, with the sizes of a real model.

    view(params) -> {"choices", "ranks", "overview", "real", "frames", "sentences"}

A frame has equations of matrices and signs for every rank; `one_device` is the result on one
device, and `moves` are the collectives, with their bytes in one layer of the chosen model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core import kind_text
from fivefold.core.layout import local_shape, shard_of, weights
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.cost.traffic import Collective, RankChunk
from fivefold.cost.traffic import tensor_collectives as calls_of
from fivefold.render import WIDTH, duration, wrapped
from fivefold_page import Params, View
from fivefold_page.learn.data_steps import ITEMSIZE
from fivefold_page.learn.lesson import Choice, chosen, sentence_lines, size_text
from fivefold_page.learn.tensor_example import PARTS, Example
from fivefold_page.learn.tensor_frames import frames_of, overview

TITLE = "Tensor: column, then row"
CHOICES: Mapping[str, Choice] = {
    "part": Choice("Part of a layer", PARTS, "mlp"),
    "tp": Choice("Tensor ranks", ("1", "2", "4", "8"), "2"),
    "sp": Choice("Sequence parallelism", ("on", "off"), "on"),
    "model": Choice(
        "Real sizes of",
        ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "gpt3-175b"),
        "llama-3.1-70b",
    ),
    "machine": Choice("on", ("h100", "a100", "gb200", "tpu-v5p", "laptop"), "h100"),
}
_BETWEEN = {"mlp": "the activation", "attention": "the product of scores and values"}


def view(params: Params) -> View:
    """The example frame by frame, each collective with its size in the chosen model."""
    choices = chosen(CHOICES, params)
    plan = plan_of(choices)
    example = Example(choices["part"], plan.layout.tp, plan.layout.sp)
    real = _real(plan, choices["part"])
    frames = [
        {**frame, "moves": [real["calls"][kind] for kind in frame["moves"]]}
        for frame in frames_of(example)
    ]
    return {
        "choices": choices,
        "ranks": plan.layout.tp,
        "overview": overview(example),
        "real": real,
        "frames": frames,
        "sentences": _sentences(example, plan, real, frames),
    }


def plan_of(choices: Mapping[str, str]) -> Plan:
    """The real model over tensor ranks only, one sequence at a time."""
    return resolve(
        PlanOptions(
            choices["model"],
            layout=f"tp={choices['tp']}",
            sp=choices["sp"] == "on",
            machine=choices["machine"],
            microbatch_size=1,
            microbatches=1,
        )
    )


def layer_calls(plan: Plan) -> dict[Collective, int]:
    """The tensor collectives of one layer inside the model, attention and MLP, one microbatch."""
    return dict(calls_of(plan, RankChunk(range(1, 2), 1, ()), ITEMSIZE))


def _real(plan: Plan, part: str) -> View:
    """Sizes of the chosen model: a layer's collectives, their link, and the weight shards."""
    assert plan.machine is not None
    tier = plan.layout.tier("tp", plan.machine)
    shape = plan.shape
    calls: View = {}
    for call in layer_calls(plan):
        sent = round(call.sent)
        extra = {"word": kind_text(call.kind), "sent": sent, "seconds": sent / tier.bandwidth}
        calls[call.kind] = call._asdict() | extra
    shards = [
        {
            "name": weight.name.removeprefix("blocks.1."),
            "cut": weight.cut,
            "whole": list(weight.shape),
            "local": list(
                local_shape(weight, shard_of(weight, shape, plan.layout, plan.layout.coord(0)))
            ),
        }
        for weight in weights(shape)
        if weight.block == "blocks.1" and f".{part}." in weight.name and len(weight.shape) > 1
    ]
    return {
        "tokens": plan.local_seq * plan.batch.microbatch_size,
        "width": shape.width,
        "layers": shape.layers,
        "activations": plan.local_seq * plan.batch.microbatch_size * shape.width * ITEMSIZE,
        "tier": tier.name,
        "link": tier.link.name,
        "bandwidth": tier.bandwidth,
        "calls": calls,
        "pieces": shards,
    }


def _sentences(example: Example, plan: Plan, real: View, frames: list[View]) -> list[str]:
    tp, moves = plan.layout.tp, [move for frame in frames for move in frame["moves"]]
    if tp == 1:
        return [
            _symbols(example),
            "One rank computes the whole product and moves nothing: the same path with blocks of "
            "full size.",
            _other_order(example, real),
        ]
    together = sum(move["sent"] for move in moves)
    activations = real["activations"] // (tp if plan.layout.sp else 1)
    return [
        _symbols(example),
        "The sum over the ranks of Y, and of the gradient of X, is what one device computes, "
        "number by number; the gradients of weights are where their weights are, and do not move.",
        f"In one layer of {plan.shape.name} ({real['tokens']:,} tokens, bf16) the {example.part} "
        f"sends {size_text(together)} from each rank in {len(moves)} collectives, forward and "
        f"backward. In norms and residuals a rank holds {size_text(activations)} of activations"
        f"{f', 1/{tp} of the tokens' if plan.layout.sp else ', all tokens'}.",
        _link_sentence(plan, real, together),
        _other_order(example, real),
    ]


def _symbols(example: Example) -> str:
    """What the letters of the picture mean."""
    into, inner = " and ".join(example.into), " and ".join(example.inner)
    have = "has" if len(example.inner) == 1 else "have"
    return (
        f"X has the tokens, one a row; {into} and {example.back} are weights; {inner} {have} the "
        f"first results, {example.mixed} what {_BETWEEN[example.part]} makes of them, and Y is the "
        "output. A d marks a gradient: dY is that of Y."
    )


def _link_sentence(plan: Plan, real: View, sent: int) -> str:
    assert plan.machine is not None
    tiers = plan.machine.tiers
    index = [tier.name for tier in tiers].index(real["tier"])
    link_tier, beyond = tiers[index], tiers[index + 1 :]
    clause = (
        f"The {plan.layout.tp} ranks lie within {link_tier.name} ({link_tier.link.name}) of "
        f"{plan.machine.name}: at its full {link_tier.bandwidth / 1e9:,.0f} GB/s that takes "
        f"{duration(sent / link_tier.bandwidth)} a layer, and compute waits for it"
    )
    if not beyond:
        return f"{clause}."
    return (
        f"{clause}. Over {beyond[0].name} it would take "
        f"{link_tier.bandwidth / beyond[0].bandwidth:.0f} times as long: keep tp inside the "
        "fastest domain."
    )


def _other_order(example: Example, real: View) -> str:
    result = example.other_order()
    numbers = sum(map(len, result["right"]))
    outputs = sum(piece["whole"][0] for piece in real["pieces"] if piece["cut"] != "row")
    return (
        f"Row first, then column, would need a sum in the middle: taken before it, "
        f"{_BETWEEN[example.part]} is wrong in {result['wrongs']} of {numbers} numbers. That sum "
        f"has {outputs:,} numbers a token instead of {real['width']:,}, and the result would still "
        "have to be gathered."
    )


def text(view: View) -> list[str]:
    """The same for a terminal: each frame with the results of every rank."""
    choices, lines = view["choices"], list[str]()
    for index, frame in enumerate(view["frames"]):
        lines += wrapped(f"{index + 1}. {frame['says']}", later="   ")
        lines += [f"   {_move_line(move)}" for move in frame["moves"]]
        blocks = [
            _block(f"{matrix['name']} of rank {rank}", matrix)
            for rank, equations in enumerate(frame["ranks"])
            for matrix in _results(equations)
        ]
        if "one_device" in frame:
            entry = frame["one_device"]
            blocks.append(_block(f"{entry['name']} on one device", entry))
        lines += [*_side_by_side(blocks), ""]
    over = f"over tp={view['ranks']} on {choices['machine']}"
    lines.append(f"{choices['model']} {over}: a rank holds")
    for entry in view["real"]["pieces"]:
        full_size, local = ("×".join(map(str, entry[key])) for key in ("whole", "local"))
        lines.append(f"   {entry['name']:24} {local:>14} of {full_size:>14}, by {entry['cut']}")
    return [*lines, "", *sentence_lines(view)]


def _results(equations: list[list[Any]]) -> list[View]:
    """The matrices after the last sign of each equation."""
    matrices: list[View] = []
    for equation in equations:
        signs = [i for i, part in enumerate(equation) if isinstance(part, str)]
        matrices += equation[signs[-1] + 1 if signs else 0 :]
    return matrices


def _move_line(move: View) -> str:
    return (
        f"{move['word']} over {move['axis']}={move['group']}: {size_text(move['bytes'])} of "
        f"each rank, which sends {size_text(move['sent'])}"
    )


def _block(title: str, matrix: View) -> list[str]:
    cells = [[str(value) for value in row] for row in matrix["values"]]
    width = max(len(cell) for row in cells for cell in row)
    rows = [" ".join(f"{cell:>{width}}" for cell in row) for row in cells]
    across = max(len(title), *map(len, rows))
    return [f"{row:{across}}" for row in (title, *rows)]


def _side_by_side(blocks: list[list[str]]) -> list[str]:
    """Blocks of text side by side, as many as fit into a line."""
    lines, row = list[str](), list[list[str]]()
    for block in [*blocks, None]:
        wide = block is not None and sum(len(cell[0]) + 3 for cell in (*row, block)) > WIDTH
        if row and (block is None or wide):
            tall = max(map(len, row))
            filled = [[*cell, *[" " * len(cell[0])] * (tall - len(cell))] for cell in row]
            lines += [("   " + "   ".join(line)).rstrip() for line in zip(*filled, strict=True)]
            row = []
        row += [block] if block is not None else []
    return lines
