"""Several low-rank adapters of one base in one engine, of which every request names one.

Splits   adapters lie side by side as one of all their ranks (`model/low_rank.py`): what training
         splits of an adapter over tp and pp, this splits too. Linears that an adapter does not have
         are zero there, and scales are part of the second factors.
Moves    one number a token, its adapter, with the other numbers of a step.
Costs    two small matmuls for each linear that any adapter has, of the ranks of all adapters,
         whatever tokens a step has. Nothing without adapters.
Refuses  adapters of routed experts, whose rows come from other ranks without their numbers; and
         whatever is not of this base.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Weight, tuned, weights
from fivefold.core.model import ADAPTER, ALL, Shape, Tuning
from fivefold.core.plan import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fivefold.generate.layout import ReadWeight
    from fivefold.generate.text_model import TextModel
    from fivefold.generate.text_ranks import Tell

# What does not change the arithmetic of a forward.
_OF_TRAINING = {"name", "family", "source", "tuning", "max_seq"} | {
    "dropout",
    "embedding_dropout",
    "attention_dropout",
    "mtp",
}


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter that requests name. `open_weights` reads its factors; of a run it also reads the
    base that they were trained on, `has_base`."""

    name: str
    source: Path
    shape: Shape  # with its tuning
    open_weights: Callable[[Tell], ReadWeight]
    has_base: bool = False

    @property
    def tuning(self) -> Tuning:
        """Its rank, scale and linears."""
        assert self.shape.tuning is not None, "checked when it was found"
        return self.shape.tuning

    def problems(self, base: Shape) -> Iterator[str]:
        """Why it cannot be served with this base."""
        if not self.tuning.rank:
            yield "it was trained without lora, and has no adapters: serve it as a model"
        if self.tuning.train_only:
            rule = f"train_only = {self.tuning.train_only}: other weights have learned too"
            yield f"{rule}, which adapters do not hold; export the merged model and serve that"
        for entry in fields(Shape):
            values = getattr(self.shape, entry.name), getattr(base, entry.name)
            if entry.name not in _OF_TRAINING and values[0] != values[1]:
                rule = f"it is of another base, with {entry.name} = {values[0]}, and this model has"
                yield f"{rule} {values[1]}: give adapters of this model"
        experts = [row.name for row in weights(replace(base, tuning=None)) if row.expert]
        if adapted := [name for name in experts if self.tuning.adapts(name)]:
            rule = f"it adapts routed experts ({adapted[0]}), which are served merged only"
            yield f"{rule}: export the merged model and serve that"


def with_adapters(model: TextModel, adapters: Sequence[NamedAdapter], base: str) -> TextModel:
    """A model with adapters, whose own name is `base`; refuses those that are of another one."""
    names = Counter([base, *(adapter.name for adapter in adapters)])
    for name, count in names.items():
        if count > 1:
            used = "the name of the base" if name == base else "there already"
            raise FivefoldError(f"--adapter {name}=…: the name is {used}: give another name")
    for adapter in adapters:
        if problems := list(adapter.problems(model.shape)):
            raise BadFile(f"adapter {adapter.name} ({adapter.source})", problems)
    targets = {adapter.tuning.targets for adapter in adapters}
    text = ALL if ALL in targets else "+".join(sorted(targets))
    rank = sum(adapter.tuning.rank for adapter in adapters)
    tuning = Tuning(rank, float(rank), text)  # of scale 1
    tuned(replace(model.shape, tuning=None), tuning)
    recipe = Recipe(lora=rank, lora_alpha=tuning.alpha, lora_targets=text)
    options = replace(model.options, train=recipe)
    return replace(model, options=options, adapters=tuple(adapters))


class AdaptedWeights:
    """Reads weights of a base, and the factors of its adapters side by side."""

    def __init__(self, base: ReadWeight, adapters: Sequence[NamedAdapter], tell: Tell) -> None:
        self.base = base
        self.readers = [(adapter, adapter.open_weights(tell)) for adapter in adapters]

    def __call__(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """A full weight, as `ReadWeight`."""
        import torch

        if ADAPTER not in weight.name:
            values = self.base(weight, dtype)
            for adapter, read in self.readers if weight.frozen else ():
                if adapter.has_base:
                    _require_same(adapter, weight, values, read(weight, torch.bfloat16))
            return values
        parts = [self._factor(weight, *reader) for reader in self.readers]
        return torch.cat(parts, dim=0 if weight.name.endswith(".a") else 1).to(dtype)

    def _factor(self, weight: Weight, adapter: NamedAdapter, read: ReadWeight) -> Tensor:
        """That of one adapter, with its scale."""
        import torch

        linear, _, factor = weight.name.rpartition(ADAPTER)
        rank, inputs_or_outputs = adapter.tuning.rank, weight.shape[factor == "a"]
        sizes = (rank, inputs_or_outputs) if factor == "a" else (inputs_or_outputs, rank)
        if not adapter.tuning.adapts(f"{linear}.weight"):
            return torch.zeros(sizes, dtype=torch.float64)
        values = read(replace(weight, shape=sizes), torch.float64)
        if not values.isfinite().all():  # zero times it would not be zero for tokens of others
            raise FivefoldError(
                f"adapter {adapter.name} ({adapter.source}): {weight.name} is not finite: train it "
                "again, or leave it out"
            )
        return values * (adapter.tuning.scale if factor == "b" else 1.0)


def _require_same(adapter: NamedAdapter, weight: Weight, values: Tensor, other: Tensor) -> None:
    """Refuse an adapter that was trained on other weights: both rounded, since one of both may have
    been stored in a narrower type."""
    import torch

    if not torch.equal(values.to(torch.bfloat16), other):
        raise FivefoldError(
            f"adapter {adapter.name} ({adapter.source}) was trained on another base: its "
            f"{weight.name} has other values; serve the model that it was trained on"
        )
