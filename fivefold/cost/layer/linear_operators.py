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
        self.residual = self._size(activations.residual)
        self.full_residual = self._size(activations.full_residual)
        self.unit = activations.itemsize * tokens

    def _size(self, per_token: Array | float) -> float:
        return number(per_token) * self.tokens

    def _norm(
        self, operators: OperatorList, x: TapeTensor, name: str, rule: Recompute
    ) -> TapeTensor:
        """Its output may be made again from its input, for the GEMMs that read it."""
        output = TapeTensor(x.bytes, remade=rule.remakes("norm"), source=x)
        if not self.queued:
            return operators.add([x], output, saved=[x], weights=name)
        plain = operators.add([x], TapeTensor(x.bytes), saved=[x])
        extra = SCALED * x.bytes
        return operators.add([plain], output, saved=[x], weights=name, settle_extra=extra)

    def _linear(
        self, operators: OperatorList, x: TapeTensor, size: float, name: str, named: bool = False
    ) -> TapeTensor:
        return operators.add([x], TapeTensor(size, named=named), saved=[x], weights=name)

    def _rounding(self, operators: OperatorList) -> RoundedOperators | None:
        """How linears of this layer are rounded."""
        return self.rounded if operators.rounds else None

    def _linear_alone(
        self, operators: OperatorList, x: TapeTensor, size: float, name: str
    ) -> TapeTensor:
        """A linear that is not split over tp, and rounded where others of its layer are."""
        rounded = self._rounding(operators)
        if rounded is None:
            return self._linear(operators, x, size, name)
        return rounded.project(operators, x, {name: size}, x.bytes)[0]

    def _project(
        self,
        operators: OperatorList,
        x: TapeTensor,
        sizes: dict[str, float],
        saves_shards: bool,
        copied: float = 0.0,
        live_bytes: float = 0.0,
    ) -> list[TapeTensor]:
        """Linears of one input, with the bytes of their outputs: it is gathered before, and its
        gradient, one for all of them, is reduced after. In fp8, so many bytes of outputs are
        `copied`, and saved outputs hold so many of others."""
        gathers, rounded = self.split and self.sp, self._rounding(operators)
        if rounded is not None:
            options = {"split": self.split, "gathers": gathers, "shards": gathers and saves_shards}
            full_bytes = self.full_residual if self.split else x.bytes
            return rounded.project(
                operators, x, sizes, full_bytes, **options, copied=copied, live_bytes=live_bytes
            )
        full_bytes = self.full_residual if gathers else 0.0
        first, *tail_sizes = sizes.values()
        outputs = [TapeTensor(first, extra=full_bytes), *map(TapeTensor, tail_sizes)]
        operators.add(
            [x],
            outputs[0],
            saved=[x] if saves_shards or not full_bytes else [],
            weights=list(sizes),
            backward_extra=full_bytes,
            keeps=0.0 if saves_shards else full_bytes,
            defers=0.0 if saves_shards else full_bytes,
            collective=self.split,
            extra_outputs=outputs[1:],
            gathered=full_bytes if saves_shards else 0.0,
            gathers="input" if saves_shards and full_bytes else "",
            weights_last=True,
        )
        return outputs

    def _row_linear(self, operators: OperatorList, x: TapeTensor, name: str) -> TapeTensor:
        """A linear and the sum over ranks; the gradient of its output is gathered."""
        if not self.split:
            return self._linear_alone(operators, x, self.full_residual, name)
        if (rounded := self._rounding(operators)) is not None:
            output = self.residual if self.sp else self.full_residual
            return rounded.sum_of_rows(operators, x, name, output, self.full_residual)
        full_bytes = self.full_residual if self.sp else 0.0
        return operators.add(
            [x],
            TapeTensor(self.residual if self.sp else self.full_residual, extra=full_bytes),
            saved=[x],
            weights=name,
            collective=True,
            gathered=full_bytes,
            gathers="gradient" if self.sp else "",
            weights_last=True,
        )

    @property
    def _copies(self) -> bool:
        return self.split and self.sp and self.reorders

    def _in_rows(self, operators: OperatorList, x: TapeTensor) -> TapeTensor:
        """Heads between the order of gathers and that of rows: a copy, if these differ."""
        if not self._copies:
            return x
        return operators.add([x], TapeTensor(x.bytes))

    def _saves_shards(self, operators: OperatorList, rule: Recompute) -> bool:
        return self.shards and not (rule.full or operators.module in rule.modules)

    def _inner(self, name: str) -> list[str]:
        return [
            f"{name}.{projection}"
            for projection in (("gate", "up") if self.shape.gated else ("up",))
        ]

    def _biased(self, operators: OperatorList, x: TapeTensor, bias: bool) -> TapeTensor:
        """A bias after the sum over ranks; that of one rank is part of the GEMM."""
        if not bias or not self.split:
            return x
        return operators.add([x], TapeTensor(x.bytes), passes=True)

    def _activated(
        self, operators: OperatorList, inner: list[TapeTensor], rule: Recompute
    ) -> TapeTensor:
        again = rule.remakes("act") and operators.module not in rule.modules
        copies = self.activations.memory.gated_copies - 3 if self.shape.gated else 0.0
        output = TapeTensor(inner[0].bytes, remade=again)
        return operators.add(inner, output, saved=inner, keeps=copies * inner[0].bytes)


def number(value: Array | Flags | float) -> float:
    return float(np.asarray(value).reshape(-1)[0])
