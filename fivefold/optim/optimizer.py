"""The optimizer step of a rank: torch's optimizers over its shards, and the loss scale of float16.

An updater turns gradients into new weights, and exposes its states, one for every owned tensor, so
that a checkpoint can read and write them. All updaters use torch's own arithmetic: a weight is the
same to the bit whether its states are on the device (`DeviceUpdater`), in host memory, or on disk
(`optim/blockwise.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core.layout import decays
from fivefold.core.plan import OptimizerKind, optimizer_kind

if TYPE_CHECKING:
    from fivefold.core.layout import LocalWeight

# That of Llama 2 (arXiv:2307.09288). With the usual 1e-8, AdamW answers the rounding error of a
# small gradient with a step of the learning rate, and float32 runs soon diverge at the routers.
ADAM_EPS = 1e-5
ADAM_BETAS = (0.9, 0.95)
MASTER = "master"  # the name of float32 copies of weights among the states
_FIRST_SCALE = 2.0**16
_LEAST_SCALE = 1.0
_STEPS_TO_GROW = 500

ParameterGroups = list[dict[str, Any]]


class OwnedWeight(Protocol):
    """A weight, or a flat shard of one that begins at element `start`, and its gradient."""

    tensor: Tensor
    scaled_by_update: bool  # its factor is left to the kernel of the update

    @property
    def row(self) -> LocalWeight: ...
    @property
    def start(self) -> int: ...
    @property
    def grad(self) -> Tensor: ...
    @property
    def factor(self) -> Tensor | None:
        """Pending factor of the gradient, if it is not clipped yet."""


def gradient_for(value: Tensor, weight: OwnedWeight, start: int = 0) -> Tensor:
    """Gradient of a value whose elements begin at `start` of the owned shard; clipped, unless the
    update does that."""
    part = weight.grad.reshape(-1)[start : start + value.numel()]
    gradient = part.to(value.device, value.dtype, non_blocking=True).view(value.shape)
    return (
        gradient if weight.factor is None or weight.scaled_by_update else gradient * weight.factor
    )


def leave_scaling(name: str, owned: Sequence[OwnedWeight], dtype: torch.dtype | None) -> bool:
    """Whether the update kernel of this dtype clips gradients as it reads them, which saves a pass
    over them. Its factor is float32: too coarse for float64."""
    scales = optimizer_kind(name).scales and dtype != torch.float64
    for weight in owned:
        weight.scaled_by_update = scales
    return scales


def has_kernel(scales: bool, device: torch.device | None) -> bool:
    """Whether `optim/adamw_kernel.py` updates weights on this device."""
    return scales and device is not None and device.type == "cuda"


def scale_gradients(optimizer: torch.optim.Optimizer, owned: Sequence[OwnedWeight]) -> None:
    """Set the common factor of the gradients in the next update."""
    if isinstance(optimizer, ScalingAdamW):
        optimizer.multiply(owned[0].factor if owned else None)


class StoredState(Protocol):
    """One state tensor, in memory or in a file."""

    def read(self) -> Tensor:
        """Return the tensor if it is in memory, else a flat copy."""

    def write(self, value: Tensor) -> None:
        """Write its values."""


class Updater(Protocol):
    """Updates the weights that a rank owns from their gradients."""

    count: int  # number of updates so far
    skips: bool  # a step whose factor is not a number changes nothing

    def step(self) -> None:
        """Update all weights once."""

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next updates."""

    def resume_after(self, count: int) -> None:
        """Set the number of earlier updates."""

    def states(self) -> dict[str, list[StoredState | None]]:
        """States by name, one for every owned tensor in order; None if a weight has no such state.

        `master` are float32 copies of narrower weights. All states exist from the beginning.
        """

    def tensors(self) -> list[Tensor]:
        """All tensors that stay in memory between updates."""


class StateInMemory:
    """A state tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def read(self) -> Tensor:
        return self.tensor

    def write(self, value: Tensor) -> None:
        self.tensor.copy_(value.view(self.tensor.shape))


class ScalingAdamW(torch.optim.AdamW):
    """AdamW whose fused kernel divides gradients by `grad_scale` as it reads them, as in torch's
    loss scaling. Computes in float32 for bfloat16 weights."""

    def __init__(self, groups: ParameterGroups, lr: float, eps: float) -> None:
        super().__init__(groups, lr=lr, betas=ADAM_BETAS, eps=eps, fused=True)
        self.grad_scale: Tensor | None = None

    def multiply(self, factor: Tensor | None) -> None:
        """Multiply the gradients of the next updates."""
        self.grad_scale = None if factor is None else factor.reciprocal().float()


def adamw(groups: ParameterGroups, lr: float, eps: float) -> torch.optim.Optimizer:
    """Create AdamW."""
    return ScalingAdamW(groups, lr, eps)


def sgd(groups: ParameterGroups, lr: float, eps: float) -> torch.optim.Optimizer:
    """Create SGD with momentum, which has no epsilon."""
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def make_optimizer(
    name: str,
    owned: Sequence[tuple[bool, Tensor]],
    lr: float,
    weight_decay: float,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Create a torch optimizer over (decayed, tensor) pairs."""
    kind = optimizer_kind(name)
    assert not kind.full_matrices, f"{name} is no torch optimizer over shards"
    groups: ParameterGroups = [
        {
            "params": [tensor for decayed, tensor in owned if decayed == decay],
            "weight_decay": weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    # Optimizers of users may refuse an empty list of tensors, as `torch._foreach_*` does.
    groups = [group for group in groups if group["params"]] or groups[:1]
    return kind.make(groups, lr, eps)


def with_states(
    optimizer: torch.optim.Optimizer,
    name: str,
    values: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor]],
    counts: Tensor,
) -> torch.optim.Optimizer:
    """Set the states of these values in a torch optimizer, and the number of updates of each."""
    kind = optimizer_kind(name)
    for index, value in enumerate(values):
        state = {in_torch: states[key][index] for key, in_torch in kind.states.items()}
        if kind.counts_steps:
            state["step"] = counts[index]
        optimizer.state[value] = state
    return optimizer


