"""Adapters of one base, and the engines that they are compared in: all of them together, and one
model for each, with the adapter in its weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fivefold.core.layout.weight_table import Weight, buffers, planned_weights
from fivefold.core.model.presets import load, with_overrides
from fivefold.core.model.shape import Shape
from fivefold.core.model.tuning import ALL, Tuning, unmatched
from fivefold.core.plan.plan import Plan, PlanOptions
from fivefold.generate.adapters import AdaptedWeights, NamedAdapter, with_adapters
from fivefold.generate.drafts import DraftOptions
from fivefold.generate.layout import LayoutEngine, mesh_of, plan_of, stage_of
from fivefold.generate.requests import Request
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.text_model import TextModel
from fivefold.huggingface.adapters import merged

Values = Callable[[str, tuple[int, ...]], Tensor]
LATENTS = {
    **{"mla.kv_rank": "12", "mla.nope_dim": "10", "mla.rope_dim": "6", "mla.value_dim": "8"},
    **{"head_dim": "16", "kv_heads": "8"},
}
BIASES = {"qkv_bias": "true", "out_bias": "true", "mlp_bias": "true"}
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "plain": ("tiny", {"mtp": "1"}),
    "biases": ("tiny", BIASES),
    "latents": ("tiny", LATENTS),
    "latent queries": ("tiny", LATENTS | {"mla.q_rank": "8"}),
    "experts": ("tiny-moe", {"moe.shared": "1", "moe.shared_ffn": "24"}),
}
TUNINGS = (
    Tuning(2, 6.0, "attention+mlp.down+mlp.up+shared"),
    Tuning(3, 1.5, "q+v+out+kv_up+mlp.up"),
    Tuning(1, 2.5, "k+v+kv_down+mlp.gate"),
)


def values_of(name: str, sizes: tuple[int, ...]) -> Tensor:
    """Random values of a weight, by its name."""
    dice = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    scale = 0.25 if len(sizes) > 1 else 1.0
    return torch.randn(sizes, generator=dice, dtype=torch.float64) * scale


def reader_of(prefix: str, tell: object) -> Callable[[Weight, torch.dtype], Tensor]:
    """Weights of the base without a prefix, factors of an adapter with its name."""
    return lambda weight, dtype: values_of(prefix + weight.name, weight.shape).to(dtype)


@dataclass(frozen=True)
class AdapterCase:
    """A base with its adapters, in a layout."""

    model: str = "plain"
    layout: str = "dp=1"
    batch_invariant: bool = False
    tunings: tuple[Tuning, ...] = TUNINGS

    @property
    def text_model(self) -> TextModel:
        name, changes = MODELS[self.model]
        changes = {"layers": "2", "max_seq": "160", **changes}
        shape = with_overrides(load(name), changes)
        options = PlanOptions(name, layout=self.layout, set=changes)
        return TextModel(shape, options, Path(), Path(), False)

    def adapters(self, shape: Shape) -> list[NamedAdapter]:
        return [
            NamedAdapter(
                name, Path(name), replace(shape, tuning=self.matching(shape, tuning)), read
            )
            for name, tuning in zip("abc", self.tunings, strict=False)
            for read in [_Reader(f"{name}/")]
        ]

    def matching(self, shape: Shape, tuning: Tuning) -> Tuning:
        """Of parts of names those that this model has."""
        if tuning.targets == ALL:
            return tuning
        names = [weight.name for weight in planned_weights(shape)]
        linears = [name.removesuffix(".weight") for name in names if Tuning(1).adapts(name)]
        lost = unmatched(tuning.targets, linears)
        parts = [part for part in tuning.targets.split("+") if part not in lost]
        return replace(tuning, targets="+".join(parts))

    def plan(
        self, number: int | None = None, drafts: DraftOptions | None = None
    ) -> tuple[Plan, Sequence[NamedAdapter]]:
        """With all adapters, or for one of them or the base alone."""
        model = self.text_model
        adapters = self.adapters(model.shape)
        if number is None:
            model = with_adapters(model, adapters, "base")
        return plan_of(model.shape, model.options, drafts), adapters

    def read(self, number: int | None) -> Callable[[Weight, torch.dtype], Tensor]:
        """Weights of all together, or of one with its adapter merged."""
        base = reader_of("", None)
        adapters = self.adapters(self.text_model.shape)
        if number is None:
            return AdaptedWeights(base, adapters, lambda why: None)
        if number == 0:
            return base
        adapter = adapters[number - 1]
        rows = {weight.name: weight for weight in _rows(adapter.shape)}

        def stored(name: str) -> Tensor:
            prefix = f"{adapter.name}/" if ".lora." in name else ""
            return values_of(prefix + name, rows[name].shape)

        full = merged(adapter.shape, stored)
        return lambda weight, dtype: full(weight.name).to(dtype)

    def engine(
        self,
        device: torch.device,
        number: int | None = None,
        blocks: int = 60,
        limits: ScheduleLimits | None = None,
        dtype: torch.dtype = torch.float64,
        drafts: DraftOptions | None = None,
    ) -> LayoutEngine:
        plan, adapters = self.plan(number, drafts)
        mesh = mesh_of(plan, device, self.batch_invariant)
        stage = stage_of(plan, mesh, dtype, self.batch_invariant)
        stage.fill(self.read(number))
        ranks = [adapter.tuning.rank for adapter in adapters] if number is None else []
        return LayoutEngine(
            *(plan, mesh, stage, blocks, limits),
            batch_invariant=self.batch_invariant,
            adapter_ranks=ranks,
            drafts=drafts,
        )

    def __str__(self) -> str:
        return f"{self.model} {self.layout}" + " invariant" * self.batch_invariant


@dataclass(frozen=True)
class _Reader:
    prefix: str

    def __call__(self, tell: object) -> Callable[[Weight, torch.dtype], Tensor]:
        return reader_of(self.prefix, tell)


def _rows(shape: Shape) -> Sequence[Weight]:
    return (*planned_weights(shape), *buffers(shape))


def requests_of(vocab: int, tokens: int = 9) -> list[Request]:
    """Prompts of several lengths, each for the base and for all adapters: they begin alike, in full
    blocks too."""
    dice = torch.Generator().manual_seed(5)
    longest = torch.randint(0, vocab, (70,), generator=dice).tolist()
    return [
        Request(f"{length} {number}", tuple(longest[:length]), tokens, adapter=number)
        for length in (5, 41, 70)
        for number in (1, 0, 3, 2)
    ]
