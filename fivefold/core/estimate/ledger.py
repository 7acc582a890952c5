"""Bytes of one rank at its peak, by category, for every layout of a grid.

A pipeline holds as many microbatches as its schedule keeps in flight. The rank of the first stage
has the embedding and most in flight, that of the head the logits, and one between them may have
more layers: the fullest decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core.count import layer_kinds, layer_parameters, mtp_parameters
from fivefold.core.estimate.activations import Activations
from fivefold.core.estimate.ends import Stage, keeps_all, stages_of
from fivefold.core.estimate.grid import OFFLOADS, Array, Grid
from fivefold.core.estimate.keeps import Cache, Keeps, keeps_of
from fivefold.core.estimate.stack import Stack
from fivefold.core.machine import Machine
from fivefold.core.shape import Shape

Parts = dict[str, Array]
Verdict = Literal["fits", "tight", "does not fit"]
CATEGORIES = (
    "weights",
    "gradients",
    "master",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "prefetch",
    "context",
    "margin",
)
MOMENTS = 8  # bytes of an element: AdamW's two, in float32
# Which parts hang together: sums of each are made before the whole lattice is spanned.
_STILL = ("weights", "gradients", "master", "optimizer", "prefetch")


@dataclass(frozen=True)
class Ledger:
    """The ranks that may be a layout's fullest, from the first to the head's, on the device.

    `reserve` says what the allocator of the first rank holds at its peak.
    """

    ranks: tuple[Parts, ...]
    host: Array  # bytes that offload keeps in host memory
    disk: Array  # and on local disks
    band: float
    reserve: Callable[[], Array]

    @property
    def first(self) -> Parts:
        return self.ranks[0]

    @property
    def last(self) -> Parts:
        return self.ranks[-1]

    @cached_property
    def totals(self) -> tuple[Array, ...]:
        """Bytes of each rank."""
        return tuple(total(parts) for parts in self.ranks)

    @cached_property
    def total(self) -> Array:
        """Bytes of the fullest rank."""
        return reduce(np.maximum, self.totals)

    @cached_property
    def parts(self) -> Parts:
        """Of the fullest rank; they sum to `total`."""
        found = self.first
        for parts, size in zip(self.ranks[1:], self.totals[1:], strict=True):
            fuller = size == self.total
            found = {name: np.where(fuller, parts[name], found[name]) for name in CATEGORIES}
        return found

    @cached_property
    def reserved(self) -> Array:
        """What torch reports on the first rank: its pool, without what lies outside of it."""
        return self.reserve()


def total(parts: Parts) -> Array:
    """All categories together."""
    still = sum((parts[name] for name in _STILL), np.zeros(1))
    moving = sum((parts[name] for name in CATEGORIES if name not in _STILL), np.zeros(1))
    return still + moving


def fits(books: Ledger, machine: Machine) -> NDArray[np.bool_]:
    """Whether each layout is predicted to run."""
    return books.total <= machine.memory


def verdict(books: Ledger, machine: Machine) -> NDArray[np.str_]:
    """Each layout's `Verdict`; tight: no further from the limit than predictions may be off."""
    share = books.total / machine.memory
    sure, lost = share <= 1 - books.band, share > 1 + books.band
    return np.where(sure, "fits", np.where(lost, "does not fit", "tight"))


class Held(NamedTuple):
    """Parameters of one rank."""

    dense: Array  # with the ends
    experts: Array
    ends: Array  # embedding and head

    @property
    def all(self) -> Array:
        return self.dense + self.experts


