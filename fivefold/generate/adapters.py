"""Several low-rank adapters of one base in one engine, of which every request names one.

Splits   adapters lie side by side as one of all their ranks (`model/low_rank.py`): what training
         splits of an adapter over tp and pp, this splits too. Linears that an adapter does not have
         are zero there, and scales are part of the second factors. So are those of multi-token
         prediction, which proposes by the base: adapters of other frameworks do not have it.
Moves    one number a token, its adapter, with the other numbers of a step.
Costs    two small matmuls for each linear that any adapter has, of the ranks of all adapters,
         whatever tokens a step has. Nothing without adapters.
Refuses  adapters of routed experts, whose rows come from other ranks without their numbers; and
         whatever is not of this base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Weight, weights
from fivefold.core.model import ADAPTER, ALL, Shape, Tuning
from fivefold.core.plan import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fivefold.generate.layout import ReadWeight
    from fivefold.generate.text_model import TextModel
    from fivefold.generate.text_ranks import Tell

# What does not change the arithmetic of a forward.
_OF_TRAINING = "name family source tuning max_seq mtp dropout embedding_dropout attention_dropout"


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter that requests name. `open_weights` reads its factors; of a run it also reads the
    base that they were trained on, `has_base`."""

    name: str
    source: Path
    shape: Shape  # with its tuning
    open_weights: Callable[[Tell], ReadWeight]
    has_base: bool = False

    def __str__(self) -> str:
        return f"adapter {self.name} ({self.source})"

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
            if entry.name not in _OF_TRAINING.split() and values[0] != values[1]:
                rule = f"it is of another base, with {entry.name} = {values[0]}, and this model has"
                yield f"{rule} {values[1]}: give adapters of this model"
        experts = [row.name for row in weights(replace(base, tuning=None)) if row.expert]
        if adapted := [name for name in experts if self.tuning.adapts(name)]:
            rule = f"it adapts routed experts ({adapted[0]}), which are served merged only"
            yield f"{rule}: export the merged model and serve that"


def with_adapters(model: TextModel, adapters: Sequence[NamedAdapter], base: str) -> TextModel:
    """A model with adapters, whose own name is `base`; refuses those that are of another one."""
    names = [base]
    for adapter in adapters:
        if adapter.name in names:
            used = "the name of the base" if adapter.name == base else "there already"
            raise FivefoldError(f"adapters {adapter.name}=…: the name is {used}: give another")
        names.append(adapter.name)
        if problems := list(adapter.problems(model.shape)):
            raise BadFile(str(adapter), problems)
    targets = {adapter.tuning.targets for adapter in adapters}
    text = ALL if ALL in targets else "+".join(sorted(targets))
    rank = sum(adapter.tuning.rank for adapter in adapters)
    recipe = Recipe(lora=rank, lora_alpha=float(rank), lora_targets=text)  # of scale 1
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
            # Both rounded, since one of both may have been stored in a narrower type.
            narrow = values.to(torch.bfloat16)
            for adapter, read in self.readers if weight.frozen else ():
                if adapter.has_base and not torch.equal(narrow, read(weight, torch.bfloat16)):
                    raise FivefoldError(
                        f"{adapter} was trained on another base: its {weight.name} has other "
                        "values; serve the model that it was trained on"
                    )
            return values
        parts = [self._factor(weight, *reader) for reader in self.readers]
        return torch.cat(parts, dim=0 if weight.name.endswith(".a") else 1).to(dtype)

    def _factor(self, weight: Weight, adapter: NamedAdapter, read: ReadWeight) -> Tensor:
        """That of one adapter, with its scale."""
        import torch

        linear, _, factor = weight.name.rpartition(ADAPTER)
        rank, (rows, columns) = adapter.tuning.rank, weight.shape
        sizes = (rank, columns) if factor == "a" else (rows, rank)
        if linear.startswith("mtp.") or not adapter.tuning.adapts(f"{linear}.weight"):
            return torch.zeros(sizes, dtype=torch.float64)
        values = read(replace(weight, shape=sizes), torch.float64)
        if not values.isfinite().all():  # zero times it would not be zero for tokens of others
            rule = f"{weight.name} is not finite: train it again, or leave it out"
            raise FivefoldError(f"{adapter}: {rule}")
        return values * (adapter.tuning.scale if factor == "b" else 1.0)
