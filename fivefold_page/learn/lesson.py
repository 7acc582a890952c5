"""The lessons of the page: each panel explains one thing with a small example to change.

Here is what the panels share: the choices of the reader, and how sizes and sentences are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fivefold.core import UnknownName, counted
from fivefold.core.layout import Layout
from fivefold.render import wrapped
from fivefold_page import Params, View


@dataclass(frozen=True)
class Choice:
    """One input of a panel: its label, its values in order, and the default."""

    label: str
    values: tuple[str, ...]
    default: str

    def __post_init__(self) -> None:
        assert self.default in self.values, f"{self.default} is none of {self.values}"


def chosen(choices: Mapping[str, Choice], params: Params) -> dict[str, str]:
    """The value of every choice: the given one or the default; unknown values are refused."""
    for name, value in params.items():
        if name not in choices:
            raise UnknownName("choice", name, choices)
        if value not in choices[name].values:
            raise UnknownName(f"{name} of the panel", value, choices[name].values)
    return {name: params.get(name, choice.default) for name, choice in choices.items()}


# The groups of the list of collectives, in words.
GROUPS: Mapping[str, str] = {
    "tp": "tensor ranks",
    "pp": "neighbours",
    "ring": "context ranks",
    "ulysses": "context ranks",
    "ep": "expert ranks",
    "ep-near": "expert ranks of a node",
    "ep-far": "expert ranks of other nodes",
    "etp": "ranks of one expert",
    "edp": "expert copies",
    "fsdp": "ZeRO ranks",
    "dp-cp": "data and context ranks",
    "replicate": "replicas of a shard",
    "replica": "copies of a KV head",
    "row": "ranks of a sequence",
    "scale": "ranks of one scale",
    "twin": "two stages of one weight",
    "world": "all ranks",
}


def rank_sentences(layout: Layout) -> list[str]:
    """How many ranks a layout has, and where its experts are."""
    sentences = [
        f"Ranks: dp {layout.dp} · cp {layout.cp} · tp {layout.tp} · pp {layout.pp} = "
        f"{layout.world}. The experts of a stage are shared by {layout.ep * layout.etp} of its "
        f"{layout.stage_size} ranks, so that each expert is stored "
        f"{'once' if layout.edp == 1 else f'{layout.edp} times'}."
    ]
    product = layout.textbook()
    if product is not None and layout.ep > 1:
        sentences.append(
            "Textbooks count ep as a factor and divide dp by it: "
            f"{' · '.join(map(str, product))} (dp, tp, pp, cp, ep) = "
            f"{counted(layout.world, 'rank')}, the same ones."
        )
    return sentences


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(size: float) -> str:
    """Bytes in the unit that fits, as the page writes them.

    >>> size_text(512), size_text(3 * 2**19), size_text(2**40)
    ('512 B', '1.5 MiB', '1.0 TiB')
    """
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.1f} {_UNITS[unit]}" if unit else f"{size:,.0f} B"


def sentence_lines(view: View, bullet: str = "") -> list[str]:
    """The sentences of a panel for a terminal."""
    return [line for sentence in view["sentences"] for line in wrapped(sentence, bullet)]