def require_planned_states(
    optimizer: torch.optim.Optimizer, kind: OptimizerKind, values: Sequence[Tensor]
) -> None:
    """Refuse an optimizer with states that it did not declare: they would be in no plan and in no
    checkpoint."""
    planned = {*kind.states.values(), *(("step",) if kind.counts_steps else ())}
    for value in values:
        state: Mapping[str, Any] = optimizer.state.get(value, {})
        if other := [name for name in state if name not in planned]:
            raise FivefoldError(
                f"optimizer {kind.factory} made the state {other[0]!r}, which `states` of its "
                "class does not name: name it there, or set counts_steps = True for a tensor step"
            )


class DeviceUpdater:
    """Updater with states, and float32 masters of narrow weights, on the device."""

    def __init__(
        self,
        name: str,
        owned: Sequence[OwnedWeight],
        lr: float,
        weight_decay: float,
        master: bool,
    ) -> None:
        self.owned, self.kind = owned, optimizer_kind(name)
        self.masters = [weight.tensor.detach().float() for weight in owned] if master else []
        self.values = self.masters or [weight.tensor for weight in owned]
        self.moments = {
            key: [torch.zeros_like(value, requires_grad=False) for value in self.values]
            for key in self.kind.states
        }
        pairs = [
            (decays(weight.row.role), tensor)
            for weight, tensor in zip(owned, self.values, strict=True)
        ]
        optimizer = make_optimizer(name, pairs, lr, weight_decay, ADAM_EPS)
        device = self.values[0].device if self.values else None
        self.count, self.counts = 0, torch.zeros(len(self.values), device=device)
        self.optimizer = with_states(optimizer, name, self.values, self.moments, self.counts)
        self.scales = leave_scaling(name, owned, self.values[0].dtype if owned else None)
        self.skips = self.kernel = has_kernel(self.scales, device)
        self.weight_decay = weight_decay

    def step(self) -> None:
        if self.kernel:
            self._run_kernel()
        else:
            self._run_torch()
        self.count += 1

    def _run_torch(self) -> None:
        for weight, value in zip(self.owned, self.values, strict=True):
            value.grad = gradient_for(value, weight)
        if self.scales:
            scale_gradients(self.optimizer, self.owned)
        self.counts.fill_(self.count)
        self.optimizer.step()
        if not self.count:
            require_planned_states(self.optimizer, self.kind, self.values)
        for weight, master in zip(self.owned, self.masters, strict=bool(self.masters)):
            weight.tensor.detach().copy_(master)
            master.grad = None

    def _run_kernel(self) -> None:
        """By our own kernel, which reads gradients as they are and writes narrow weights too."""
        from fivefold.optim.adamw_kernel import AdamwKernel  # Triton is there only with CUDA

        factor, lr = self.owned[0].factor, self.optimizer.param_groups[0]["lr"]
        numbers = (lr, self.count + 1, ADAM_BETAS, ADAM_EPS)
        kernel = AdamwKernel(factor, self.values[0].device, *numbers)
        grads = [weight.grad for weight in self.owned]
        decay_rates = [
            self.weight_decay if decays(weight.row.role) else 0.0 for weight in self.owned
        ]
        narrow = [weight.tensor for weight in self.owned] if self.masters else []
        kernel.update_all(self.values, grads, [*self.moments.values()], decay_rates, narrow)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def resume_after(self, count: int) -> None:
        self.count = count

    def states(self) -> dict[str, list[StoredState | None]]:
        state_tensors = {**self.moments, MASTER: self.masters} if self.masters else self.moments
        return {
            key: [StateInMemory(tensor) for tensor in tensors]
            for key, tensors in state_tensors.items()
        }

    def tensors(self) -> list[Tensor]:
        states = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return [*states, *self.masters]


@dataclass
class LossScale:
    """Loss scaling of float16, whose smallest gradients would underflow; 1 for other dtypes.

    The loss is multiplied by `value`, and gradients are divided by it before they are used. A step
    with an overflow is skipped and halves the scale; 500 steps without one double it.
    """

    dynamic: bool
    value: float = 1.0
    good_steps: int = 0  # without an overflow, since the scale was changed

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """Initial scale in this dtype."""
        return cls(True, _FIRST_SCALE) if dtype == "float16" else cls(False)

    @property
    def explains_overflow(self) -> bool:
        """Whether the scale may cause numbers that are not finite."""
        return self.dynamic and self.value > _LEAST_SCALE

    def update(self, skipped: bool) -> None:
        """Adjust the scale after a step."""
        if not self.dynamic:
            return
        if skipped:
            self.value, self.good_steps = max(_LEAST_SCALE, self.value / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == _STEPS_TO_GROW:
            self.value, self.good_steps = self.value * 2, 0
