"""Model size and tokens for a budget of FLOPs: Chinchilla's rule, by active parameters.

C = 6·N·D, with N the parameters that a token uses and D the tokens. The rule of Hoffmann et al.
(2203.15556), 20 tokens per parameter, was found for dense models. For a model with experts N counts
what is active: the same FLOPs then buy the same tokens, while memory and traffic follow all
parameters. Whether more experts lower the loss at that budget is not modelled.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fivefold.core import FivefoldError
from fivefold.core import hardware as machines
from fivefold.core.model import parameters
from fivefold.core.model import presets as models
from fivefold.core.plan.textbook_formulas import STATES

TOKENS_PER_PARAMETER = 20.0
USUAL_MFU = 0.4
SPARSITY = 8  # all parameters over active ones, in the example with experts
_SECONDS = {"hour": 3600.0, "day": 86_400.0, "week": 604_800.0, "month": 30 * 86_400.0}
_HOW = 'write FLOPs (1e24), or GPUs, machine and time ("512 h100 30 days")'
_MOST_MODELS = 6  # of each kind, in the comparison


@dataclass(frozen=True)
class Budget:
    """FLOPs, and what they were computed from."""

    flops: float
    description: str


@dataclass(frozen=True)
class ComputeOptimal:
    """The size and the tokens that a rule chooses for a budget."""

    budget: Budget
    tokens_per_parameter: float
    parameters: float  # active
    tokens: float


@dataclass(frozen=True)
class SpentOn:
    """A model that is trained with the full budget."""

    name: str
    kind: str  # dense or MoE
    total: float
    active: float
    tokens: float
    share: float  # tokens over those of the rule for this size: below 1 is short of data

    @property
    def states(self) -> float:
        """Bytes of weights, gradients and optimizer states."""
        return STATES * self.total


def parse_budget(text: str, mfu: float = USUAL_MFU, precision: str = "bf16") -> Budget:
    """Read `1e24` or `512 h100 30 days`; GPUs run at the given MFU.

    >>> parse_budget("1e24").flops
    1e+24
    """
    if not 0 < mfu <= 1:
        raise FivefoldError(f"mfu {mfu}: give a share of the peak above 0, at most 1")
    tokens = text.lower().replace(",", " ").split()
    if plain := re.fullmatch(r"([0-9.]+(?:e\+?[0-9]{1,3})?)(?: ?flops?)?", " ".join(tokens)):
        return Budget(_number(plain[1], text), f"{_number(plain[1], text):.3g} FLOPs")
    if len(tokens) != 4 or (unit := tokens[3].rstrip("s")) not in _SECONDS:
        raise FivefoldError(f"budget {text!r}: {_HOW}")
    gpus = _number(tokens[0], text)
    machine = machines.load(tokens[1])
    span = _number(tokens[2], text)
    known = machine.peaks.known()
    used = precision if precision in known else next(iter(known))
    flops = gpus * span * _SECONDS[unit] * machine.peak(used) * mfu
    return Budget(
        flops,
        f"{gpus:,g} × {machine.peak(used) / 1e12:,g} TFLOP/s ({tokens[1]}, {used}) × "
        f"{span:g} {unit}s × MFU {mfu:.0%} = {flops:.3g} FLOPs",
    )


def _number(text: str, budget: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise FivefoldError(f"budget {budget!r}: {text!r} is not a number; {_HOW}") from None
    if not 0 < value < 1e40:
        raise FivefoldError(f"budget {budget!r}: give a number above 0; {_HOW}")
    return value


def compute_optimal(
    budget: Budget, tokens_per_parameter: float = TOKENS_PER_PARAMETER
) -> ComputeOptimal:
    """N = √(C / (6r)) and D = r·N."""
    if not 0 < tokens_per_parameter < 1e9:
        raise FivefoldError(
            f"tokens_per_parameter {tokens_per_parameter}: give a number above 0, such as 20"
        )
    size = math.sqrt(budget.flops / (6 * tokens_per_parameter))
    return ComputeOptimal(budget, tokens_per_parameter, size, tokens_per_parameter * size)


def equal_flops(best: ComputeOptimal, model: str | None = None) -> list[SpentOn]:
    """The optimum of both kinds, the named model, and the presets of each kind whose active
    parameters are nearest to the optimum: all with the same FLOPs."""
    size, sparse = best.parameters, SPARSITY * best.parameters
    rows = [
        _spent(best, "compute-optimal, dense", "dense", size, size),
        _spent(best, f"compute-optimal, {SPARSITY} × in experts", "MoE", sparse, size),
    ]
    if model is not None:
        rows.append(_of_model(best, model))
    presets = [_of_model(best, name) for name in models.presets() if name != model]
    for kind in ("dense", "MoE"):
        same = [preset for preset in presets if preset.kind == kind]
        same.sort(key=lambda preset: abs(math.log(preset.active / best.parameters)))
        rows += sorted(same[:_MOST_MODELS], key=lambda preset: preset.active)
    return rows


def _of_model(best: ComputeOptimal, name: str) -> SpentOn:
    shape = models.load(name)
    sizes = parameters(shape)
    kind = "dense" if shape.moe is None else "MoE"
    return _spent(best, shape.name, kind, sizes.total, sizes.active)


def _spent(best: ComputeOptimal, name: str, kind: str, total: float, active: float) -> SpentOn:
    tokens = best.budget.flops / (6 * active)
    return SpentOn(name, kind, total, active, tokens, tokens / (best.tokens_per_parameter * active))