class Books:
    """What there is to count for one model on one machine under one stack."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        stack: Stack,
        grid: Grid,
        seq: int,
        itemsize: int,
        imbalance: float,
    ) -> None:
        self.shape, self.machine, self.stack, self.grid = shape, machine, stack, grid
        self.keeps: Keeps = keeps_of(stack.name)
        self.itemsize = itemsize
        self.tokens = grid.rows * seq / grid.cp
        self.kept = Activations(shape, stack, self.keeps, grid, seq, itemsize, imbalance)
        self.master_bytes = 0 if itemsize == 4 else self.keeps.master_bytes

    def of(self, stage: Stage) -> Parts:
        """One end of the pipeline, by category, without what the allocator caches."""
        held = self.held_by(stage)
        kept, working = self._layers(stage)
        parts = self._states(held)
        # Logits are gone when the layers' backward begins.
        working = np.maximum(working - stage.head * self._loss(), 0.0)
        parts["activations"] = kept * stage.flight + working + self._at_head(stage)
        parts["logits"] = stage.head * (self._loss() + self._waiting())
        parts["buffers"] = self._buffers()
        parts["prefetch"] = self._prefetch(held, stage)
        parts["context"] = np.full((1,), self.keeps.context_bytes + self.keeps.pool_bytes)
        parts["margin"] = self.keeps.fragments * parts["activations"]
        if self.keeps.backward_bytes:
            live = parts["activations"] + parts["logits"]
            behind = kept * (stage.flight - 1) + self.keeps.backward_bytes * held.all
            parts["gradients"] = parts["gradients"] + np.maximum(behind - live, 0.0)
        return parts

    def held_by(self, stage: Stage) -> Held:
        """Parameters of a stage; norms, routers and latents are whole on every tp rank."""
        shape, tp = self.shape, self.grid.tp
        dense, experts = np.zeros(1), np.zeros(1)
        for i, count in self._counts(stage).items():
            layer = layer_parameters(shape, i)
            dense = dense + count * stage.copies * self._dense(i)
            spread = layer.experts / (self.grid.ep * self.grid.etp)
            experts = experts + count * stage.copies * spread
        if shape.mtp:
            extra = mtp_parameters(shape)
            mtp = (extra.total - extra.experts - extra.norms) / tp + extra.norms
            dense = dense + stage.head * shape.mtp * mtp
            spread = extra.experts / (self.grid.ep * self.grid.etp)
            experts = experts + stage.head * shape.mtp * spread
        matrices = stage.embedding + stage.head
        if shape.tied:
            matrices = np.where(self.grid.pp == 1, 1.0, matrices)
        elif shape.mtp:  # the embedding once more, where the head's stage has none
            matrices = matrices + np.where(self.grid.pp == 1, 0.0, stage.head)
        ends = matrices * shape.vocab * shape.width / tp
        if shape.positions == "learned":
            ends = ends + stage.embedding * shape.max_seq * shape.width
        final = stage.head * shape.width * (2 if shape.norm_bias else 1)
        return Held(dense + ends + final, experts, ends)

    def _dense(self, i: int) -> Array:
        """Parameters of a layer on one rank, but for experts."""
        shape, layer, tp = self.shape, layer_parameters(self.shape, i), self.grid.tp
        whole = layer.norms + layer.router
        if shape.mla is not None:
            whole += shape.width * ((shape.mla.q_rank or 0) + shape.mla.kv_rank)
            whole += shape.width * shape.mla.rope_dim
        keys = 2 * shape.width * shape.head_dim if shape.mla is None else 0
        shared = keys * (np.maximum(shape.kv_heads, tp) - shape.kv_heads)
        return (layer.total - layer.experts - whole + shared) / tp + whole

    def _counts(self, stage: Stage) -> dict[int, Array]:
        """Layers of each kind, by the number of one of them."""
        shape, (layers, routed) = self.shape, stage.layers
        if shape.moe is None:
            return {0: layers}
        kinds = {shape.is_moe_layer(i): i for i in layer_kinds(shape)}
        plain = {kinds[False]: layers - routed} if False in kinds else {}
        return {**plain, kinds[True]: routed}

    def _states(self, held: Held) -> Parts:
        """Weights, gradients, master weights and moments, sliced as the ZeRO stage says."""
        grid, keeps = self.grid, self.keeps
        away = grid.offload > 0
        stays = np.where(away, 0.0, 1.0)
        weights = self._sliced(held, 3) * (keeps.weight_bytes or self.itemsize)
        gone = away & (grid.zero == 3) & (grid.shard * grid.cp > 1)
        gradients = self._sliced(held, 2) * keeps.gradient_bytes
        if keeps.bucket_bytes:
            summed = (grid.zero == 0) & (grid.dp > 1)
            gradients = gradients + np.where(summed, held.all * keeps.bucket_bytes, 0.0)
        owned = self._sliced(held, 1)
        return {
            "weights": np.where(gone, 0.0, weights),
            "gradients": gradients,
            "master": owned * (self.master_bytes * stays),
            "optimizer": owned * (MOMENTS * stays),
        }

    def _sliced(self, held: Held, from_zero: int) -> Array:
        """Parameters of a rank, of a slice of them from this ZeRO stage on."""
        grid = self.grid
        sliced = grid.zero >= from_zero
        dense = held.dense / np.where(sliced, grid.shard * grid.cp, 1.0)
        if self.shape.moe is None:
            return dense
        return dense + held.experts / np.where(sliced, grid.edp, 1.0)

    def host(self, stage: Stage) -> Array:
        """What offload moves to the host: states, and the slices of weights under ZeRO-3. Of states
        that lie on disks, two layers' are there: one that is updated, one on its way."""
        grid, owned = self.grid, self._sliced(self.held_by(stage), 1)
        sliced = (grid.zero == 3) & (grid.shard * grid.cp > 1)
        buffers = np.minimum(2 / np.maximum(stage.layers.all, 1.0), 1.0)
        states = np.where(grid.offload == OFFLOADS.index("nvme"), buffers, 1.0)
        size = states * (MOMENTS + self.master_bytes) + np.where(sliced, self.itemsize, 0.0)
        return np.where(grid.offload > 0, owned * size, 0.0)

    def disk(self, stage: Stage) -> Array:
        """States and master weights that lie on disks."""
        owned = self._sliced(self.held_by(stage), 1)
        there = self.grid.offload == OFFLOADS.index("nvme")
        return np.where(there, owned * (MOMENTS + self.master_bytes), 0.0)

    def _layers(self, stage: Stage) -> tuple[Array, Array]:
        """What a microbatch keeps, and what one layer needs while it runs again."""
        repeat, covered = self.grid.recompute, self.stack.recomputed
        kept, working = np.zeros(1), np.zeros(1)
        counts = self._counts(stage)
        for i, count in counts.items():
            routed = self.shape.is_moe_layer(i)
            extra = self.shape.mtp * stage.head if i == max(counts) else 0.0
            everything = self.kept.everything(routed)
            few = everything
            if (repeat > 0).any():
                few = np.where(repeat == 1, self.kept.selected(routed), everything)
                full = covered * self.kept.inputs() + (1 - covered) * everything
                few = np.where(repeat == 2, full, few)
                again = np.where(repeat == 2, everything, np.maximum(everything - few, 0.0))
                working = np.maximum(working, np.where(repeat > 0, again, 0.0))
            kept = kept + (count + extra) * few
        return kept * self.tokens, (working + self.kept.inside()) * self.tokens

    def _at_head(self, stage: Stage) -> Array:
        """The head's input, and its copies for multi-token prediction."""
        return stage.head * (1 + self.shape.mtp) * self.kept.at_head() * self.tokens

    def _loss(self) -> Array:
        """Logits of the one loss that is computed, and their gradients."""
        return self.keeps.logits_bytes * self.tokens * self.shape.vocab / self.grid.tp

    def _waiting(self) -> Array:
        """What other losses keep until their backward."""
        losses = 1.0 + self.shape.mtp
        if (every := keeps_all(self.grid)).any():
            losses = losses * np.where(every, self.grid.microbatches, 1.0)
        words = self.tokens * self.shape.vocab / self.grid.tp
        return (losses - 1) * self.keeps.loss_bytes * words

    def _prefetch(self, held: Held, stage: Stage) -> Array:
        """ZeRO-3: what is whole at once; from ZeRO-2 on, gradients that are on their way."""
        grid, keeps = self.grid, self.keeps
        sharded = grid.shard * grid.cp > 1
        layer = (held.all - held.ends) / np.maximum(stage.layers.all, 1.0)
        most = np.minimum(stage.layers.all, keeps.whole_layers) * layer
        passing = np.minimum(stage.layers.all, self._passing_layers(stage)) * layer
        if keeps.root:
            most, passing = most + held.ends, passing + held.ends
        else:  # an end is whole in the place of a layer
            most = np.maximum(most, held.ends + layer)
        # A pipeline keeps whole weights over a step: its microbatches lie far apart.
        whole = np.where(grid.pp > 1, held.all, most) * self.itemsize
        size = keeps.gradient_bytes if self.stack.scatters_rounds else keeps.passing_bytes
        flying = np.where((grid.zero >= 2) & sharded, passing * size, 0.0)
        return np.where((grid.zero == 3) & sharded, whole, 0.0) + flying

    def _passing_layers(self, stage: Stage) -> Array | float:
        """Layers with whole gradients: some; or a chunk's that sums, and one's on its way."""
        if not self.stack.scatters_rounds:
            return self.keeps.passing_layers
        return 2 * stage.layers.all / self.grid.chunks

    def _buffers(self) -> Array:
        """Messages of the pipeline, gathered tokens, the ring, and experts' slots."""
        grid, kept = self.grid, self.kept
        found = np.where(grid.pp > 1, 4 * kept.residual, 0.0)
        found = found + np.where(kept.split > 1, self.keeps.gather_buffers * kept.whole, 0.0)
        return (found + kept.of_other_ranks() + kept.between_experts()) * self.tokens


