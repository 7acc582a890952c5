"""The operators of a forward, and the tensors that they make, save and free.

An `OperatorList` is a value: `cost/layer/operators.py` writes it, `cost/layer/operator_tape.py`
plays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Gathers = Literal["", "input", "gradient"]


@dataclass(eq=False)
class TapeTensor:
    """The result of an operator. A view has the memory of its `base`. One that is `remade` is not
    saved, but made again, from its `source` if that may be one as well."""

    bytes: float
    base: TapeTensor | None = None
    logits: bool = False
    remade: bool = False
    source: TapeTensor | None = None
    extra: float = 0.0  # bytes besides, while it is made
    named: bool = False  # a name holds it until the forward of its module ends
    gradient: float | None = None  # bytes of its gradient, if these are others
    adds: bool = False  # what made it takes the gradients of all who read it, and adds them

    @property
    def gradient_bytes(self) -> float:
        return self.bytes if self.gradient is None else self.gradient

    @property
    def storage(self) -> TapeTensor:
        return self if self.base is None else self.base.storage


@dataclass(eq=False)
class Operator:
    """`inputs` are those that get a gradient; a `passes` operator gives them that of its output."""

    inputs: tuple[TapeTensor, ...]
    output: TapeTensor
    saved: tuple[TapeTensor, ...] = ()
    weights: tuple[str, ...] = ()
    passes: bool = False
    holds: TapeTensor | None = None  # for those that make its output again
    backward_extra: float = 0.0  # bytes besides, while its backward runs
    settle_extra: float = 0.0  # and while its weight gradient does
    keeps: float = 0.0  # bytes that it saves besides
    defers: float = 0.0  # and what of that is left for its weight gradients
    early: bool = False  # they are its gradients, which its forward makes
    extra_outputs: tuple[TapeTensor, ...] = ()  # further outputs
    gathered: float = 0.0  # bytes of all tokens that its backward gathers
    gathers: Gathers = ""  # of what: deferred weight gradients need that, not this rank's tokens
    weights_last: bool = False  # its weight gradients come after those of its inputs
    codes: float = 0.0  # bytes that stand for the gradient of its outputs in deferred ones
    dequantised: float = 0.0  # bytes of operands that its weight gradients make from codes
    rounded: float = 0.0  # of weights, for the gradients of its inputs: gone before other gradients
    collective: bool = False  # it is one, or has some inside
    module: str = ""  # which may run again as a whole
    block: int = 0
    retains: float | None = None  # bytes beside outputs, of attention that may run once

    @property
    def saves(self) -> bool:
        """Whether its backward reads what its forward has saved: tensors, or codes of them."""
        return bool(self.saved or self.codes or self.dequantised)

    @property
    def outputs(self) -> tuple[TapeTensor, ...]:
        return (self.output, *self.extra_outputs)


@dataclass
class OperatorList:
    """The operators of a forward, in order."""

    input: TapeTensor
    operators: list[Operator] = field(default_factory=list[Operator])
    module: str = ""  # of the operators that follow
    block: int = 0
    rounds: bool = False  # linears of the layer that follows are rounded to fp8

    @property
    def output(self) -> TapeTensor:
        return self.operators[-1].output

    def begin(self, module: str, block: int, rounds: bool | None = None) -> None:
        """The operators that follow are of this module of a block; "" is the block itself."""
        self.module, self.block = module, block
        self.rounds = self.rounds if rounds is None else rounds

    def add(
        self,
        inputs: Sequence[TapeTensor],
        output: TapeTensor,
        saved: Sequence[TapeTensor] = (),
        weights: str | Sequence[str] = "",
        passes: bool = False,
        backward_extra: float = 0.0,
        settle_extra: float = 0.0,
        keeps: float = 0.0,
        defers: float = 0.0,
        holds: TapeTensor | None = None,
        collective: bool = False,
        early: bool = False,
        extra_outputs: Sequence[TapeTensor] = (),
        gathered: float = 0.0,
        gathers: Gathers = "",
        weights_last: bool = False,
        codes: float = 0.0,
        dequantised: float = 0.0,
        rounded: float = 0.0,
        retains: float | None = None,
    ) -> TapeTensor:
        """Append an operator; its output."""
        names = tuple(filter(None, [weights] if isinstance(weights, str) else weights))
        options = (names, passes, holds, backward_extra, settle_extra, keeps, defers, early)
        options = (
            *options,
            tuple(extra_outputs),
            gathered,
            gathers,
            weights_last,
            codes,
            dequantised,
            rounded,
            collective,
            self.module,
            self.block,
            retains,
        )
        self.operators.append(Operator(tuple(inputs), output, tuple(saved), *options))
        return output
