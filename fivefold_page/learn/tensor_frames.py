"""The frames of the tensor panel: the equations of every rank, step by step.

An equation is a list of matrices and signs. A matrix has its numbers, its kind, and a `part`: which
rows or columns of the full matrix it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fivefold.core import counted, kind_text, span
from fivefold_page import View
from fivefold_page.learn.tensor_example import INNER, Example, Matrix, rows_of, transposed

Equation = list[View | str]
_MIRRORED = (
    "Backward begins with the gradient of a rank's own tokens, and mirrors the reduce-scatter"
)


def frames_of(example: Example) -> list[View]:
    """All frames of an example; `moves` has the kinds of their collectives."""
    return [*_forward(example), *_backward(example), _other_order(example)]


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


def _other_order(ex: Example) -> View:
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
