"""What linears in fp8 hold, in bytes of a microbatch: codes in place of what bf16 saves.

An input is rounded in two orders, one for the matmul that runs and one that waits for the weight
gradient; so is an output gradient. Rounded weights stay over a step, or are made at every use.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.core.fp8 import Fp8
from fivefold.cost.operator_list import OperatorList, TapeTensor


@dataclass(frozen=True)
class RoundedOperators:
    """For one plan. `unit`: bytes of a column of all tokens. `kept`: rounded weights stay."""

    fp8: Fp8
    kept: bool
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
        return 0.0 if self.kept else size * inputs / self.unit * outputs / self.unit

    def project(
        self,
        found: OperatorList,
        x: TapeTensor,
        sizes: dict[str, float],
        whole: float,
        *,
        split: bool = False,
        gathers: bool = False,
        shards: bool = False,
        copied: float = 0.0,
        held: float = 0.0,
    ) -> list[TapeTensor]:
        """Linears of one input, which has `whole` bytes where it is gathered; `shards`: this rank's
        tokens are saved. Outputs are one tensor: some are `copied` from it, and others, which are
        saved, hold more of it."""
        coded, twice = gathers and self.fp8.gathers_codes, 1 + self.wgrad
        full, outs = self.codes(whole), sum(sizes.values())
        weights, moved = self.weights(whole, outs), whole if gathers else 0.0
        if coded:
            moved = self.codes(x.bytes)
        saved, keeps = [x], 0.0
        if self.wgrad and not shards:
            saved, keeps = [], full
        elif gathers and not shards:
            saved, keeps = [], whole
        first, *more = sizes.values()
        made = moved + full + (full if self.wgrad and not shards else 0.0)
        outputs = [TapeTensor(first, extra=made + weights + copied), *map(TapeTensor, more)]
        waits = (full if self.wgrad else whole) if shards else 0.0
        again = moved + full * twice - waits if shards else 0.0
        found.add(
            [x],
            outputs[0],
            saved=saved,
            weights=list(sizes),
            backward_extra=self.codes(outs) * twice + weights + again + (whole if gathers else 0.0),
            keeps=keeps + held,
            defers=keeps,
            collective=split,
            more=outputs[1:],
            gathered=waits,
            gathers="input" if shards else "",
            weights_last=True,
            codes=self.codes(outs) if self.wgrad else 0.0,
        )
        return outputs

    def sum_of_rows(
        self, found: OperatorList, x: TapeTensor, name: str, output: float, whole: float
    ) -> TapeTensor:
        """A linear and the sum over ranks; the gradient of its output is gathered if a rank has
        less than the `whole` of it."""
        gathers, twice = output < whole, 1 + self.wgrad
        inputs, full = self.codes(x.bytes), self.codes(whole)
        weights = self.weights(x.bytes, whole)
        made = inputs * twice + weights + (whole if gathers else 0.0)
        moved = 0.0
        if gathers:
            moved = self.codes(output) if self.fp8.gathers_codes else whole
        waits = whole if gathers and not self.wgrad else 0.0
        return found.add(
            [x],
            TapeTensor(output, extra=made),
            saved=[] if self.wgrad else [x],
            weights=name,
            backward_extra=moved - waits + full * twice + x.bytes + weights,
            keeps=inputs if self.wgrad else 0.0,
            defers=inputs if self.wgrad else 0.0,
            collective=True,
            gathered=waits,
            gathers="gradient" if waits else "",
            weights_last=True,
            codes=full if self.wgrad else 0.0,
        )
