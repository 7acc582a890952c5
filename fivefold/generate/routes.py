"""The experts that routers have chosen, as a value: made by a generator, replayed in training.

As JSON: `experts` of a layer, the `layers` that have some by their number, and `chosen`, for each
token and each of these layers the experts in the order of their scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

from fivefold.core import BadFile
from fivefold.core.model import Shape

Chosen = tuple[tuple[tuple[int, ...], ...], ...]
"""By token, layer and rank of the choice."""
_WAY_OUT = "give what a generator of this model has recorded"


@dataclass(frozen=True)
class RecordedRoutes:
    """Expert choices for the tokens of one text, from its first one on. The last drawn token has
    none: no forward has read it."""

    experts: int
    layers: tuple[int, ...]
    chosen: Chosen

    def table(self) -> dict[str, Any]:
        """Convert to JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, table: Any, name: str = "routing") -> RecordedRoutes:
        """Parse from JSON."""
        empty: dict[str, Any] = {}
        row = cast("dict[str, Any]", table) if isinstance(table, dict) else empty
        experts, layers, chosen = (row.get(key) for key in ("experts", "layers", "chosen"))
        if not _is_number(experts) or not _is_list(layers, 1) or not _is_list(chosen, 3):
            rule = "expected experts (a number), layers and chosen (lists of numbers, 1 and 3 deep)"
            raise BadFile(name, [f"{rule}: {_WAY_OUT}"])
        return cls(cast(int, experts), tuple(cast("list[int]", layers)), frozen(chosen))

    def check(self, shape: Shape, name: str = "routing") -> None:
        """Refuse choices of another model; lists all problems."""
        if problems := list(self._problems(shape)):
            raise BadFile(name, [f"{problem}: {_WAY_OUT}" for problem in problems])

    def _problems(self, shape: Shape) -> Iterator[str]:
        moe, layers = shape.moe, routed_layers(shape)
        if moe is None:
            yield f"{shape.name} has no experts to choose"
            return
        if unknown := [layer for layer in self.layers if layer not in layers]:
            yield f"layer {unknown[0]} of {shape.name} has no experts"
        elif self.layers != layers:
            yield f"{shape.name} has experts in {len(layers)} layers, not in {len(self.layers)}"
        if self.experts != moe.experts:
            yield f"{shape.name} has {moe.experts} experts, not {self.experts}"
        sizes = {(len(token), len(experts)) for token in self.chosen for experts in token}
        if sizes - {(len(self.layers), moe.top_k)} or not all(self.chosen):
            rule = f"a token of {shape.name} has {moe.top_k} experts in each layer that is named"
            yield f"{rule}, and some token has not"
        every = (expert for token in self.chosen for experts in token for expert in experts)
        wrong = next((expert for expert in every if not 0 <= expert < moe.experts), None)
        if wrong is not None:
            yield f"expert {wrong} is none of 0 to {moe.experts - 1}"
        if any(len(set(experts)) < len(experts) for token in self.chosen for experts in token):
            yield "a token has the same expert twice in a layer"


def frozen(chosen: Any) -> Chosen:
    """Convert nested lists to tuples."""
    listed = cast("list[list[list[int]]]", chosen)
    return tuple(tuple(tuple(experts) for experts in token) for token in listed)


def routed_layers(shape: Shape) -> tuple[int, ...]:
    """Layers with experts, except those of multi-token prediction, which a generator does not
    run."""
    return tuple(layer for layer in shape.moe_layers if layer < shape.layers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any, depth: int) -> bool:
    if not isinstance(value, list | tuple):
        return False
    items = cast("list[Any]", value)
    return all(_is_list(item, depth - 1) if depth > 1 else _is_number(item) for item in items)
