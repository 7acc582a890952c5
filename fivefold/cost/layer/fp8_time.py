"""Seconds that rounding to fp8 takes, and how fast the matmuls of rounded operands are.

Rounding is bound by memory. Tensorwise it reads a tensor twice, for its maximum and for its codes;
with blocks once. Codes are written in one order or in both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fivefold.core.layout import EXPERT_WEIGHT, Fp8, Scaling, packed_row
from fivefold.cost import Array, Flags, LayoutGrid
from fivefold.cost.hardware import SoftwareStack
from fivefold.cost.memory import RankParameters

# Of the memory bandwidth of other kernels, what those that round reach: transposed codes are
# written in short rows. Fitted to steps of Llama-3.1-8B on an H200 (`docs/fp8.md`).
ROUNDED_SHARE = 0.7


def rounded_weights_stay(stack: SoftwareStack, grid: LayoutGrid) -> Flags:
    """Where rounded weights stay over a step: where full weights do."""
    return (grid.zero < 3) | (grid.shard * grid.cp == 1) | stack.stays(grid)


def rounded_weights(
    stack: SoftwareStack, grid: LayoutGrid, parameters: RankParameters, layers: int
) -> Array:
    """Bytes of the weights of a rank in fp8, in both orders, where they stay; of all layers of the
    model, some may not be rounded."""
    if stack.fp8 is None:
        return np.zeros(1)
    num_bytes = stack.fp8.weight_bytes * (parameters.dense - parameters.ends)
    if stack.fp8.experts:
        num_bytes = num_bytes + EXPERT_WEIGHT * parameters.experts
    return np.where(rounded_weights_stay(stack, grid), num_bytes * stack.fp8.share(layers), 0.0)


def codes_under_way(stack: SoftwareStack, linears: Array, experts: Array) -> Array:
    """Bytes of the codes of so many weights that ZeRO-3 gathers ahead, beside their values."""
    fp8, none = stack.fp8, np.zeros(1)
    tensorwise = fp8 is not None and fp8.scaling == "tensorwise"
    routed = fp8 is not None and fp8.experts
    return (linears if tensorwise else none) + (experts if routed else none)


class MatmulShares(NamedTuple):
    """Speed over that of matmuls with one scale for a tensor."""

    usual: float = 1.0  # forward and input gradient
    wgrad: float = 1.0


# Blocks on an H200: 201.4 and 135.4 ms where tensorwise matmuls of the same size take 178.3 and
# 89.1 (`docs/fp8.md`). What only Blackwell multiplies is assumed to be at its speed.
_SHARES: dict[Scaling, MatmulShares] = {"blockwise": MatmulShares(0.885, 0.655)}


def matmul_shares(fp8: Fp8) -> MatmulShares:
    """How fast matmuls are, by what shares a scale."""
    return _SHARES.get(fp8.scaling, MatmulShares())


class RoundingPasses:
    """Bytes that rounding moves on one rank, for every layout of a grid. Inputs of modules and
    output gradients of their last linears are gathered from `local` to all `tokens`; with
    `shards` inputs are saved before that, and gathered once more."""

    def __init__(
        self, fp8: Fp8, itemsize: int, tokens: Array, local: Array, gathers: Flags, shards: Array
    ) -> None:
        self.fp8, self.itemsize, self.tokens, self.local = (fp8, itemsize, tokens, local)
        self.shards, self.orders = shards, 1 + (fp8.wgrad == "fp8")
        self.coded = gathers & fp8.gathers_codes
        self.maximum = itemsize if fp8.scaling == "tensorwise" else 0

    def gathered_input(self, width: Array | float) -> Array:
        """Of the linears that read the input of a module, in forward."""
        orders = np.where(self.shards > 0, 1.0, self.orders)
        return width * (self.local * self.maximum + self._cast(orders))

    def read_again(self, width: Array | float) -> Array:
        """The same input, gathered again in backward."""
        return width * self.shards * self._cast(self.orders)

    def inner_input(self, width: Array | float) -> Array:
        """Of a linear whose input no rank gathers."""
        return width * self.tokens * (self.maximum + self._written(self.orders))

    def gradient(self, width: Array | float) -> Array:
        """Of outputs that no rank gathers."""
        return self.inner_input(width)

    def gathered_gradient(self, width: Array | float) -> Array:
        """Of the output of a module."""
        return width * (self.local * self.maximum + self._cast(self.orders))

    def _cast(self, orders: Array | float) -> Array:
        """Codes of all tokens: transposed after a gather of codes, else made from values."""
        code = self.fp8.code_bytes
        turned = self.local * (self.itemsize + code) + 2 * code * self.tokens * (orders - 1)
        return np.where(self.coded, turned, self.tokens * self._written(orders))

    def _written(self, orders: Array | float) -> Array | float:
        return self.itemsize + orders * self.fp8.code_bytes


class ExpertPasses(NamedTuple):
    """Bytes that routed experts in fp8 move beside their matmuls, in forward, in backward, and for
    weight gradients, whose operands become values again."""

    forward: Array
    backward: Array
    weights: Array


def expert_passes(
    tokens: Array, rows: Array, width: int, inner: Array, gated: bool, itemsize: int, etp: Array
) -> ExpertPasses:
    """Of a rank's tokens and the rows of its experts, of the model's and the experts' width. One
    kernel finds the maximum of a row and its codes, unless etp cuts the row."""
    into, code = (2 if gated else 1) * inner, itemsize + 1
    travel = tokens * (width * itemsize + packed_row(width))  # rounded where a token is
    cut = code + np.where(etp > 1, itemsize, 0)
    operands = rows * (2 * width + inner + into) * code
    return ExpertPasses(travel + rows * inner * cut, travel + rows * into * cut, operands)


def travelling_share(width: int, itemsize: int) -> float:
    """Of the bytes of rows to experts and back, what is left where codes go there."""
    return (1 + packed_row(width) / (width * itemsize)) / 2


def weight_bytes(fp8: Fp8, stack: SoftwareStack, grid: LayoutGrid, itemsize: int) -> Array:
    """Bytes moved in a step to round a weight, in both orders: once, or at every use where full
    weights do not stay, with the maximum of the first."""
    maximum = itemsize if fp8.scaling == "tensorwise" else 0
    return maximum + _uses(stack, grid) * (itemsize + fp8.weight_bytes)


def expert_weight_bytes(stack: SoftwareStack, grid: LayoutGrid, itemsize: int) -> Array:
    """The same of a routed expert's weight, which always has a maximum."""
    return itemsize + _uses(stack, grid) * (itemsize + EXPERT_WEIGHT)


def _uses(stack: SoftwareStack, grid: LayoutGrid) -> Array:
    return np.where(rounded_weights_stay(stack, grid), 1.0, 2 * grid.microbatches)
