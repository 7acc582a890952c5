"""How the load of experts is balanced: one or more rules, by name.

    balance=aux-seq+z        several rules are joined with +
    balance=aux:0.02         a number replaces the rule's default coefficient

Every rule has a unit over which it counts, and no unit depends on the layout: *sequence* is one
row, over all ranks that share it; *microbatch* the rows of one data rank and microbatch; *global*
all tokens of an optimizer step; *token* each token by itself.

| name | unit | coefficient |
|---|---|---|
| aux | microbatch | 0.01: auxiliary loss a·E·Σ f·P (Switch, arXiv:2101.03961) |
| aux-seq | sequence | 0.0001: the same (DeepSeek-V3, arXiv:2412.19437) |
| aux-global | global | 0.01: the same, with the load f of the previous step (arXiv:2501.11873) |
| z | token | 0.001: c·mean(logsumexp²) (ST-MoE, arXiv:2202.08906) |
| bias | global | 0.001: a bias on the choice, without a loss (arXiv:2408.15664) |
| capacity:C | sequence | ⌈C·K·S/E⌉ slots per expert and row; the least probable are dropped |
| capacity-position:C | sequence | the same; the last tokens of the row are dropped |
| capacity-pad:C | sequence | as capacity, padded with empty slots: even all-to-alls |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from fivefold.core import FivefoldError, UnknownName
from fivefold.core.model.shape import Shape

Kind = Literal["aux", "z", "bias", "capacity"]
Unit = Literal["token", "sequence", "microbatch", "global"]
Keep = Literal["probability", "position"]


@dataclass(frozen=True)
class Balance:
    """One rule. `coefficient` is the weight of a loss, the step of the bias or the capacity."""

    kind: Kind
    unit: Unit
    coefficient: float
    keep: Keep = "probability"  # capacity: which slots are kept, the most probable or the first
    pads: bool = False  # capacity: experts get empty slots up to their capacity

    def __str__(self) -> str:
        word, usual = next(
            (word, usual)
            for word, usual in WORDS.items()
            if replace(usual, coefficient=self.coefficient) == self
        )
        return word if usual == self else f"{word}:{self.coefficient:g}"

    @property
    def is_loss(self) -> bool:
        """Whether the rule contributes to the router's gradient."""
        return self.kind in ("aux", "z")

    @property
    def counts_rows(self) -> bool:
        """Whether the rule needs the load of every full row."""
        return self.kind == "aux" and self.unit != "global"

    @property
    def drops(self) -> bool:
        """Whether slots are dropped, a number that is known only after routing."""
        return self.kind == "capacity" and not self.pads

    def capacity(self, seq: int, top_k: int, num_experts: int) -> int:
        """Capacity of one expert, in slots, for a row of `seq` tokens."""
        return math.ceil(self.coefficient * top_k * seq / num_experts)


_UNSET = math.nan  # the capacity factor has no default: it changes what is computed
WORDS: dict[str, Balance] = {
    "aux": Balance("aux", "microbatch", 0.01),
    "aux-seq": Balance("aux", "sequence", 0.0001),
    "aux-global": Balance("aux", "global", 0.01),
    "z": Balance("z", "token", 0.001),
    "bias": Balance("bias", "global", 0.001),
    "capacity": Balance("capacity", "sequence", _UNSET),
    "capacity-position": Balance("capacity", "sequence", _UNSET, keep="position"),
    "capacity-pad": Balance("capacity", "sequence", _UNSET, pads=True),
}
NONE = "none"


def parse(text: str) -> tuple[Balance, ...]:
    """The rules that a text names; no rules for `none`.

    >>> [str(rule) for rule in parse("aux-seq+capacity:1.25")]
    ['aux-seq', 'capacity:1.25']
    """
    if text == NONE:
        return ()
    parts = text.split("+")
    if NONE in parts:
        raise FivefoldError(f"balance {text}: none goes with no other rule; leave it out")
    rules = tuple(_rule(part, text) for part in parts)
    kinds = [(rule.kind, rule.unit) for rule in rules]
    if len(set(kinds)) < len(kinds):
        raise FivefoldError(f"balance {text}: a rule is given twice; give each one once")
    return rules


def _rule(part: str, text: str) -> Balance:
    word, colon, number = part.partition(":")
    if word not in WORDS:
        raise UnknownName("balance rule", word, [*WORDS, NONE])
    usual = WORDS[word]
    if colon:
        return replace(usual, coefficient=_number(number, text))
    if math.isnan(usual.coefficient):
        raise FivefoldError(f"balance {text}: {word} needs its factor, as in {word}:1.25")
    return usual


def _number(number: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise FivefoldError(f"balance {text}: {number!r} must be a number above 0")
    return value


def check(rules: tuple[Balance, ...], shape: Shape) -> None:
    """Refuse rules that do not apply to the model."""
    if rules and shape.moe is None:
        raise FivefoldError(
            f"balance {'+'.join(map(str, rules))}: model {shape.name!r} has no experts; leave "
            "the option out"
        )
    biased = shape.moe is not None and shape.moe.bias
    if not biased and any(rule.kind == "bias" for rule in rules):
        raise FivefoldError(
            f"balance bias: the router of {shape.name!r} has no bias; add --set moe.bias=true"
        )


def rules_of(text: str, shape: Shape, *, asynchronous: bool) -> tuple[Balance, ...]:
    """The rules of a plan; refused where they cannot run."""
    rules = parse(text)
    check(rules, shape)
    if rules and asynchronous:
        raise FivefoldError(
            f"balance {text}: an asynchronous schedule has no step whose tokens could be "
            "counted; choose another schedule, or none"
        )
    return rules
