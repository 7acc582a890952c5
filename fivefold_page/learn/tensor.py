"""Learn: column-parallel, then row-parallel, on integers, with the sizes of a real model.

    view(params) -> {"choices", "ranks", "overview", "real", "frames", "sentences"}

A frame has equations of matrices and signs for every rank; `one_device` is the result on one
device, and `moves` are the collectives, with their bytes in one layer of the chosen model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fivefold.core import counted, kind_text, span
from fivefold.core.layout import local_shape, shard_of, weights
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.cost.traffic import Collective, RankChunk
from fivefold.cost.traffic import tensor_collectives as calls_of
from fivefold.render import WIDTH, duration, wrapped
from fivefold_page import Params, View
from fivefold_page.learn.data_steps import ITEMSIZE
from fivefold_page.learn.lesson import Choice, chosen, sentence_lines, size_text
from fivefold_page.learn.tensor_example import INNER, PARTS, Example, Matrix, rows_of, transposed

# The frames of the tensor panel: the equations of every rank, step by step.
#
# An equation is a list of matrices and signs. A matrix has its numbers, its kind, and a `part`:
# which rows or columns of the full matrix it has.

Equation = list[View | str]
_MIRRORED = (
    "Backward begins with the gradient of a rank's own tokens, and mirrors the reduce-scatter"
)


def frames_of(example: Example) -> list[View]:
    """All frames of an example; `moves` has the kinds of their collectives."""
    return [*_forward(example), *_backward(example), _other_order_frame(example)]


def overview(ex: Example) -> Equation:
    """The computation on one device; `cut` says along which dim each matrix is sharded."""
    tokens = "rows" if ex.splits_tokens else ""

    def matrix(name: str, cut: str) -> View:
        values = ex.inputs[name] if name in ex.inputs else ex.one_device[name]
        return {**_matrix(name, "whole", values), "cut": cut if ex.tp > 1 else ""}

    first: Equation = [matrix("X", tokens), "×", *(matrix(name, "columns") for name in ex.into)]
    between = [*(matrix(name, "columns") for name in ex.inner), "→", matrix(ex.mixed, "columns")]
    return [*first, "=", *between, "×", matrix(ex.back, "rows"), "=", matrix("Y", tokens)]


def _forward(ex: Example) -> list[View]:
    mats, into = _Matrices(ex), " and ".join(ex.into)
    block = counted(INNER // ex.tp, "column" if ex.part == "mlp" else "head")
    tokens = counted(ex.num_tokens // ex.tp, "token")
    has_x = f"its {tokens} of X" if ex.splits_tokens else "all of X"
    frames = [
        _frame(
            "split",
            f"A rank has {has_x}, {block} of {into}, and the rows of {ex.back} that belong to "
            "them. The numbers are small and whole; every one is computed.",
            mats.by_rank(
                lambda r: [[mats.x(r), *mats.all_cols(r, ex.into), mats.rows(r, ex.back)]]
            ),
        )
    ]
    if ex.splits_tokens:
        frames.append(_gathered(ex, mats, "X", "Every product needs all tokens"))
    frames += [
        _frame(
            "column",
            f"Column product: all of X with the rank's columns of {into} gives columns of "
            f"{' and '.join(ex.inner)} that are complete. Nothing is exchanged.",
            mats.by_rank(
                lambda r: [
                    [mats.full("X"), "×", mats.cols(r, weight), "=", mats.cols(r, output)]
                    for weight, output in zip(ex.into, ex.inner, strict=True)
                ]
            ),
        ),
        _frame(
            "between",
            _between(ex),
            mats.by_rank(lambda r: [[*mats.all_cols(r, ex.inner), "→", mats.cols(r, ex.mixed)]]),
        ),
        _frame(
            "row",
            f"Row product: the rank's columns of {ex.mixed} meet its rows of {ex.back}. "
            + _summands(ex, "Y"),
            mats.by_rank(
                lambda r: [
                    [mats.cols(r, ex.mixed), "×", mats.rows(r, ex.back), "=", mats.sum(r, "Y")]
                ]
            ),
        ),
    ]
    return [*frames, *_reduced(ex, mats, "Y")]


def _between(ex: Example) -> str:
    if ex.part == "mlp":
        return "Elementwise: A = max(0, H). Columns are complete, so each rank can do it alone."
    return (
        "Attention: for each head a token sums q·k·v over the tokens up to itself (no softmax, to "
        "stay with whole numbers). Heads are complete, so each rank can do it alone."
    )


def _summands(ex: Example, name: str) -> str:
    if ex.tp == 1:
        return f"The result is {name}: one rank has all of it."
    return f"The result has the shape of {name}, but is only one of {ex.tp} summands."


def _backward(ex: Example) -> list[View]:
    mats, into = _Matrices(ex), " and ".join(ex.into)
    inner, stay = [f"d{name}" for name in ex.inner], [f"d{name}" for name in ex.into]
    mixed, back = f"d{ex.mixed}", f"d{ex.back}"
    frames = [_begin_backward(ex, mats)]
    frames += [
        _frame(
            "row back",
            f"Backward of the row product: {mixed} are the rank's own columns. The gradient of "
            f"its rows of {ex.back} is complete, and stays.",
            mats.by_rank(
                lambda r: [
                    [mats.full("dY"), "×", mats.rows(r, ex.back, True), "=", mats.cols(r, mixed)],
                    [mats.cols(r, ex.mixed, True), "×", mats.full("dY"), "=", mats.rows(r, back)],
                ]
            ),
        ),
        _frame(
            "between back",
            f"Back through the step between: {' and '.join(inner)}, on each rank alone.",
            mats.by_rank(lambda r: [[mats.cols(r, mixed), "→", *mats.all_cols(r, inner)]]),
        ),
    ]
    if ex.splits_tokens:
        reason = "X was kept as the rank's own tokens, to save memory; the gradient of"
        frames.append(_gathered(ex, mats, "X", f"{reason} {into} needs all", again=True))
    frames.append(
        _frame(
            "column back",
            f"Backward of the column product. {_summands(ex, 'dX')} The gradient of the rank's "
            f"columns of {into} is complete, and stays.",
            mats.by_rank(
                lambda r: [
                    [*mats.products(r, inner), "=", mats.sum(r, "dX")],
                    *(
                        [mats.full("X", True), "×", mats.cols(r, output), "=", mats.cols(r, weight)]
                        for output, weight in zip(inner, stay, strict=True)
                    ),
                ]
            ),
        )
    )
    return [*frames, *_reduced(ex, mats, "dX")]


def _begin_backward(ex: Example, mats: _Matrices) -> View:
    if ex.splits_tokens:
        return _gathered(ex, mats, "dY", _MIRRORED)
    mirror = " The mirror of the all-reduce is to do nothing: no byte moves." if ex.tp > 1 else ""
    return _frame(
        "gradient",
        f"Backward begins with the gradient of Y, whole on every rank.{mirror}",
        mats.by_rank(lambda _: [[mats.full("dY")]]),
    )


def _gathered(ex: Example, mats: _Matrices, name: str, why: str, again: bool = False) -> View:
    return _frame(
        "gather again" if again else "gather",
        f"{why}: an all-gather brings every rank the {counted(ex.num_tokens, 'token')} of {name}"
        f"{' once more' if again else ''}.",
        mats.by_rank(lambda r: [[mats.tokens(r, name), "→", mats.full(name)]]),
        moves=["all_gather"],
    )


def _reduced(ex: Example, mats: _Matrices, name: str) -> list[View]:
    """The sum over the ranks, if there is more than one."""
    if ex.tp == 1:
        return []
    kind, gets = (
        ("reduce_scatter", "the sum of its own tokens")
        if ex.splits_tokens
        else ("all_reduce", "the whole sum")
    )

    def equations(rank: int) -> list[Equation]:
        summed = ex.summed(name)
        result = (
            mats.tokens(rank, name, summed) if ex.splits_tokens else _matrix(name, "whole", summed)
        )
        return [[mats.sum(rank, name), "→", result]]

    frame = _frame(
        "reduce" if name == "Y" else "reduce back",
        f"{kind_text(kind).capitalize()}: the {ex.tp} summands of {name} are added, and every rank "
        f"gets {gets}. It is what one device has.",
        mats.by_rank(equations),
        moves=[kind],
    )
    return [{**frame, "one_device": _matrix(name, "whole", ex.one_device[name])}]


def _other_order_frame(ex: Example) -> View:
    result = ex.other_order()
    names = " and ".join(ex.inner)
    ranks: list[list[Equation]] = []
    for outputs in result["made"]:
        pairs = zip(ex.inner, outputs, strict=True)
        parts = [_matrix(f"part of {name}", "partial", values) for name, values in pairs]
        early = _matrix(f"{ex.mixed} too early", "partial", ex.mix(outputs))
        ranks.append([[*parts, "→", early]])
    frame = _frame(
        "other order",
        f"Why not row first? Over {len(ranks)} ranks {' and '.join(ex.into)} cut by rows gives "
        f"summands of {names}. The step between is not linear: {result['wrongs']} of "
        f"{sum(map(len, result['right']))} numbers would be wrong, so {names} must be summed "
        "first, a collective in the middle.",
        ranks,
    )
    wrong = _matrix(f"sum of {ex.mixed} too early", "whole", result["wrong"])
    return {**frame, "one_device": _matrix(ex.mixed, "whole", result["right"]), "sum": wrong}


class _Matrices:
    """The matrices of the ranks, as frames show them."""

    def __init__(self, ex: Example) -> None:
        self.ex = ex

    def by_rank(self, equations: Callable[[int], list[Equation]]) -> list[list[Equation]]:
        """The equations of all ranks."""
        return [equations(rank) for rank in range(self.ex.tp)]

    def full(self, name: str, transpose: bool = False) -> View:
        return _matrix(name, "whole", self.ex.inputs[name], transpose=transpose)

    def x(self, rank: int) -> View:
        return self.tokens(rank, "X") if self.ex.splits_tokens else self.full("X")

    def tokens(self, rank: int, name: str, values: Matrix | None = None) -> View:
        """The rank's own tokens of `values`, or of a given matrix."""
        part = self.ex.tokens(rank)
        values = rows_of(values or self.ex.inputs[name], part)
        return _matrix(name, "slice", values, _range("token", part))

    def products(self, rank: int, names: Sequence[str]) -> Equation:
        """The sum of the products with the transposed column-parallel weights."""
        equation: Equation = []
        for name, weight in zip(names, self.ex.into, strict=True):
            equation += ["+"] if equation else []
            equation += [self.cols(rank, name), "×", self.cols(rank, weight, transpose=True)]
        return equation

    def all_cols(self, rank: int, names: Sequence[str]) -> list[View]:
        return [self.cols(rank, name) for name in names]

    def cols(self, rank: int, name: str, transpose: bool = False) -> View:
        """A matrix of which the rank has some columns."""
        part = _range("row" if transpose else "column", self.ex.block(rank))
        return _matrix(name, "slice", self.ex.ranks[rank][name], part, transpose)

    def rows(self, rank: int, name: str, transpose: bool = False) -> View:
        """A matrix of which the rank has some rows."""
        part = _range("column" if transpose else "row", self.ex.block(rank))
        return _matrix(name, "slice", self.ex.ranks[rank][name], part, transpose)

    def sum(self, rank: int, name: str) -> View:
        kind, name_of_it = ("partial", f"part of {name}") if self.ex.tp > 1 else ("whole", name)
        return _matrix(name_of_it, kind, self.ex.ranks[rank][name])


def _matrix(name: str, kind: str, values: Matrix, part: str = "", transpose: bool = False) -> View:
    if transpose:
        name, values = f"{name}ᵀ", transposed(values)
    return {"name": name, "kind": kind, "part": part, "values": values}


def _range(noun: str, part: range) -> str:
    """Which rows or columns, counted from 0."""
    return f"{noun if len(part) == 1 else noun + 's'} {span(part)}"


def _frame(phase: str, says: str, ranks: list[list[Equation]], moves: Sequence[str] = ()) -> View:
    return {"phase": phase, "says": says, "ranks": ranks, "moves": list(moves)}


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
