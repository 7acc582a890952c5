"""The reference of `verify`: the plain model on one device, full batches, torch's own parts.

It shares the model's blocks and the initial values with the ranks and nothing else: no line of
`parallel/` or `step.py` runs here, the loss, the clipping and the optimizers are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fivefold.core.layout import Fp8, Weight, by_name, decays
from fivefold.core.model import ADAPTER, Balance, Shape
from fivefold.core.plan import OPTIMIZERS
from fivefold.model import (
    NOT_COUNTED,
    Decoder,
    LocalRows,
    ReorderedSums,
    TokenBatch,
    attach_balancers,
    from_config,
    init_weights,
    initial_weight,
    look_ahead,
    moe_layers,
    update_balance,
)
from fivefold.verify import compare
from fivefold.verify.fp8_reference import Codes, ExpertCodes, ReferenceFp8

Arrays = dict[str, NDArray[np.floating]]

# With its usual 1e-8, AdamW answers the rounding error of a small gradient with a full step of the
# learning rate, and no tolerance could be derived. Both sides of a comparison use this one.
ADAM_EPS = 1e-2
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
MAX_NORM = 0.5
CUTS = (3 / 7, 5 / 8)  # of sums: where terms nearly cancel, one draw of rounding is often small


@dataclass(frozen=True)
class Truth:
    """Results of one step on one device: numbers, gradients before clipping, new weights and router
    biases."""

    loss: float
    norm: float
    clip: float
    gradients: Arrays
    weights: Arrays
    biases: Arrays = field(default_factory=dict)  # of loss-free balancing, after the step
    codes: Codes = field(default_factory=dict)  # of everything that was rounded to fp8, but
    rows: ExpertCodes | None = None  # what routed experts read
    slots: list[NDArray[np.floating]] = field(default_factory=list)  # of experts, by layer
    floor: dict[str, float] = field(default_factory=dict)  # by kind of error, what rounding does


def measure_floors(truths: Sequence[Truth], reordered: Sequence[Truth]) -> list[Truth]:
    """Add rounding floors to the results: errors of the same steps with sums in another order.

    A single number may agree by chance. The norm cannot be farther off than the gradients as a
    whole, and the loss is about as far off: both get this distance at least. A token that went to
    other experts is no rounding error: steps from there on say nothing.
    """
    results: list[Truth] = []
    for truth, other in zip(truths, reordered, strict=True):
        if any((a != b).any() for a, b in zip(truth.slots, other.slots, strict=True)):
            break
        together = compare.distance(truth.gradients, other.gradients)
        apart = {
            name: compare.relative(getattr(other, name), getattr(truth, name))
            for name in ("loss", "norm", "clip")
        }
        updated = ({**step.weights, **step.biases} for step in (truth, other))
        floor = {
            "grad_err": compare.largest_error(truth.gradients, other.gradients),
            "weight_err": compare.largest_error(*updated),
            **{f"{name}_err": max(error, together) for name, error in apart.items()},
        }
        largest = {kind: max(error, truth.floor.get(kind, 0.0)) for kind, error in floor.items()}
        results.append(replace(truth, floor=largest))
    return [*results, *truths[len(results) :]]


def truths(
    shape: Shape,
    batches: Iterable[TokenBatch],
    optimizer: str,
    seed: int,
    dtype: torch.dtype,
    say: Callable[[str], None],
    rules: Sequence[Balance] = (),
    rows_in_microbatch: int | None = None,
    device: torch.device | str = "cpu",
    fp8: Fp8 | None = None,
    narrow: Sequence[Sequence[TokenBatch]] = (),
    cut: float | None = None,
) -> list[Truth]:
    """Run one step for each full batch, from the seed's initial values.

    Rules that count by microbatch need to know how many rows make one, and so does fp8. `narrow`
    are the microbatches of each step, if their gradients are to be summed in bfloat16. A `cut`
    is the share of the terms after which forward and backward split their sums.
    """
    say("build")
    model, updater = _built(shape, optimizer, seed, dtype, device)
    rounding = None if fp8 is None else ReferenceFp8(fp8, rows_in_microbatch or 1)
    if rounding is not None:
        rounding.attach(model)
    batches = list(batches)
    rows = LocalRows(batches[0].tokens.numel(), rows_in_unit=rows_in_microbatch)
    balancers = attach_balancers(model, rules, device, rows)
    results: list[Truth] = []
    for number, batch in enumerate(batches):
        say(f"step {number + 1}")
        truth = _step(model, updater, batch, narrow[number] if narrow else None, cut)
        slots = [balancers[layer].take()[0] for layer, _ in moe_layers(model)]
        for (layer, mlp), counts_E in zip(moe_layers(model), slots, strict=True):
            update_balance(mlp, balancers[layer], rules, counts_E)
        if rounding is not None:
            truth = replace(truth, codes=rounding.take(), rows=rounding.take_rows())
        biases = {name: as_array(bias) for name, bias in model.named_buffers()}  # just updated
        results.append(
            replace(truth, biases=biases, slots=[as_array(counts_E) for counts_E in slots])
        )
    return results


@dataclass(frozen=True)
class Delayed:
    """Weight delays of an asynchronous pipeline, by stage.

    Every `every` microbatches each stage updates. Stage s computes microbatch k on the weights of
    max(0, k // every − late[s]) updates, as PipeDream and PipeDream-2BW are published.
    """

    stages: Sequence[range]
    every: int
    late: Sequence[int]

    def stage_of(self, name: str) -> int:
        """Stage of a weight, by its name."""
        first, _, tail = name.partition(".")
        if first != "blocks":
            return 0 if first == "embed" else len(self.stages) - 1
        layer = int(tail.partition(".")[0])
        return next(stage for stage, layers in enumerate(self.stages) if layer in layers)


def delayed_truths(
    shape: Shape,
    microbatches: Sequence[TokenBatch],
    delayed: Delayed,
    optimizer: str,
    seed: int,
    dtype: torch.dtype,
    say: Callable[[str], None],
    device: torch.device | str = "cpu",
    narrow: bool = False,
    cut: float | None = None,
) -> list[Truth]:
    """Results of an asynchronous pipeline, emulated by one process that keeps every version of the
    weights.

    `narrow`: the gradients of microbatches are summed in bfloat16.
    """
    say("build")
    model, updater = _built(shape, optimizer, seed, dtype, device)
    balancers = attach_balancers(model, (), device)  # which count the slots of experts
    named = dict(model.named_parameters())
    versions = [{name: weight.detach().clone() for name, weight in named.items()}]
    results: list[Truth] = []
    for start in range(0, len(microbatches), delayed.every):
        say(f"update {start // delayed.every + 1}")
        window = microbatches[start : start + delayed.every]
        tokens = torch.stack([(batch.labels != NOT_COUNTED).sum() for batch in window]).sum()
        updater.zero_grad()
        for name, parameter in named.items():
            late = delayed.late[delayed.stage_of(name)]
            parameter.data.copy_(versions[max(0, len(versions) - 1 - late)][name])
        total = _sum_gradients(model, window, tokens.clamp(min=1), narrow, cut)
        for name, parameter in named.items():
            parameter.data.copy_(versions[-1][name])
        truth = _updated(model, updater, total, cut is not None)
        slots = [as_array(balancers[layer].take()[0]) for layer, _ in moe_layers(model)]
        results.append(replace(truth, slots=slots))
        versions.append({name: weight.detach().clone() for name, weight in named.items()})
    return results


def first_weight(weight: Weight, shape: Shape, *args: Any, **options: Any) -> Tensor:
    """Initial value of a weight on both sides of a comparison. Adapters are initialized as if
    trained: where the second factor is 0, the first has no gradient."""
    if weight.name.endswith(f"{ADAPTER}b"):
        weight = replace(weight, name=f"{weight.name}.learned")
    return initial_weight(weight, shape, *args, **options)


def _built(
    shape: Shape,
    optimizer: str,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Decoder, torch.optim.Optimizer]:
    model = from_config(shape, dtype=dtype, device=device)
    init_weights(model, shape, seed, first_weight)
    assert model.head is not None
    model.head.cross_entropy, model.head.chunked = _cross_entropy, None
    return model, _optimizer(optimizer, model)


def _updated(
    model: Decoder,
    updater: torch.optim.Optimizer,
    loss: float,
    reordered: bool,
    max_norm: float = math.inf,
) -> Truth:
    """An update, with gradients clipped to a norm, whose squares may be summed in another order."""
    learned = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    gradients = {name: as_array(parameter.grad) for name, parameter in learned.items()}
    grads = [parameter.grad for parameter in learned.values() if parameter.grad is not None]
    # Torch adds the squares of a tensor one after another, eight at a time. Of a million elements
    # that is wrong by 20 eps, and shards of ranks are shorter: the rounding of this sum counts too.
    total = _pairwise_norm(grads) if reordered else nn.utils.get_total_norm(grads)
    nn.utils.clip_grads_with_norm_(learned.values(), max_norm, total)
    norm = float(total)
    updater.step()
    weights = {name: as_array(parameter) for name, parameter in model.named_parameters()}
    biases = {name: as_array(bias) for name, bias in model.named_buffers()}
    return Truth(loss, norm, min(1.0, max_norm / (norm + 1e-6)), gradients, weights, biases)


def _pairwise_norm(grads: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients, from sums that torch adds in pairs, in float64."""
    return torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()


def _step(
    model: Decoder,
    updater: torch.optim.Optimizer,
    batch: TokenBatch,
    narrow: Sequence[TokenBatch] | None,
    cut: float | None,
) -> Truth:
    updater.zero_grad()
    parts = [look_ahead(part, model.shape.mtp) for part in narrow or [batch]]
    tokens = (batch.labels != NOT_COUNTED).sum().clamp(min=1)
    loss = _sum_gradients(model, parts, tokens, narrow is not None, cut)
    return _updated(model, updater, loss, cut is not None, MAX_NORM)


def _sum_gradients(
    model: Decoder, batches: Iterable[TokenBatch], tokens: Tensor, narrow: bool, cut: float | None
) -> float:
    """The loss of all batches together, and its gradients. If they are `narrow`, those of each
    batch are rounded to bfloat16, and so is every sum."""
    total, learned = 0.0, [weight for weight in model.parameters() if weight.requires_grad]
    sums = [torch.zeros_like(weight, dtype=torch.bfloat16) for weight in learned if narrow]
    for batch in batches:
        with nullcontext() if cut is None else ReorderedSums(cut):
            loss = model(batch.tokens, batch) / tokens
            loss.backward()
        total += float(loss.detach())
        if narrow:
            for summed, weight in zip(sums, learned, strict=True):
                if weight.grad is not None:
                    summed += weight.grad.bfloat16()
            model.zero_grad()
    for weight, summed in zip(learned, sums, strict=narrow):
        weight.grad = summed.to(weight)
    return total


def _cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    if logits_NV.dtype == torch.bfloat16:
        logits_NV = logits_NV.float()
    return F.cross_entropy(logits_NV, labels_N, ignore_index=NOT_COUNTED, reduction="sum")


def _optimizer(name: str, model: Decoder) -> torch.optim.Optimizer:
    """AdamW and SGD are written out; another one is made as the ranks make it."""
    table, learned = by_name(model.shape), model.named_parameters()
    pairs = [
        (decays(table[name].role), parameter)
        for name, parameter in learned
        if parameter.requires_grad
    ]
    groups = [
        {
            "params": [parameter for decayed, parameter in pairs if decayed],
            "weight_decay": WEIGHT_DECAY,
        },
        {"params": [parameter for decayed, parameter in pairs if not decayed], "weight_decay": 0.0},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=ADAM_EPS)
    return OPTIMIZERS[name].make(groups, LEARNING_RATE, ADAM_EPS)


def as_array(tensor: Tensor | None) -> NDArray[np.floating]:
    """Copy to numpy; bfloat16, which numpy lacks, becomes float32."""
    assert tensor is not None
    detached = tensor.detach()
    wide = detached.float() if detached.dtype == torch.bfloat16 else detached.clone()
    return wide.cpu().numpy()
