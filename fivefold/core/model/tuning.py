"""Which weights learn: low-rank adapters (LoRA) beside frozen linears, and named parts of a model.

A linear with an adapter computes W·x + (alpha / rank)·B·(A·x). W is frozen; A (rank × inputs) and B
(outputs × rank) learn. `core/layout/weight_table.py` lists both beside W, as `NAME.lora.a` and
`NAME.lora.b`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

ADAPTER = ".lora."  # in the names of adapters, between that of the linear and a or b
ALL = "all"
LINEARS = ("q", "k", "v", "out", "q_down", "q_up", "kv_down", "kv_up", "gate", "up", "down")
"""The linears of attention and MLPs, experts included, by the last part of their names."""
PEFT_NAMES = {
    **{"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"},
    **{"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
}
"""Names of linears as Hugging Face and PEFT write them."""


@dataclass(frozen=True)
class Tuning:
    """What learns of a model: the adapters of `targets`, and the weights that `train_only` names.

    Both are parts of names joined with `+`: `attention+mlp.down`. Without a rank there are no
    adapters.
    """

    rank: int = 0
    alpha: float = 0.0
    targets: str = ALL
    train_only: str = ""

    @property
    def scale(self) -> float:
        """What the output of an adapter is multiplied by."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Whether the linear of this weight has an adapter."""
        linear, _, kind = name.rpartition(".")
        if not self.rank or kind != "weight" or linear.rpartition(".")[2] not in LINEARS:
            return False
        return self.targets == ALL or any(matches(part, linear) for part in parts_of(self.targets))

    def learns(self, name: str) -> bool:
        """Whether a weight learns; adapters always do."""
        return ADAPTER in name or any(matches(part, name) for part in parts_of(self.train_only))


def parts_of(text: str) -> tuple[str, ...]:
    """The parts that a key joins with `+`, linears under our names.

    >>> parts_of("q_proj + mlp.down")
    ('q', 'mlp.down')
    """
    parts = [part.strip() for part in text.split("+") if part.strip()]
    return tuple(PEFT_NAMES.get(part, part) for part in parts)


def matches(part: str, name: str) -> bool:
    """Whether a part names a weight: its words are words of the name, one after another, and `*`
    stands for any characters of a word.

    >>> matches("mlp.down", "blocks.0.mlp.down.weight"), matches("*norm", "blocks.0.mlp_norm.bias")
    (True, True)
    >>> matches("down", "blocks.0.attention.q_down.weight")
    False
    """
    pattern, names = part.split("."), name.split(".")
    starts = range(len(names) - len(pattern) + 1)
    return any(
        all(fnmatchcase(word, like) for word, like in zip(names[start:], pattern, strict=False))
        for start in starts
    )


def unmatched(text: str, names: Iterable[str]) -> list[str]:
    """The parts that name nothing."""
    names = list(names)
    return [part for part in parts_of(text) if not any(matches(part, name) for name in names)]
