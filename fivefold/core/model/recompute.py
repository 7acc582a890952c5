"""Recomputation: which activations the backward computes again, by module and by stage.

none                      saves all
norm, act                 outputs of norms, of activations: made again from inputs that are
                          saved anyway, for the GEMMs that read them
attention, mlp, experts   all inside of these modules: their forward runs again
norm+attention            several
selective                 norm+act: what costs no GEMM and no collective
full, full:K              all but the input of every block, or of every K-th
full-but-attention        as full, but attention itself does not run again: what its kernel has made
                          is saved too (also full:K-but-attention)
selective,full@0-1        stages 0 and 1 by their own rule
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fivefold.core import FivefoldError

Module = Literal["norm", "act", "attention", "mlp", "experts"]
MODULES: tuple[Module, ...] = ("norm", "act", "attention", "mlp", "experts")
REMADE: tuple[Module, ...] = ("norm", "act")  # outputs alone; of the others the forward runs again
SELECTIVE = "selective"
_KEPT = "-but-attention"
_RULE = re.compile(
    rf"(?P<rule>[a-z+]+(?::[1-9][0-9]{{0,4}})?(?:{_KEPT})?)(?:@(?P<first>\d{{1,4}})(?:-(?P<last>\d{{1,4}}))?)?"
)


@dataclass(frozen=True)
class Recompute:
    """The rule of one stage: these modules, or everything in segments of so many `blocks`, of which
    the results of attention may be kept."""

    modules: tuple[Module, ...] = ()
    blocks: int = 0
    keeps_attention: bool = False

    @classmethod
    def parse(cls, text: str) -> Recompute:
        if full := re.fullmatch(rf"full(?::([1-9][0-9]{{0,4}}))?({_KEPT})?", text):
            return cls(blocks=int(full[1] or 1), keeps_attention=full[2] is not None)
        modules = {"none": [], SELECTIVE: list[str](REMADE)}.get(text, text.split("+"))
        if set(modules) - set(MODULES) or len(set(modules)) < len(modules):
            raise FivefoldError(
                f"recompute {text!r}: choose none, selective, full, full:K for segments of K "
                f"blocks, full{_KEPT}, or modules joined by + ({', '.join(MODULES)})"
            )
        return cls(tuple(module for module in MODULES if module in modules))

    def __str__(self) -> str:
        if self.blocks:
            segment = "" if self.blocks == 1 else f":{self.blocks}"
            return f"full{segment}{_KEPT if self.keeps_attention else ''}"
        if self.modules in ((), REMADE):
            return SELECTIVE if self.modules else "none"
        return "+".join(self.modules)

    @property
    def full(self) -> bool:
        return self.blocks > 0

    def remakes(self, module: Module) -> bool:
        """Whether the output of norms or activations is made again, and nothing else."""
        return module in self.modules

    def repeats(self, module: Module) -> bool:
        """Whether the forward of a module runs again, alone or with everything."""
        return self.full or module in self.modules

    @property
    def attends_again(self) -> bool:
        """Whether attention itself, between the linears of its module, runs again."""
        return self.repeats("attention") and not self.keeps_attention


@dataclass(frozen=True)
class StageRecompute:
    """The rules of all stages: a rule for all, and others for some."""

    usual: Recompute = Recompute()
    special: tuple[tuple[int, int, Recompute], ...] = ()  # first stage, last stage

    @classmethod
    def parse(cls, text: str) -> StageRecompute:
        usual: list[Recompute] = []
        special: list[tuple[int, int, Recompute]] = []
        for word in text.replace(" ", "").split(","):
            match = _RULE.fullmatch(word)
            rule = Recompute.parse(word if match is None else match["rule"])
            if match is None or match["first"] is None:
                usual.append(rule)
                continue
            first = int(match["first"])
            special.append((first, int(match["last"] or first), rule))
        if len(usual) > 1 or any(first > last for first, last, _ in special):
            raise FivefoldError(
                f"recompute {text!r}: give one rule for all stages, and others for some as "
                "RULE@FIRST-LAST, such as selective,full@0-1"
            )
        return cls(usual[0] if usual else Recompute(), tuple(special))

    def __str__(self) -> str:
        rules = [
            f"{rule}@{first}" + (f"-{last}" if last > first else "")
            for first, last, rule in self.special
        ]
        return ",".join([str(self.usual), *rules])

    def of(self, stage: int) -> Recompute:
        """The rule of a stage."""
        return next(
            (rule for first, last, rule in self.special if first <= stage <= last), self.usual
        )

    def within(self, stages: int) -> StageRecompute:
        """These rules; refused if one is for a stage that does not exist."""
        last = max((last for _, last, _ in self.special), default=0)
        if last >= stages:
            raise FivefoldError(
                f"recompute {self}: there is no stage {last}, the stages of this layout are 0 to "
                f"{stages - 1}"
            )
        return self

    @property
    def rules(self) -> tuple[Recompute, ...]:
        """All of them, the usual one first."""
        return (self.usual, *(rule for *_, rule in self.special))
