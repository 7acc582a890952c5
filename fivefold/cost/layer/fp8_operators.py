"""What matmuls in fp8 hold, in bytes of a microbatch: codes in place of what bf16 saves.

An input is rounded in two orders, one for the matmul that runs and one that waits for the weight
gradient; so is an output gradient. Rounded weights stay over a step, or are made at every use.
Routed experts have one order of rows, which travel as codes, and values again for weight gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.core.layout import EXPERT_WEIGHT, SCALE_BYTES, Fp8, packed_row
from fivefold.cost.layer.operator_list import OperatorList, TapeTensor
from fivefold.cost.memory import Activations


@dataclass(frozen=True)
class RoundedOperators:
    """For one plan. `unit`: bytes of a column of all tokens. `caches_weights`: rounded ones
    stay."""

    fp8: Fp8
    caches_weights: bool
    itemsize: int
    unit: float

    @property
    def wgrad(self) -> bool:
        """Whether operands of weight gradients are rounded."""
        return self.fp8.wgrad == "fp8"

    def codes(self, size: float) -> float:
        """Bytes of the codes of so many bytes."""
        return size * self.fp8.code_bytes / self.itemsize

    def weights(self, inputs: float, outputs: float) -> float:
        """Bytes of the weights of a linear that are rounded for one use, in both orders, from the
        bytes of its inputs and outputs."""
        size = self.fp8.weight_bytes
        return 0.0 if self.caches_weights else size * inputs / self.unit * outputs / self.unit

    def project(
        self,
        operators: OperatorList,
        x: TapeTensor,
        sizes: dict[str, float],
        input_bytes: float,
        *,
        split: bool = False,
        gathers: bool = False,
        shards: bool = False,
        copied: float = 0.0,
        live_bytes: float = 0.0,
    ) -> list[TapeTensor]:
        """Linears of one input, which has `input_bytes` where it is gathered; `shards`: this rank's
        tokens are saved. Outputs are one tensor: some are `copied` from it, and others, which are
        saved, hold more of it."""
        coded, twice = gathers and self.fp8.gathers_codes, 1 + self.wgrad
        full, outs = self.codes(input_bytes), sum(sizes.values())
        weights, moved = self.weights(input_bytes, outs), input_bytes if gathers else 0.0
        if coded:
            moved = self.codes(x.bytes)
        saved, keeps = [x], 0.0
        if self.wgrad and not shards:
            saved, keeps = [], full
        elif gathers and not shards:
            saved, keeps = [], input_bytes
        first, *tail_sizes = sizes.values()
        code_bytes = moved + full + (full if self.wgrad and not shards else 0.0)
        outputs = [
            TapeTensor(first, extra=code_bytes + weights + copied),
            *map(TapeTensor, tail_sizes),
        ]
        waits = (full if self.wgrad else input_bytes) if shards else 0.0
        again = moved + full * twice - waits if shards else 0.0
        operators.add(
            [x],
            outputs[0],
            saved=saved,
            weights=list(sizes),
            backward_extra=self.codes(outs) * twice + again + (input_bytes if gathers else 0.0),
            keeps=keeps + live_bytes,
            defers=keeps,
            collective=split,
            extra_outputs=outputs[1:],
            gathered=waits,
            gathers="input" if shards else "",
            weights_last=True,
            codes=self.codes(outs) if self.wgrad else 0.0,
            rounded=weights,
        )
        return outputs

    def sum_of_rows(
        self, operators: OperatorList, x: TapeTensor, name: str, output: float, full_output: float
    ) -> TapeTensor:
        """A linear and the sum over ranks; the gradient of its output is gathered if a rank has
        less than the full one."""
        gathers, twice = output < full_output, 1 + self.wgrad
        inputs, full = self.codes(x.bytes), self.codes(full_output)
        weights = self.weights(x.bytes, full_output)
        output_extra = inputs * twice + weights + (full_output if gathers else 0.0)
        moved = 0.0
        if gathers:
            moved = self.codes(output) if self.fp8.gathers_codes else full_output
        waits = full_output if gathers and not self.wgrad else 0.0
        return operators.add(
            [x],
            TapeTensor(output, extra=output_extra),
            saved=[] if self.wgrad else [x],
            weights=name,
            backward_extra=moved - waits + full * twice + x.bytes,
            keeps=inputs if self.wgrad else 0.0,
            defers=inputs if self.wgrad else 0.0,
            collective=True,
            gathered=waits,
            gathers="gradient" if waits else "",
            weights_last=True,
            codes=full if self.wgrad else 0.0,
            rounded=weights,
        )


@dataclass(frozen=True)
class RoundedSlots:
    """Routed experts of one layer in fp8, in bytes of the slots of a rank: a column of them, rows
    of the model's width, and what is inside of experts. `numel`: of one stacked weight."""

    caches_weights: bool
    column: float
    rows: float
    inner: float
    numel: float
    model_width: int
    itemsize: int

    def packed(self, size: float) -> float:
        """Bytes of rows of the model's width as they travel to experts, from those of values."""
        return size * packed_row(self.model_width) / (self.model_width * self.itemsize)

    def codes(self, size: float) -> float:
        """Bytes of codes with a scale for each row."""
        return (size + self.column * SCALE_BYTES) / self.itemsize

    def project(
        self, operators: OperatorList, x: TapeTensor, names: Sequence[str]
    ) -> list[TapeTensor]:
        """Gate and up, as one matmul. Packed rows are saved; gradients are rounded here."""
        weights = self._weights(len(names), len(names) * self.inner)
        first, *tail = [TapeTensor(self.inner, extra=weights / len(names)) for _ in names]
        codes = self.codes(len(names) * self.inner)
        operators.add(
            [x],
            first,
            saved=[x],
            weights=names,
            backward_extra=codes,
            extra_outputs=tail,
            weights_last=True,
            codes=codes,
            dequantised=self.rows + self.inner,
            rounded=self._weights(len(names), self.rows),
        )
        return [first, *tail]

    def down(self, operators: OperatorList, x: TapeTensor, name: str) -> TapeTensor:
        """Rows are rounded here and saved as codes; the gradients of its results come packed."""
        codes, packed = self.codes(self.inner), self.packed(self.rows)
        return operators.add(
            [x],
            TapeTensor(self.rows, extra=codes + self._weights(1, self.rows), gradient=packed),
            weights=name,
            keeps=codes,
            defers=codes,
            weights_last=True,
            dequantised=self.rows + self.inner,
            rounded=self._weights(1, self.inner),
        )

    def _weights(self, stacks: int, result: float) -> float:
        """Bytes of rounded weights beside a result of this size: in both orders before it is made,
        in one while it is."""
        numel = 0.0 if self.caches_weights else stacks * self.numel
        return max(EXPERT_WEIGHT * numel - result, numel)


def rounded_slots(activations: Activations, column: float, keeps_weights: bool) -> RoundedSlots:
    """The experts of a rank, of one layout; `column`: bytes of one of all their slots."""
    shape, grid = activations.shape, activations.grid
    assert shape.moe is not None
    ffn = shape.moe.ffn / grid.etp.item()
    numel = shape.moe.experts / grid.ep.item() * ffn * shape.width
    sizes = (column, column * shape.width, column * ffn, numel)
    return RoundedSlots(keeps_weights, *sizes, shape.width, activations.itemsize)
