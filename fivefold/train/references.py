"""What the runs of `train --check` do besides training: all of them sketch their gradients, and the
second of one process sums in another order.

The sketch of a weight's gradient G is L·G·R, where L and R have few rows and columns of random
signs. It is linear, so that the sketches of all shards add up to that of the full gradient, in any
layout, and only 64 numbers a tensor travel. The norm of the difference of two sketches is that of
the gradients within some tens of percent: a scale that is wrong by 1e-3 shows as 1e-3, and so does
a shard that is wrong or at the wrong place.

A layout adds the same terms in another order: matmuls are split along their sums, have other sizes
and so other kernels; tokens, microbatches, heads, the vocabulary and the gradient norm are summed
in parts. `ReorderedSums` does the same to one process in forward and backward: it splits the sum of
every matmul, and rounds every other sum once, after adding in a wider type. The distance of that
run from the plain one is what rounding explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fivefold.core.boxes import Box, boxes_of
from fivefold.core.weights import Weight
from fivefold.parallel.compose import Job
from fivefold.step import StepWatch
from fivefold.train.state import Progress, Sketch, TrainedRank

STEPS = 3  # whose gradients are compared: rounding errors grow from update to update
_SIGNS = 8  # rows of L, and columns of R


class GradientSketches:
    """Watches the steps of a rank, and keeps sketches of its share of the gradients."""

    def __init__(
        self, job: Job, progress: Progress, result: TrainedRank, watch: StepWatch | None
    ) -> None:
        """`result` gets them, by step; `watch` is asked and told as without this."""
        self.job, self.progress, self.result, self.watch = job, progress, result, watch
        self.projections: dict[str, Projection] = {}

    def before_update(self) -> Tensor:
        """As `StepWatch` has it; gradients are summed over the ranks, and not yet clipped."""
        number = self.progress.step + 1
        if number <= STEPS:
            self.result.sketches[number] = self._sketch()  # again if the step runs twice
        device = self.job.mesh.device
        none = torch.zeros(2, dtype=torch.float64, device=device)
        return none if self.watch is None else self.watch.before_update()

    def after_update(self) -> None:
        """As `StepWatch` has it."""
        if self.watch is not None:
            self.watch.after_update()

    def _sketch(self) -> dict[str, Sketch]:
        """What this rank adds to the sketch of each gradient: what several have counts once."""
        found: dict[str, Sketch] = {}
        for each in self.job.owned:
            weight, shard = self.job.table[each.row.name], self.job.shards[each.row.name]
            stop = each.start + each.grad.numel()
            boxes = boxes_of(weight.shape, shard, each.row.shape, each.start, stop)
            if weight.name not in self.projections:
                self.projections[weight.name] = Projection(weight, self.job.mesh.device)
            share = 1 / (self.job.copies(each) * self.progress.scale.value)
            part = share * self.projections[weight.name].of(each.grad, boxes)
            before = found.get(weight.name, 0.0)
            found[weight.name] = part.cpu().numpy() + before  # one of a tied weight on two stages
        return found


class Projection:
    """Random signs for the rows and columns of a weight, the same on every rank."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(crc32(weight.name.encode()))
        *outer, width = weight.shape
        self.rows, self.columns = (
            (torch.randint(0, 2, size, generator=generator) * 2.0 - 1).to(device, torch.float64)
            for size in ((_SIGNS, *outer), (width, _SIGNS))
        )

    def of(self, gradient: Tensor, boxes: tuple[Box, ...]) -> Tensor:
        """The sketch of a gradient that is zero outside these boxes."""
        total = self.rows.new_zeros(_SIGNS, _SIGNS)
        flat = gradient.reshape(-1).to(self.rows.device)
        for box in boxes:
            *outer, (low, high) = (
                (low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)
            )
            rows = self.rows[(slice(None), *(slice(*each) for each in outer))].reshape(_SIGNS, -1)
            values = flat[box.at : box.at + box.numel].view(-1, high - low).to(torch.float64)
            total += rows @ (values @ self.columns[low:high])
        return total / _SIGNS


_MATMULS = ("mm", "bmm", "addmm", "addmm_", "baddbmm", "_grouped_mm")
_SUMS = (
    *("sum", "mean", "linalg_vector_norm", "_foreach_norm", "scatter_add"),
    *("_softmax", "_safe_softmax", "_log_softmax", "nll_loss_forward"),
    *("_softmax_backward_data", "_log_softmax_backward_data", "embedding_dense_backward"),
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


class ReorderedSums(TorchDispatchMode):
    """While it is on, operators that sum do so in another order; nothing is compiled then."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name in _MATMULS:
            return _split_matmul(func, name, args, kwargs)
        return _wide(func, args, kwargs) if name in _SUMS else func(*args, **kwargs)


def _split_matmul(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A matmul whose sum is split in two, at no multiple of what kernels add in a row."""
    num_added = 1 if "add" in name else 0
    added, (a, b), options = args[:num_added], args[num_added:][:2], args[num_added + 2 :]
    cut = a.shape[-1] * 3 // 7
    cut -= cut % 8 if cut > 8 else 0  # kernels of GPUs want 16 bytes
    by_group = name == "_grouped_mm" and b.dim() == 2  # the sum is over the tokens of each expert
    if cut == 0 or by_group:
        return func(*args, **kwargs)
    first, second = (a[..., :cut], b[..., :cut, :]), (a[..., cut:], b[..., cut:, :])
    total = func(*added, *first, *options, **kwargs)
    if added:
        product = torch.bmm if a.dim() == 3 else torch.mm
        wide = {} if total.dtype == a.dtype else {"out_dtype": total.dtype}
        return total.add_(product(*second, **wide), alpha=kwargs.get("alpha", 1))
    other = {"out": torch.empty_like(total)} if "out" in kwargs else {}
    return total.add_(func(*second, *options, **{**kwargs, **other}))


def _wide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A sum of float32 that is added in float64, and rounded. Of narrower types the matmuls are
    enough: every operator rounds them far more coarsely than it adds."""
    if "out" in kwargs or kwargs.get("dtype") == torch.float64:
        return func(*args, **kwargs)
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    if {each.dtype for each in tensors if each.is_floating_point()} != {torch.float32}:
        return func(*args, **kwargs)
    widen = partial(_cast, source=torch.float32, target=torch.float64)
    narrow = partial(_cast, source=torch.float64, target=torch.float32)
    wide_args, wide_kwargs = tree_map(widen, (args, dict(kwargs)))
    return tree_map(narrow, func(*wide_args, **wide_kwargs))


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """A tensor of one type in another, or that type itself among the arguments."""
    if isinstance(value, Tensor):
        return value.to(target) if value.dtype == source else value
    return target if value is source else value
