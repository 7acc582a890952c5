"""Which decode steps are captured as CUDA graphs, and which kernels compute their experts: the one
rule of all ranks of an engine, and of plans."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.core.layout import Layout, planned_weights
from fivefold.core.model import Shape

MOST_CAPTURED = 256
"""Most sequences of a captured step: with more, the GPU takes about as long as the host does."""
MOST_GATHERED = 4096
"""Most tokens of all ranks that have experts together. A captured step gives all of them to every
rank, with float32 sums back: at the width of DeepSeek-V3 176 MB a layer, 0.4 ms of NVLink, half of
what a host takes to issue a layer kernel by kernel, which sends tokens to their experts alone."""


@dataclass(frozen=True)
class DecodeSteps:
    """How an engine decodes. Nothing depends on the layers of a stage: what stages send one another
    has the size of a captured step on all of them, or on none."""

    shape: Shape
    layout: Layout
    dtype: str = "bfloat16"
    codes: bool = False  # weights of linears and experts in fp8
    fixed_tiles: bool = False  # batch-invariant

    @property
    def few_token_experts(self) -> bool:
        """Whether kernels for few tokens compute the experts: they know one activation, no biases,
        no adapters, no codes, and weights that multiply outputs."""
        moe, tuning = self.shape.moe, self.shape.tuning
        if moe is None or self.shape.activation != "swiglu" or moe.biases or moe.weigh_inputs:
            return False
        if self.codes or self.fixed_tiles or self.dtype == "float64":
            return False
        experts = (weight.name for weight in planned_weights(self.shape) if weight.expert)
        return tuning is None or not any(map(tuning.adapts, experts))

    @property
    def never_waits(self) -> bool:
        """Whether the host issues a step without a number from the device: grouped matmuls of other
        types wait for numbers of rows, and ranks for those that come."""
        alone = self.layout.ep * self.layout.etp == 1
        return self.shape.moe is None or (alone and self.dtype == "bfloat16")

    @property
    def most_captured(self) -> int:
        """Most sequences of a replica whose steps a rank replays, 0 if none: all that it calls and
        sends has sizes that depend on the number of tokens alone. Ranks of cp own keys by the
        blocks that were free."""
        layout = self.layout
        if layout.cp > 1 or self.dtype == "float64":
            return 0
        if self.never_waits or not self.few_token_experts:
            return MOST_CAPTURED if self.never_waits else 0
        shares = layout.tp if layout.sp else 1
        return min(MOST_CAPTURED, shares * MOST_GATHERED // (layout.ep * layout.etp))