class Allocator:
    """What an allocator holds on top of what is alive at one end."""

    def __init__(self, books: Books, stage: Stage, parts: Parts) -> None:
        self.books, self.stage, self.parts = books, stage, dict(parts)
        self.cache = books.keeps.caches

    def slack(self) -> Array:
        """What a run must have room for."""
        if self.cache is None:
            return np.zeros(1)
        return self._end_gradients(self.cache) + self._pending(self.cache)

    def reserved(self) -> Array:
        """The pool at its peak. Near the limit, cached blocks are given back."""
        outside, cache = self.books.keeps.context_bytes, self.cache
        if cache is None:
            return total(self.parts) - outside
        limit, m = self.books.machine.memory - outside, self.books.grid.microbatches
        need = total(self.parts) - self.parts["margin"] - outside + self._end_gradients(cache)
        loose = need + self._pending(cache) * m / (m + cache.microbatches)
        most = loose + self._gathered(cache)
        return np.maximum(need, np.where(most < limit, most, np.minimum(loose, limit)))

    def _end_gradients(self, cache: Cache) -> Array:
        shape, at_end = self.books.shape, np.maximum(self.stage.embedding, self.stage.head)
        matrix = shape.vocab * shape.width / self.books.grid.tp
        return cache.end_gradients * 2 * matrix * at_end

    def _pending(self, cache: Cache) -> Array:
        """Blocks that the GPU has not passed yet, at most."""
        books, grid, stage = self.books, self.books.grid, self.stage
        held = books.held_by(stage)
        layer = (held.all - held.ends) / np.maximum(stage.layers.all, 1.0)
        work = (2 * books.tokens * layer) ** 2
        ahead = np.where(grid.pp == 2, work / (work + cache.work**2), 1.0)
        blocks = np.minimum(cache.pending, 2 * stage.layers.all * stage.flight)
        blocks = np.where(grid.pp == 1, cache.pending, blocks) * (1 + 2 / grid.tp) * ahead
        found = blocks * books.kept.whole * books.tokens
        live = self.parts["activations"] + self.parts["logits"]
        return np.where(books.kept.split > 1, np.minimum(found, cache.most * live), 0.0)

    def _gathered(self, cache: Cache) -> Array:
        """ZeRO-1: flattened weights of the last step, less the states that came after them."""
        grid, held = self.books.grid, self.books.held_by(self.stage)
        found = cache.gathered * np.maximum(4 - 6 / grid.dp, 0.0) * held.all
        return np.where((grid.zero == 1) & (grid.dp > 1), found, 0.0)


def ledger(
    shape: Shape,
    machine: Machine,
    stack: Stack,
    grid: Grid,
    seq: int,
    precision: str,
    imbalance: float = 1.0,
    spans: Sequence[range] | None = None,
) -> Ledger:
    """The ledger of every layout; `imbalance`: slots of the fullest expert over the mean; `spans`:
    the layers of each stage, where they are given and not as the stack cuts them."""
    itemsize = 4 if precision == "fp32" else 2
    books = Books(shape, machine, stack, grid, seq, itemsize, imbalance)
    stages = stages_of(shape, books.keeps.split, grid, seq, stack.hop_forwards, spans)
    ranks = tuple(books.of(stage) for stage in stages)
    host, disk = np.zeros(1), np.zeros(1)
    if grid.offload.any():
        host = reduce(np.maximum, (books.host(stage) for stage in stages))
        disk = reduce(np.maximum, (books.disk(stage) for stage in stages))
    first = Allocator(books, stages[0], ranks[0])
    for stage, parts in zip(stages, ranks, strict=True):
        parts["margin"] = parts["margin"] + Allocator(books, stage, parts).slack()
    return Ledger(ranks, host, disk, books.keeps.band, first.reserved)
