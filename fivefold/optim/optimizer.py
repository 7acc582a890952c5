"""Optimizers over what a rank owns: what an updater is, and the one that stays on the device.

An updater turns gradients into new weights, and says where its states are, one for every owned
tensor. All of them share torch's own arithmetic, so that a weight is the same to the bit wherever
its states live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fivefold.core.units import UnitRow


Name = Literal["adamw", "sgd"]
# That of Llama 2 (arXiv:2307.09288). With the usual 1e-8, AdamW answers the rounding error of a
# small gradient with a step of the learning rate, and float32 runs soon part at the routers.
ADAM_EPS = 1e-5
MASTER = "master"
# The states of an optimizer by their names here, and by torch's.
STATES: dict[str, dict[str, str]] = {
    "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "sgd": {"momentum": "momentum_buffer"},
}


class OwnedWeight(Protocol):
    """A weight or a flat part of one that begins at element `start`, and its gradient."""

    tensor: Tensor

    @property
    def row(self) -> UnitRow: ...
    @property
    def start(self) -> int: ...
    @property
    def grad(self) -> Tensor: ...


class Kept(Protocol):
    """One state tensor, wherever it lives."""

    def read(self) -> Tensor:
        """In memory the tensor itself; from elsewhere a copy, flat."""
        ...

    def write(self, value: Tensor) -> None:
        """Put other values in its place."""
        ...


class Updater(Protocol):
    """Updates what a rank owns from the gradients there."""

    count: int  # updates done; set it to go on behind so many

    def step(self) -> None:
        """One update of everything."""
        ...

    def set_lr(self, lr: float) -> None:
        """The learning rate of the updates to come."""
        ...

    def states(self) -> dict[str, list[Kept | None]]:
        """By name, one for every owned tensor in their order; None where a weight has no such.

        `master` are float32 copies of narrower weights. All exist from the beginning.
        """
        ...

    def tensors(self) -> list[Tensor]:
        """All that it holds in memory between updates."""
        ...


class InMemory:
    """A state that is a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def read(self) -> Tensor:
        return self.tensor

    def write(self, value: Tensor) -> None:
        self.tensor.copy_(value.view(self.tensor.shape))


def make_optimizer(
    name: Name,
    owned: Sequence[tuple[bool, Tensor]],
    lr: float,
    weight_decay: float,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """An optimizer over (decays, tensor) pairs."""
    groups = [
        {
            "params": [tensor for decays, tensor in owned if decays == wanted],
            "weight_decay": weight_decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    groups = [group for group in groups if group["params"]] or groups[:1]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    # Fused keeps its arithmetic in float32 for bfloat16 weights, on CPU as on CUDA.
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps, fused=True)


def decays(each: OwnedWeight) -> bool:
    """Only matrices decay: norms and biases have no scale to lose."""
    return len(each.row.shape) > 1


def with_states(
    optimizer: torch.optim.Optimizer,
    name: Name,
    values: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor]],
    counts: Tensor,
) -> torch.optim.Optimizer:
    """Give an optimizer the states of these values; `counts` are the updates done, of each."""
    for place, value in enumerate(values):
        state = {theirs: states[ours][place] for ours, theirs in STATES[name].items()}
        if name == "adamw":
            state["step"] = counts[place]
        optimizer.state[value] = state
    return optimizer


class Resident:
    """States, and masters where weights are narrow, stay on the device beside the weights."""

    def __init__(
        self, name: Name, owned: Sequence[OwnedWeight], lr: float, weight_decay: float, master: bool
    ) -> None:
        self.owned = owned
        self.masters = [each.tensor.detach().float() for each in owned] if master else []
        self.values = self.masters or [each.tensor for each in owned]
        self.kept = {
            key: [torch.zeros_like(value, requires_grad=False) for value in self.values]
            for key in STATES[name]
        }
        pairs = [(decays(each), one) for each, one in zip(owned, self.values, strict=True)]
        optimizer = make_optimizer(name, pairs, lr, weight_decay, ADAM_EPS)
        device = self.values[0].device if self.values else None
        self.count, self.counts = 0, torch.zeros(len(self.values), device=device)
        self.optimizer = with_states(optimizer, name, self.values, self.kept, self.counts)

    def step(self) -> None:
        for each, value in zip(self.owned, self.values, strict=True):
            value.grad = each.grad
        self.counts.fill_(self.count)  # it may have been set
        self.optimizer.step()
        self.count += 1
        for each, master in zip(self.owned, self.masters, strict=bool(self.masters)):
            each.tensor.detach().copy_(master)
            master.grad = None

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def states(self) -> dict[str, list[Kept | None]]:
        held = {**self.kept, MASTER: self.masters} if self.masters else self.kept
        return {key: [InMemory(one) for one in tensors] for key, tensors in held.items()}

    def tensors(self) -> list[Tensor]:
        states = [one for state in self.optimizer.state.values() for one in state.values()]
        return [*states, *self.masters]


# The scale of losses in float16, whose small numbers would vanish.
#
# The gradients of a scaled loss are as much larger, and are divided again before anybody looks at
# them. Where one overflows, the step is skipped and the scale halved; after a long while without
# an overflow it is doubled.


_FIRST = 2.0**16
_LEAST = 1.0
_STEPS_TO_GROW = 500


@dataclass
class LossScale:
    """Follows the steps of a training; `dynamic` only in float16."""

    dynamic: bool
    value: float = 1.0
    good_steps: int = 0  # without an overflow, since the scale was changed

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """The scale that a training in this type begins with."""
        return cls(True, _FIRST) if dtype == "float16" else cls(False)

    @property
    def explains_overflow(self) -> bool:
        """Whether a number that is not finite may be the scale's fault."""
        return self.dynamic and self.value > _LEAST

    def update(self, skipped: bool) -> None:
        """Behind a step."""
        if not self.dynamic:
            return
        if skipped:
            self.value, self.good_steps = max(_LEAST, self.value / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == _STEPS_TO_GROW:
            self.value, self.good_steps = self.value * 2, 0
