"""Column-parallel, then row-parallel, on integers: every shard of every rank, forward and backward.

X has 4 tokens of width 4 (8 tokens if 8 ranks share them), the inner width is 8. The MLP is
A = max(0, X·W1), Y = A·W2. Attention has 8 heads of width 1: a token sums q·k·v over the tokens up
to itself. It has no softmax, which would not give integers and, like everything here, needs one
head only. A matrix of a rank is `whole` (the same on all ranks), a `slice` (its shard), or
`partial` (one summand of the sum over the ranks).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from random import Random

from fivefold.page import View

Matrix = list[list[int]]
WIDTH, INNER = 4, 8
PARTS = ("mlp", "attention")


def times(a: Matrix, b: Matrix) -> Matrix:
    """The product of two matrices."""
    columns = transposed(b)
    return [[sum(x * y for x, y in zip(row, col, strict=True)) for col in columns] for row in a]


def plus(a: Matrix, b: Matrix) -> Matrix:
    """The sum of two matrices."""
    return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def transposed(a: Matrix) -> Matrix:
    """The transpose."""
    return [list(column) for column in zip(*a, strict=True)]


def columns_of(a: Matrix, part: range) -> Matrix:
    """Some columns."""
    return [row[part.start : part.stop] for row in a]


def rows_of(a: Matrix, part: range) -> Matrix:
    """Some rows."""
    return a[part.start : part.stop]


@dataclass(frozen=True)
class Example:
    """The matrices of one choice: a part of a layer over `tp` ranks, with or without `sp`."""

    part: str
    tp: int
    sp: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of X: at least one per rank."""
        return max(4, self.tp)

    @property
    def splits_tokens(self) -> bool:
        """Whether each rank has only its own tokens between the matmuls."""
        return self.sp and self.tp > 1

    @property
    def into(self) -> tuple[str, ...]:
        """The column-parallel weights."""
        return ("W1",) if self.part == "mlp" else ("Wq", "Wk", "Wv")

    @property
    def back(self) -> str:
        """The row-parallel weight."""
        return "W2" if self.part == "mlp" else "Wo"

    @property
    def inner(self) -> tuple[str, ...]:
        """The results of the column-parallel matmuls."""
        return ("H",) if self.part == "mlp" else ("Q", "K", "V")

    @property
    def mixed(self) -> str:
        """What is computed from them: the input of the row-parallel matmul."""
        return "A" if self.part == "mlp" else "O"

    @cached_property
    def given(self) -> dict[str, Matrix]:
        """X, the weights, and the gradient of Y."""
        found = {"X": _drawn(self.num_tokens, WIDTH, 1), self.back: _drawn(INNER, WIDTH, 2)}
        for place, name in enumerate(self.into):
            found[name] = _drawn(WIDTH, INNER, 3 + place)
        return {**found, "dY": _drawn(self.num_tokens, WIDTH, 6)}

    def block(self, rank: int) -> range:
        """The inner columns of a rank."""
        size = INNER // self.tp
        return range(rank * size, (rank + 1) * size)

    def tokens(self, rank: int) -> range:
        """The tokens of a rank between the matmuls."""
        size = self.num_tokens // self.tp
        return range(rank * size, (rank + 1) * size)

    def mix(self, made: list[Matrix]) -> Matrix:
        """The step between the matmuls, on any columns."""
        if self.part == "mlp":
            return [[max(0, x) for x in row] for row in made[0]]
        q, k, v = made
        return [
            [q[i][h] * sum(k[j][h] * v[j][h] for j in range(i + 1)) for h in range(len(q[0]))]
            for i in range(len(q))
        ]

    def unmix(self, made: list[Matrix], gradient: Matrix) -> list[Matrix]:
        """The backward of `mix`."""
        if self.part == "mlp":
            pairs = zip(made[0], gradient, strict=True)
            return [[[g * (x > 0) for x, g in zip(*rows, strict=True)] for rows in pairs]]
        q, k, v = made
        num_tokens, heads = len(q), range(len(q[0]))
        ahead = [
            [sum(gradient[i][h] * q[i][h] for i in range(j, num_tokens)) for h in heads]
            for j in range(num_tokens)
        ]
        of_q = [
            [gradient[i][h] * sum(k[j][h] * v[j][h] for j in range(i + 1)) for h in heads]
            for i in range(num_tokens)
        ]
        return [of_q, _each(ahead, v), _each(ahead, k)]

    def computed(self, block: range) -> dict[str, Matrix]:
        """All that a rank computes, from whole X and dY and its own block of the weights."""
        given = self.given
        mine = {name: columns_of(given[name], block) for name in self.into}
        mine[self.back] = rows_of(given[self.back], block)
        made = [times(given["X"], mine[name]) for name in self.into]
        mixed = self.mix(made)
        of_mixed = times(given["dY"], transposed(mine[self.back]))
        of_made = self.unmix(made, of_mixed)
        into = zip(of_made, (mine[name] for name in self.into), strict=True)
        found = {**mine, **dict(zip(self.inner, made, strict=True)), self.mixed: mixed}
        found["Y"] = times(mixed, mine[self.back])
        found[f"d{self.mixed}"] = of_mixed
        found |= {f"d{name}": one for name, one in zip(self.inner, of_made, strict=True)}
        found["dX"] = reduce(plus, (times(g, transposed(w)) for g, w in into))
        found[f"d{self.back}"] = times(transposed(mixed), given["dY"])
        for name, gradient in zip(self.into, of_made, strict=True):
            found[f"d{name}"] = times(transposed(given["X"]), gradient)
        return found

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
        return reduce(plus, (one[name] for one in self.ranks))

    def other_order(self) -> View:
        """W1 sharded by rows instead: the partial sums of each rank before the step between the
        matmuls, and the wrong result of taking that step before the sum."""
        num_ranks = max(2, min(self.tp, WIDTH))
        size = WIDTH // num_ranks
        blocks = [range(rank * size, (rank + 1) * size) for rank in range(num_ranks)]
        made = [
            [
                times(columns_of(self.given["X"], block), rows_of(self.given[name], block))
                for name in self.into
            ]
            for block in blocks
        ]
        summed = [reduce(plus, (one[place] for one in made)) for place in range(len(self.into))]
        right, wrong = self.mix(summed), reduce(plus, map(self.mix, made))
        pairs = zip(right, wrong, strict=True)
        wrongs = sum(x != y for rows in pairs for x, y in zip(*rows, strict=True))
        return {"made": made, "right": right, "wrong": wrong, "wrongs": wrongs}


def _drawn(rows: int, columns: int, seed: int) -> Matrix:
    """Small random integers from a fixed seed."""
    draw = Random(seed)
    return [draw.choices((-1, 0, 1, 2), (3, 2, 3, 1), k=columns) for _ in range(rows)]


def _each(a: Matrix, b: Matrix) -> Matrix:
    return [[x * y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]
