"""Column-parallel, then row-parallel, on integers: every shard of every rank, forward and backward.

X has 4 tokens of width 4 (8 tokens if 8 ranks share them), the inner width is 8. The MLP is
A = max(0, X·W1), Y = A·W2. Attention has 8 heads of width 1: a token sums q·k·v over the tokens up
to itself. It has no softmax, which would not give integers and, like everything here, needs one
head only. A matrix of a rank is `whole` (the same on all ranks), a `slice` (its shard), or
`partial` (one summand of the sum over the ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, reduce
from itertools import accumulate
from operator import add, mul, ne
from random import Random

from fivefold_page import View

Matrix = list[list[int]]
WIDTH, INNER = 4, 8
# By part of a layer: the column-parallel weights, their results, what is computed from these, and
# the row-parallel weight.
_NAMES = {
    "mlp": (("W1",), ("H",), "A", "W2"),
    "attention": (("Wq", "Wk", "Wv"), ("Q", "K", "V"), "O", "Wo"),
}
PARTS = tuple(_NAMES)


def matmul(a: Matrix, b: Matrix) -> Matrix:
    columns = transposed(b)
    return [[sum(map(mul, row, column)) for column in columns] for row in a]


def elementwise(op: Callable[[int, int], int], a: Matrix, b: Matrix) -> Matrix:
    return [list(map(op, *rows)) for rows in zip(a, b, strict=True)]


def total(matrices: Iterable[Matrix]) -> Matrix:
    return reduce(lambda a, b: elementwise(add, a, b), matrices)


def transposed(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def columns_of(a: Matrix, part: range) -> Matrix:
    return [row[part.start : part.stop] for row in a]


def rows_of(a: Matrix, part: range) -> Matrix:
    return a[part.start : part.stop]


class Example:
    """The matrices of one choice: a part of a layer over `tp` ranks, with or without `sp`."""

    def __init__(self, part: str, tp: int, sp: bool) -> None:
        self.part, self.tp = part, tp
        self.num_tokens = max(4, tp)  # of X: at least one per rank
        self.splits_tokens = sp and tp > 1  # each rank has its own tokens between the matmuls
        self.into, self.inner, self.mixed, self.back = _NAMES[part]

    @cached_property
    def inputs(self) -> dict[str, Matrix]:
        """X, the weights, and the gradient of Y."""
        matrices = {"X": _drawn(self.num_tokens, WIDTH, 1), self.back: _drawn(INNER, WIDTH, 2)}
        for index, name in enumerate(self.into):
            matrices[name] = _drawn(WIDTH, INNER, 3 + index)
        return {**matrices, "dY": _drawn(self.num_tokens, WIDTH, 6)}

    def block(self, rank: int) -> range:
        """The inner columns of a rank."""
        return _block(rank, INNER // self.tp)

    def tokens(self, rank: int) -> range:
        """The tokens of a rank between the matmuls."""
        return _block(rank, self.num_tokens // self.tp)

    def mix(self, outputs: list[Matrix]) -> Matrix:
        """The step between the matmuls, on any columns."""
        if self.part == "mlp":
            return [[max(0, x) for x in row] for row in outputs[0]]
        q, k, v = outputs
        return elementwise(mul, q, _running(elementwise(mul, k, v)))

    def unmix(self, outputs: list[Matrix], gradient: Matrix) -> list[Matrix]:
        """The backward of `mix`."""
        if self.part == "mlp":
            return [elementwise(lambda x, g: g * (x > 0), outputs[0], gradient)]
        q, k, v = outputs
        of_q = elementwise(mul, gradient, _running(elementwise(mul, k, v)))
        ahead = _running(elementwise(mul, gradient, q)[::-1])[::-1]
        return [of_q, elementwise(mul, ahead, v), elementwise(mul, ahead, k)]

    def computed(self, block: range) -> dict[str, Matrix]:
        """All that a rank computes, from whole X and dY and its own block of the weights."""
        inputs = self.inputs
        shards = {name: columns_of(inputs[name], block) for name in self.into}
        shards[self.back] = rows_of(inputs[self.back], block)
        outputs = [matmul(inputs["X"], shards[name]) for name in self.into]
        mixed = self.mix(outputs)
        of_mixed = matmul(inputs["dY"], transposed(shards[self.back]))
        of_made = self.unmix(outputs, of_mixed)
        matrices = {**shards, **dict(zip(self.inner, outputs, strict=True)), self.mixed: mixed}
        matrices["Y"] = matmul(mixed, shards[self.back])
        matrices[f"d{self.mixed}"] = of_mixed
        matrices |= {f"d{name}": grad for name, grad in zip(self.inner, of_made, strict=True)}
        matrices[f"d{self.back}"] = matmul(transposed(mixed), inputs["dY"])
        into = list(zip(self.into, of_made, strict=True))
        matrices["dX"] = total(
            matmul(gradient, transposed(shards[name])) for name, gradient in into
        )
        for name, gradient in into:
            matrices[f"d{name}"] = matmul(transposed(inputs["X"]), gradient)
        return matrices

    @cached_property
    def ranks(self) -> list[dict[str, Matrix]]:
        """What each rank computes."""
        return [self.computed(self.block(rank)) for rank in range(self.tp)]

    @cached_property
    def one_device(self) -> dict[str, Matrix]:
        """What one device computes."""
        return self.computed(range(INNER))

    def summed(self, name: str) -> Matrix:
        """The sum of what all ranks have under a name."""
        return total(matrices[name] for matrices in self.ranks)

    def other_order(self) -> View:
        """W1 sharded by rows instead: the partial sums of each rank before the step between the
        matmuls, and the wrong result of taking that step before the sum."""
        num_ranks = max(2, min(self.tp, WIDTH))
        blocks = [_block(rank, WIDTH // num_ranks) for rank in range(num_ranks)]
        products = [
            [
                matmul(columns_of(self.inputs["X"], block), rows_of(self.inputs[name], block))
                for name in self.into
            ]
            for block in blocks
        ]
        right = self.mix([total(summands) for summands in zip(*products, strict=True)])
        wrong = total(map(self.mix, products))
        wrongs = sum(map(sum, elementwise(ne, right, wrong)))
        return {"made": products, "right": right, "wrong": wrong, "wrongs": wrongs}


def _block(rank: int, size: int) -> range:
    return range(rank * size, (rank + 1) * size)


def _drawn(rows: int, columns: int, seed: int) -> Matrix:
    """Small random integers from a fixed seed."""
    draw = Random(seed)
    return [draw.choices((-1, 0, 1, 2), (3, 2, 3, 1), k=columns) for _ in range(rows)]


def _running(rows: Matrix) -> Matrix:
    """Each row added to those before it."""
    return list(accumulate(rows, lambda a, b: list(map(add, a, b))))
