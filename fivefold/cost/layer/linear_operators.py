"""The operators that layers are made of, as one rank runs them, in bytes of a microbatch: norms,
activations, and linears, split over tp or not."""

from __future__ import annotations

import numpy as np

from fivefold.core.model import Recompute
from fivefold.cost import Array, Flags
from fivefold.cost.layer.fp8_operators import RoundedOperators
from fivefold.cost.layer.operator_list import OperatorList, TapeTensor
from fivefold.cost.memory import Activations

SCALED = 7  # bytes of 2 that the weight gradient of a norm holds besides: widened, and multiplied


class LinearOperators:
    """For one plan. Keys come to a query in so many `visits`. `shards`: inputs of split GEMMs are
    saved as this rank's tokens. `queued`: weight gradients go past autograd. `reorders`: tokens
    are in another order between GEMMs that are split over tp."""

    def __init__(
        self,
        activations: Activations,
        tokens: float,
        visits: int,
        shards: bool,
        queued: bool,
        reorders: bool,
        rounded: RoundedOperators | None = None,
    ) -> None:
        self.activations, self.tokens, self.visits = activations, tokens, visits
        self.shards, self.queued, self.shape = shards, queued, activations.shape
        self.reorders, self.rounded = reorders, rounded
        self.key = (activations.key, tokens, visits, shards, queued, reorders, rounded)
        grid = activations.grid
        self.tp, self.sp = int(number(grid.tp)), bool(number(grid.sp))
        self.split = self.tp > 1
        self.residual, self.whole = self._size(activations.residual), self._size(activations.whole)
        self.unit = activations.itemsize * tokens

    def _size(self, per_token: Array | float) -> float:
        return number(per_token) * self.tokens

    def _norm(self, found: OperatorList, x: TapeTensor, name: str, rule: Recompute) -> TapeTensor:
        """Its output may be made again from its input, for the GEMMs that read it."""
        made = TapeTensor(x.bytes, remade=rule.remakes("norm"), source=x)
        if not self.queued:
            return found.add([x], made, saved=[x], weights=name)
        plain = found.add([x], TapeTensor(x.bytes), saved=[x])
        extra = SCALED * x.bytes
        return found.add([plain], made, saved=[x], weights=name, settle_extra=extra)

    def _linear(
        self, found: OperatorList, x: TapeTensor, size: float, name: str, named: bool = False
    ) -> TapeTensor:
        return found.add([x], TapeTensor(size, named=named), saved=[x], weights=name)

    def _rounding(self, found: OperatorList) -> RoundedOperators | None:
        """How linears of this layer are rounded."""
        return self.rounded if found.rounds else None

    def _linear_alone(
        self, found: OperatorList, x: TapeTensor, size: float, name: str
    ) -> TapeTensor:
        """A linear that is not split over tp, and rounded where others of its layer are."""
        rounded = self._rounding(found)
        if rounded is None:
            return self._linear(found, x, size, name)
        return rounded.project(found, x, {name: size}, x.bytes)[0]

    def _project(
        self,
        found: OperatorList,
        x: TapeTensor,
        sizes: dict[str, float],
        kept: bool,
        copied: float = 0.0,
        held: float = 0.0,
    ) -> list[TapeTensor]:
        """Linears of one input, with the bytes of their outputs: it is gathered before, and its
        gradient, one for all of them, is reduced after. In fp8, so many bytes of outputs are
        `copied`, and saved outputs hold so many of others."""
        gathers, rounded = self.split and self.sp, self._rounding(found)
        if rounded is not None:
            how = {"split": self.split, "gathers": gathers, "shards": gathers and kept}
            whole = self.whole if self.split else x.bytes
            return rounded.project(found, x, sizes, whole, **how, copied=copied, held=held)
        whole = self.whole if gathers else 0.0
        first, *more = sizes.values()
        outputs = [TapeTensor(first, extra=whole), *map(TapeTensor, more)]
        found.add(
            [x],
            outputs[0],
            saved=[x] if kept or not whole else [],
            weights=list(sizes),
            backward_extra=whole,
            keeps=0.0 if kept else whole,
            defers=0.0 if kept else whole,
            collective=self.split,
            more=outputs[1:],
            gathered=whole if kept else 0.0,
            gathers="input" if kept and whole else "",
            weights_last=True,
        )
        return outputs

    def _row_linear(self, found: OperatorList, x: TapeTensor, name: str) -> TapeTensor:
        """A linear and the sum over ranks; the gradient of its output is gathered."""
        if not self.split:
            return self._linear_alone(found, x, self.whole, name)
        if (rounded := self._rounding(found)) is not None:
            output = self.residual if self.sp else self.whole
            return rounded.sum_of_rows(found, x, name, output, self.whole)
        whole = self.whole if self.sp else 0.0
        return found.add(
            [x],
            TapeTensor(self.residual if self.sp else self.whole, extra=whole),
            saved=[x],
            weights=name,
            collective=True,
            gathered=whole,
            gathers="gradient" if self.sp else "",
            weights_last=True,
        )

    @property
    def _copies(self) -> bool:
        return self.split and self.sp and self.reorders

    def _in_rows(self, found: OperatorList, x: TapeTensor) -> TapeTensor:
        """Heads between the order of gathers and that of rows: a copy, if these differ."""
        if not self._copies:
            return x
        return found.add([x], TapeTensor(x.bytes))

    def _saves_shards(self, found: OperatorList, rule: Recompute) -> bool:
        return self.shards and not (rule.full or found.module in rule.modules)

    def _inner(self, name: str) -> list[str]:
        return [f"{name}.{each}" for each in (("gate", "up") if self.shape.gated else ("up",))]

    def _biased(self, found: OperatorList, x: TapeTensor, bias: bool) -> TapeTensor:
        """A bias after the sum over ranks; that of one rank is part of the GEMM."""
        if not bias or not self.split:
            return x
        return found.add([x], TapeTensor(x.bytes), passes=True)

    def _activated(
        self, found: OperatorList, inner: list[TapeTensor], rule: Recompute
    ) -> TapeTensor:
        again = rule.remakes("act") and found.module not in rule.modules
        copies = self.activations.memory.gated_copies - 3 if self.shape.gated else 0.0
        made = TapeTensor(inner[0].bytes, remade=again)
        return found.add(inner, made, saved=inner, keeps=copies * inner[0].bytes)


def number(one: Array | Flags | float) -> float:
    return float(np.asarray(one).reshape(-1)[0])
