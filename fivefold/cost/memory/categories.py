"""Peak memory of the fullest rank, by category, for every layout of a grid.

The rank of the first stage has the embedding and the most microbatches in flight, the rank of the
head has the logits, and a rank between them may have more layers. The fullest of them, at its peak,
decides whether a layout fits.

Peak memory of one pipeline rank by category, for every layout of a grid.

Weights, gradients, master weights and optimizer states follow the ZeRO stage. Activations follow
the microbatches in flight, logits the head, buffers the collectives. A stack that allocates
gradients unit by unit has several moments that may be its peak; other stacks have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.core import PRECISIONS, Machine, itemsize_of, matmul_bytes
from fivefold.core.layout import ulysses_degree
from fivefold.core.model import Shape, layer_parameters, most_routed, mtp_parameters
from fivefold.cost import CONTEXTS, OFFLOADS, Array, LayoutGrid, expert_nodes
from fivefold.cost.hardware import LAUNCH_QUEUE, AllocatorCache, SoftwareStack, StackMemory
from fivefold.cost.layer import (
    codes_under_way,
    replicated_weights,
    rounded_weights,
    trainable_share,
)
from fivefold.cost.memory.activations import Activations
from fivefold.cost.memory.communicators import Channels, degrees_bytes, has_nccl
from fivefold.cost.memory.stage_gradients import (
    GradientLevel,
    LeastBytes,
    LossMemory,
    RankParameters,
    SavedLayers,
    StageGradients,
    UnitParameters,
    layer_numbers,
    sums_of_copies,
)
from fivefold.cost.stages import (
    RankStage,
    backward_by_chunk,
    fewest_layers,
    folded,
    mirrored,
    rank_stages,
)

MemoryParts = dict[str, Array]
MUON_STATE = 4  # bytes: the momentum of an element of a matrix


class MemoryEntries:
    """Counts the bytes of one model on one machine under one stack."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        stack: SoftwareStack,
        grid: LayoutGrid,
        seq: int,
        precision: str,
        imbalance: float,
    ) -> None:
        self.shape, self.machine, self.stack, self.grid = shape, machine, stack, grid
        self.memory: StackMemory = stack.memory
        if stack.saves_gathered:
            self.memory = replace(self.memory, gathered_inputs=True)
        self.itemsize = itemsize = itemsize_of(precision)
        narrow = matmul_bytes(precision) if stack.fp8 is None else stack.fp8.saved_bytes
        if self.memory.narrow_inputs and narrow < itemsize:
            self.memory = replace(self.memory, input_bytes=narrow)
        self.precision = precision
        self.tokens = grid.microbatch_size * seq / grid.cp
        job = (shape, stack, self.memory, grid, seq, itemsize, imbalance)
        self.activations = Activations(*job)
        self.layers = SavedLayers(self.activations, stack, self.tokens)
        self.losses = LossMemory(self.activations, self.tokens)
        self.master_bytes = 0 if itemsize == 4 else self.memory.master_bytes
        self.gradient_bytes = stack.summed_bytes or self.memory.gradient_bytes

    def of(self, stage: RankStage) -> tuple[MemoryParts, ...]:
        """One pipeline rank by category, at each moment that may be its peak, without what the
        allocator caches."""
        return self._by_moment(stage) if self.memory.unit_by_unit else (self._at_once(stage),)

    @property
    def matmul_speed(self) -> float:
        """FLOP/s of matmuls in 16 bits, or more."""
        known = PRECISIONS.get(self.precision)
        wide = known.wide if known else self.precision
        return self.machine.peak(wide) * self.machine.efficiency.matmul

    def least(self, stage: RankStage) -> LeastBytes:
        """What a rank has at least, without logits."""
        parameters = self.parameters(stage)
        states = self._states(parameters)
        state_bytes = states["weights"] + states["master"] + states["optimizer"]
        gradients = self._sharded(parameters, 1) * self.gradient_bytes
        saved, by_chunk = self.layers.saved(stage), backward_by_chunk(self.grid)
        if self.memory.unit_by_unit:
            saved = saved + self.activations.rotary_tables() * self.tokens * self.grid.chunks
        activations = saved * stage.flight
        if self.memory.unit_by_unit:
            state_bytes = state_bytes + self._gathered(parameters, stage, np.zeros(1))
            reduced = (self.grid.zero >= 2) | (self.grid.microbatches.min() == 1)
            reduced = reduced | ((self.grid.zero == 1) & by_chunk)
            full = parameters.all * self.gradient_bytes
            gradients = np.where(reduced, gradients, full)
            least = stage._replace(layers=fewest_layers(stage.layers))
            few = self.layers.working(least) + self._messages() + self._buffers()
            activations = self.layers.most(stage, saved) + few
        if self.stack.grads_home or self.stack.frozen:
            gradients = np.zeros(1)
        begun = (self.grid.microbatches > stage.flight) & self.memory.unit_by_unit & ~by_chunk
        return LeastBytes(state_bytes + self.memory.context_bytes, gradients, activations, begun)

    def _by_moment(self, stage: RankStage) -> tuple[MemoryParts, ...]:
        """When the backward of the layers begins, when it ends, of one chunk or of all, before that
        at the loss and when the backward of the head ends, and when copies of a model are summed.
        """
        parameters = self.parameters(stage)
        saved, working = self.layers.of(stage)
        saved = saved + self.activations.rotary_tables() * self.tokens * self.grid.chunks
        matrix = self.shape.vocab * self.shape.width / self.grid.tp
        learned, owned = trainable_share(self.shape, self.stack), self._sharded(parameters, 1)
        unit = self._unit(parameters, stage)
        leave = bool(self.stack.grads_home)
        shares = self.shape.tied & (self.grid.pp == 1)
        arguments = (self.grid, owned, self.gradient_bytes * learned, unit, leave)
        gradients = StageGradients(self.shape, parameters, stage, *arguments)
        waiting = stage.head * self.losses.other_inputs()
        begin = self.layers.most(stage, saved) + waiting
        end = final = waiting + self.layers.most(stage, saved, gradients.done_after_backward())
        by_chunk = backward_by_chunk(self.grid)
        if by_chunk.any():
            earlier_flight = stage.flight * (1 - 1 / self.grid.chunks)
            final = np.where(
                by_chunk, self.layers.most(stage, saved, earlier_flight) + waiting, end
            )
        # A tied weight has two gradients: the head's waits for the embedding's, and for their sum.
        tied = np.where(shares, matrix * self.itemsize, 0.0)
        embedding = stage.embedding * matrix * self.itemsize
        # They are summed before the accumulated gradient is made, or beside it.
        embedding = embedding + np.where(gradients.begun & ~gradients.reduced, 2 * tied, 0.0)
        states, messages = self._states(parameters), self._messages()
        gathered = self._gathered(parameters, stage, np.zeros(1))
        logits = stage.head * self.losses.other_losses()
        buffers = (logits, messages + self._buffers(), gathered)
        moments = [
            self._moment(states, gradients.at_last_layer(), begin + working + tied, *buffers),
            self._moment(states, gradients.at_first_layer(), end + working + tied, *buffers),
        ]
        if by_chunk.any():
            moments.append(
                self._moment(states, gradients.at_last_chunk(), final + working, *buffers)
            )
        if (copied := mirrored(self.grid)).any():
            sums = np.where(copied, sums_of_copies(owned, self.gradient_bytes), 0.0)
            arguments = (sums, np.zeros(1), messages, np.zeros(1))
            moments.append(self._moment(states, gradients.at_update(), *arguments))
        if stage.embedding.any():
            moments.append(
                self._moment(states, gradients.at_embedding(), final + embedding, *buffers)
            )
        if stage.head.any():
            gathered = self._gathered(parameters, stage, stage.head * matrix)
            # Chunks are at their peak in the forward, where nothing is gathered after the head.
            last = self.losses.chunked & (self.shape.mtp == 0)
            alone = self._gathered(parameters, stage, stage.head * matrix, prefetch=0)
            at_loss = np.where(last, alone, gathered)
            arguments = (logits + stage.head * self.losses.computed(), messages, at_loss)
            activations = begin + stage.head * self.losses.input()
            weight = stage.head * matrix * self.itemsize  # the gradient of the head, before its sum
            after = (activations + weight, logits, messages, gathered)
            moments.append(self._moment(states, gradients.at_head(), *after))
            moments.append(self._moment(states, gradients.at_loss(), activations, *arguments))
        return tuple(moments)

    def _moment(
        self,
        states: MemoryParts,
        gradients: GradientLevel,
        activations: Array,
        logits: Array,
        buffers: Array,
        gathered: Array,
    ) -> MemoryParts:
        return {
            **states,
            "gradients": gradients.accumulated,
            "activations": activations,
            "logits": logits,
            "buffers": buffers,
            "prefetch": gathered + gradients.unreduced,
            **self.overhead(activations),
        }

    def overhead(self, activations: Array) -> MemoryParts:
        """What belongs to no tensor."""
        context = np.full((1,), self.memory.context_bytes + self.memory.pool_bytes)
        margin = self.memory.fragments * activations
        return {"context": context, "nccl": self.communicators, "margin": margin}

    @cached_property
    def communicators(self) -> Array:
        """What NCCL holds; of other people's stacks it is in the context."""
        if not self.stack.runs_plans:
            return np.zeros(1)
        return communicator_memory(self.shape, self.machine, self.stack, self.grid)

    def _gathered(
        self, parameters: RankParameters, stage: RankStage, end: Array, prefetch: int | None = None
    ) -> Array:
        """ZeRO-3: gathered weights. Those of a layer, or of an `end`, and of prefetched layers, as
        many as the stack says or as are given; or all, if they stay gathered over the step, as
        those of multi-token prediction do."""
        grid, unit = self.grid, self._unit(parameters, stage)
        prefetch = self.stack.prefetch if prefetch is None else prefetch
        dense, experts = grid.shard * grid.cp > 1, grid.edp > 1
        layer = self._layer(parameters, stage)
        # A block uses all units of its layer, or one that several layers share.
        dense_size = np.where(dense, np.maximum(layer.dense, unit.dense), 0.0)
        routed = np.where(experts, np.maximum(layer.experts, unit.experts), 0.0)
        alone, pair_routed = (most_routed(self.shape, n) * routed for n in (prefetch, 1 + prefetch))
        if self.stack.unit_bytes is not None:  # the last unit has the final norm too
            end = np.where(end > 0, end + unit.dense, 0.0)
        end = np.where(dense, np.minimum(end, parameters.dense), 0.0)
        gathered = prefetch * dense_size + np.where(end > 0, end + alone, dense_size + pair_routed)
        everything = np.where(dense, parameters.dense, 0.0)
        everything = everything + np.where(experts, parameters.experts, 0.0)
        stays = self.stack.stays(grid) | ((stage.head > 0) & (self.shape.mtp > 0))
        codes = prefetch * codes_under_way(self.stack, dense * layer.dense, experts * layer.experts)
        total = np.where(stays, everything, np.minimum(gathered, everything))
        return np.where(grid.zero == 3, total * self.itemsize + codes * ~stays, 0.0)

    def _layer(self, parameters: RankParameters, stage: RankStage) -> UnitParameters:
        """Parameters of a layer, one that predicts ahead among them."""
        ahead, last = stage.head * self.shape.mtp, self.shape.layers - 1
        routed = stage.layers.routed + ahead * self.shape.is_moe_layer(last)
        dense = (parameters.dense - parameters.ends) / np.maximum(stage.layers.all + ahead, 1.0)
        return UnitParameters(dense, parameters.experts / np.maximum(routed, 1.0))

    def _unit(self, parameters: RankParameters, stage: RankStage) -> UnitParameters:
        """Parameters of a flat unit: a layer, or as many layers as fit in the size that is given,
        or less than a layer, but no less than its largest weight."""
        layer = self._layer(parameters, stage)
        if self.stack.unit_bytes is None:
            return layer
        shape, most = self.shape, self.stack.unit_bytes / self.itemsize
        largest = shape.width * shape.ffn / self.grid.tp, layer.experts / (3 if shape.gated else 2)
        sizes = [
            np.where(
                most < layer_size,
                np.minimum(layer_size, np.maximum(most, weight)),
                layer_size * np.floor(most / np.maximum(layer_size, 1.0)),
            )
            for layer_size, weight in zip(layer, largest, strict=True)
        ]
        return UnitParameters(*sizes)

    def _at_once(self, stage: RankStage) -> MemoryParts:
        """All categories at one moment."""
        parameters = self.parameters(stage)
        saved, working = self.layers.of(stage)
        parts = self._states(parameters)
        # Logits are freed when the backward of the layers begins.
        working = np.maximum(working - stage.head * self.losses.computed(), 0.0)
        inputs = stage.head * (self.losses.input() + self.losses.other_inputs())
        parts["activations"] = saved * stage.flight + working + inputs
        parts["logits"] = stage.head * (self.losses.computed() + self.losses.other_losses())
        parts["buffers"] = self._messages() + self._buffers()
        parts["prefetch"] = self._prefetch(parameters, stage)
        parts |= self.overhead(parts["activations"])
        if self.memory.backward_bytes:
            live = parts["activations"] + parts["logits"]
            after = saved * (stage.flight - 1) + self.memory.backward_bytes * parameters.all
            parts["gradients"] = parts["gradients"] + np.maximum(after - live, 0.0)
        return parts

    def parameters(self, stage: RankStage) -> RankParameters:
        """Parameters of a stage; norms, routers and latents are replicated over tp."""
        shape, tp = self.shape, self.grid.tp
        dense, experts = np.zeros(1), np.zeros(1)
        for i, count in layer_numbers(self.shape, stage.layers).items():
            layer = layer_parameters(shape, i)
            dense = dense + count * stage.copies * self._dense(i)
            spread = layer.experts / (self.grid.ep * self.grid.etp)
            experts = experts + count * stage.copies * spread
        if shape.mtp:
            extra, last = mtp_parameters(shape), shape.layers - 1
            besides = extra.total - layer_parameters(shape, last).total  # every tp rank has these
            dense = dense + stage.head * shape.mtp * (self._dense(last) + besides)
            spread = extra.experts / (self.grid.ep * self.grid.etp)
            experts = experts + stage.head * shape.mtp * spread
        matrices = stage.embedding + stage.head
        if shape.tied:
            matrices = np.where(self.grid.pp == 1, 1.0, matrices)
        elif shape.mtp:  # the embedding again, if the stage of the head has none
            matrices = matrices + np.where(self.grid.pp == 1, 0.0, stage.head)
        ends = matrices * shape.vocab * shape.width / tp
        if shape.positions == "learned":
            ends = ends + stage.embedding * shape.max_seq * shape.width
        final = stage.head * shape.width * (2 if shape.norm_bias else 1)
        return RankParameters(dense + ends + final, experts, ends)

    def _dense(self, i: int) -> Array:
        """Parameters of a layer on one rank, without experts."""
        shape, tp = self.shape.of_layer(i), self.grid.tp
        layer = layer_parameters(self.shape, i)
        everywhere, keys = replicated_weights(shape)
        full_size = layer.norms + layer.router + everywhere
        shared = keys * (np.maximum(shape.kv_heads, tp) - shape.kv_heads)
        return (layer.total - layer.experts - full_size + shared) / tp + full_size

    def _states(self, parameters: RankParameters) -> MemoryParts:
        """Weights, gradients, master weights and moments, sharded as the ZeRO stage says."""
        grid, memory = self.grid, self.memory
        away = grid.offload > 0
        stays = np.where(away, 0.0, 1.0)
        weights = self._sharded(parameters, 3) * (memory.weight_bytes or self.itemsize)
        weights = weights + rounded_weights(self.stack, grid, parameters, self.shape.layers)
        gone = away & (grid.zero == 3) & (grid.shard * grid.cp > 1)
        learned = trainable_share(self.shape, self.stack)
        gradients = self._sharded(parameters, 2) * self.gradient_bytes * learned
        if memory.bucket_bytes:
            summed = (grid.zero == 0) & (grid.dp > 1)
            gradients = gradients + np.where(summed, parameters.all * memory.bucket_bytes, 0.0)
        owned = self._sharded(parameters, 1) * learned
        return {
            "weights": np.where(gone, 0.0, weights),
            "gradients": gradients,
            "master": owned * (self.master_bytes * stays),
            "optimizer": self._optimizer_states(parameters) * learned * stays,
        }

    def _optimizer_states(self, parameters: RankParameters) -> Array:
        """Of AdamW or SGD; or of Muon, which has one moment for the matrices of layers."""
        size = self.memory.moment_bytes
        if not self.stack.orthogonalizes:
            return self._sharded(parameters, 1) * size
        ends = RankParameters(parameters.ends, np.zeros(1), parameters.ends)
        end_shard = self._sharded(ends, 1)
        return end_shard * size + (self._sharded(parameters, 1) - end_shard) * MUON_STATE

    def _sharded(self, parameters: RankParameters, from_zero: int) -> Array:
        """Parameters of a rank; only its shard from this ZeRO stage on."""
        grid = self.grid
        sharded = grid.zero >= from_zero
        dense = parameters.dense / np.where(sharded, grid.shard * grid.cp, 1.0)
        if self.shape.moe is None:
            return dense
        return dense + parameters.experts / np.where(sharded, grid.edp, 1.0)

    def host(self, stage: RankStage) -> Array:
        """What offload keeps in host memory: gradients, states, and the weight shards under ZeRO-3.
        Of states on disks, two layers are in memory: one being updated, one being copied."""
        grid, owned = self.grid, self._sharded(self.parameters(stage), 1)
        sharded = (grid.zero == 3) & (grid.shard * grid.cp > 1)
        buffers = np.minimum(2 / np.maximum(stage.layers.all, 1.0), 1.0)
        states = np.where(grid.offload == OFFLOADS.index("nvme"), buffers, 1.0)
        size = states * (self.memory.moment_bytes + self.master_bytes)
        size = size + np.where(sharded, self.itemsize, 0.0)
        gradients = self.gradient_bytes if self.stack.grads_home == "cpu" else 0
        return owned * (np.where(grid.offload > 0, size, 0.0) + gradients)

    def disk(self, stage: RankStage) -> Array:
        """Gradients, optimizer states and master weights on disks."""
        owned = self._sharded(self.parameters(stage), 1)
        is_nvme = self.grid.offload == OFFLOADS.index("nvme")
        gradients = self.gradient_bytes if self.stack.grads_home == "nvme" else 0
        states = self.memory.moment_bytes + self.master_bytes
        return owned * (np.where(is_nvme, states, 0.0) + gradients)

    def _prefetch(self, parameters: RankParameters, stage: RankStage) -> Array:
        """ZeRO-3: weights that are gathered at once; from ZeRO-2 on, unreduced gradients."""
        grid, memory = self.grid, self.memory
        sharded = grid.shard * grid.cp > 1
        layer = (parameters.all - parameters.ends) / np.maximum(stage.layers.all, 1.0)
        most = np.minimum(stage.layers.all, memory.whole_layers) * layer
        passing = np.minimum(stage.layers.all, self._passing_layers(stage)) * layer
        if memory.ends_stay_gathered:
            most, passing = most + parameters.ends, passing + parameters.ends
        else:  # an end is gathered in place of a layer
            most = np.maximum(most, parameters.ends + layer)
        size = self.gradient_bytes if self.stack.scatters_rounds else memory.passing_bytes
        flying = np.where((grid.zero >= 2) & sharded, passing * size, 0.0)
        # A pipeline keeps gathered weights and full gradients: its microbatches are far apart.
        num_bytes = parameters.all * (self.itemsize + self.gradient_bytes)
        num_bytes = np.where(grid.pp > 1, num_bytes, most * self.itemsize + flying)
        return np.where((grid.zero == 3) & sharded, num_bytes, flying)

    def _passing_layers(self, stage: RankStage) -> Array | float:
        """Layers with unreduced gradients: some; or a chunk that accumulates and a reduced one."""
        if not self.stack.scatters_rounds:
            return self.memory.passing_layers
        return 2 * stage.layers.all / self.grid.chunks

    def _messages(self) -> Array:
        """Send and receive buffers of the pipeline."""
        return np.where(self.grid.pp > 1, 4 * self.activations.residual, 0.0) * self.tokens

    def _buffers(self) -> Array:
        """Buffers of tensor-parallel gathers, context parallelism and expert dispatch."""
        activations = self.activations
        gathered = np.where(
            activations.split > 1, self.memory.gather_buffers * activations.full_residual, 0.0
        )
        return (
            gathered + activations.context_buffers() + activations.dispatch_buffers()
        ) * self.tokens


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
    "nccl",
    "margin",
)
# Categories that depend on the same columns are summed first, before they are broadcast.
_STATES = ("weights", "gradients", "master", "optimizer", "prefetch")
_OTHERS = tuple(name for name in CATEGORIES if name not in _STATES)


@dataclass(frozen=True)
class PeakMemory:
    """Device memory of the ranks that may be a layout's fullest, from the first to the head's.

    Each rank has one entry per moment that may be its peak. `reserve` computes what the allocator
    of the first rank reserves at its peak.
    """

    ranks: tuple[tuple[MemoryParts, ...], ...]
    host: Array  # bytes that offload keeps in host memory
    disk: Array  # and on local disks
    reserve: Callable[[], Array]

    @cached_property
    def first(self) -> MemoryParts:
        """The first rank at its peak."""
        return _fullest(self.ranks[0])

    @cached_property
    def last(self) -> MemoryParts:
        """The last rank, or that of the head, at its peak."""
        return _fullest(self.ranks[-1])

    @cached_property
    def total(self) -> Array:
        """Bytes of the fullest rank."""
        return reduce(np.maximum, (_most(moments) for moments in self.ranks))

    @cached_property
    def parts(self) -> MemoryParts:
        """Categories of the fullest rank; they sum to `total`."""
        return _fullest([_fullest(moments) for moments in self.ranks])

    @cached_property
    def reserved(self) -> Array:
        """What torch reports as reserved on the first rank: the allocator's pool."""
        return self.reserve()


def total_bytes(parts: MemoryParts) -> Array:
    """All categories together."""
    return _sum(parts, _STATES) + _sum(parts, _OTHERS)


def _sum(parts: MemoryParts, names: Sequence[str]) -> Array:
    return sum((parts[name] for name in names), np.zeros(1))


def _most(moments: Sequence[MemoryParts]) -> Array:
    """Bytes at the peak of some moments."""
    return reduce(np.maximum, map(total_bytes, moments))


def _fullest(moments: Sequence[MemoryParts]) -> MemoryParts:
    """The moment with the most bytes, layout by layout."""
    most = _most(moments)
    chosen = moments[0]
    for parts in moments[1:]:
        fuller = total_bytes(parts) == most
        chosen = {name: np.where(fuller, parts[name], chosen[name]) for name in CATEGORIES}
    return chosen


def fits(memory: PeakMemory, machine: Machine) -> NDArray[np.bool_]:
    """Whether each layout is estimated to fit."""
    return memory.total <= machine.memory


def verdict(size: Array, usable: float, machine: Machine) -> NDArray[np.str_]:
    """The `Verdict` on each layout; tight: more than the `usable` bytes, less than there are."""
    inside = np.where(size <= min(usable, machine.memory), "fits", "tight")
    return np.where(size <= machine.memory, inside, "does not fit")


def communicator_memory(
    shape: Shape, machine: Machine, stack: SoftwareStack, grid: LayoutGrid
) -> Array:
    """What NCCL holds on a rank of every layout of a grid, each set of degrees once."""
    if not has_nccl(machine):
        return np.zeros(1)
    node = machine.tiers[0].size
    columns = (
        grid.context,
        *(grid.tp, grid.cp, grid.pp, grid.replicate, grid.shard, grid.ep, grid.etp),
        *(grid.zero > 0, expert_nodes(grid, node), grid.sp),
        mirrored(grid) | (shape.ends_share & ~folded(grid)),
    )
    joined = np.stack([column.ravel() for column in np.broadcast_arrays(*columns)], axis=1)
    degrees, places = np.unique(joined.astype(np.int64), axis=0, return_inverse=True)
    scaled = stack.fp8 is not None and stack.fp8.scaling == "tensorwise"
    facts = (shape.kv_heads, shape.moe is not None, bool(stack.balance), scaled)
    channels = Channels.of(machine)
    sizes = [
        degrees_bytes(tuple(row[1:]), _inner(shape, row[1], row[2], row[0]), facts, channels)
        for row in degrees.tolist()
    ]
    return np.array(sizes, float)[places.ravel()].reshape(
        np.broadcast_shapes(*map(np.shape, columns))
    )


def _inner(shape: Shape, tp: int, cp: int, context: int) -> int:
    """Context ranks that share their tokens by heads."""
    kinds = {"ulysses": cp, "hybrid": ulysses_degree(shape, tp, cp)}
    return kinds.get(CONTEXTS[context], 1)


class CachingAllocator:
    """What the caching allocator of one rank reserves beside live tensors."""

    def __init__(self, entries: MemoryEntries, stage: RankStage, parts: MemoryParts) -> None:
        self.entries, self.stage, self.parts = entries, stage, dict(parts)
        self.cache = entries.memory.cache

    def slack(self) -> Array:
        """Cached bytes that a run must have room for: a pool that meets the limit waits for the GPU
        and frees all that is cached, again and again."""
        if self.cache is None:
            return np.zeros(1)
        return self._pending(self.cache) + self._gathered()

    def reserved(self) -> Array:
        """The pool at its peak. One that met the limit freed its cache and grows again: on average
        it is halfway."""
        outside, cache = self.entries.memory.context_bytes, self.cache
        outside = outside + self.entries.communicators
        if cache is None:
            return total_bytes(self.parts) - outside
        limit = self.entries.machine.memory - outside
        need = total_bytes(self.parts) - self.parts["margin"] - outside
        # Whatever fragmentation loses is found again among pending blocks.
        loose = need + np.maximum(self._pending(cache) * self._filled(cache), self.parts["margin"])
        most = loose + self._gathered()
        full = np.maximum(need, (need + limit) / 2)
        return np.where(most < limit, most, np.where(loose < limit, loose, full))

    def _pending(self, cache: AllocatorCache) -> Array:
        """Blocks that the GPU has not passed yet, at most: two of all tokens for each layer, inputs
        of its reduce-scatters; and shards, one per block in forward and 2.5 in backward."""
        grid, stage, entries = self.entries.grid, self.stage, self.entries
        forward = np.minimum(LAUNCH_QUEUE / cache.forward_launches, stage.layers.all * stage.flight)
        left = np.maximum(LAUNCH_QUEUE - forward * cache.forward_launches, 0.0)
        # Behind the forward of a microbatch, the backward of the one before may wait as well; in a
        # pipeline the host has waited for a message in between.
        before = np.minimum(left / cache.backward_launches, stage.layers.all)
        before = np.where((grid.pp == 1) & (grid.microbatches > 1), before, 0.0)
        blocks = 2 * forward * (1 + 1 / grid.tp) + 2 * before * (1 + 2.5 / grid.tp)
        num_bytes = blocks * self._ahead() * entries.activations.full_residual * entries.tokens
        if cache.most is not None:
            live = self.parts["activations"] + self.parts["logits"]
            num_bytes = np.minimum(num_bytes, cache.most * live)
        return np.where(entries.activations.split > 1, num_bytes, 0.0)

    def _ahead(self) -> Array:
        """Whether the host is ahead of the GPU. Alone, the fastest host of a tensor group is: its
        GPU waits for the slowest one. In a pipeline of two, all hosts wait for every message, and
        are ahead only if the GPU needs longer for a layer. In longer ones GPUs wait for others."""
        entries, grid, stage = self.entries, self.entries.grid, self.stage
        parameters = entries.parameters(stage)
        layer = (parameters.all - parameters.ends) / np.maximum(stage.layers.all, 1.0)
        work = (2 * entries.tokens * layer / entries.matmul_speed) ** 2
        least = np.maximum(work + self.entries.stack.launch**2, np.finfo(float).tiny)
        return np.where(grid.pp == 2, work / least, 1.0)

    def _filled(self, cache: AllocatorCache) -> Array:
        """How much of the queue is full in a step: a host that is assumed to need half of the GPU's
        time gains every second kernel of a microbatch. Messages of a pipeline start it anew."""
        grid, launches = self.entries.grid, cache.forward_launches + cache.backward_launches
        needed = 2 * LAUNCH_QUEUE / (launches * np.maximum(self.stage.layers.all, 1.0))
        return np.where(grid.pp == 1, grid.microbatches / (grid.microbatches + needed), 1.0)

    def _gathered(self) -> Array:
        """ZeRO-1: after an update, flat copies of 2 bytes of all weights twice and of the rank's
        own, less its moments of 8 bytes, which were allocated where activations had been."""
        grid, parameters = self.entries.grid, self.entries.parameters(self.stage)
        num_bytes = np.maximum(4 - 6 / grid.dp, 0.0) * parameters.all
        return np.where((grid.zero == 1) & (grid.dp > 1), num_bytes, 0.0)


def peak_memory(
    shape: Shape,
    machine: Machine,
    stack: SoftwareStack,
    grid: LayoutGrid,
    seq: int,
    precision: str,
    imbalance: float = 1.0,
    spans: Sequence[range] | None = None,
) -> PeakMemory:
    """Estimate every layout of the grid.

    `imbalance`: slots of the fullest expert over the mean. `spans`: the layers of each stage if
    they are given; otherwise the stack's own split.
    """
    entries = MemoryEntries(shape, machine, stack, grid, seq, precision, imbalance)
    stages = [*rank_stages(shape, entries.memory.split, grid, seq, stack.hop_forwards, spans)]
    ranks = tuple(entries.of(stage) for stage in stages)
    host, disk = np.zeros(1), np.zeros(1)
    if grid.offload.any() or stack.grads_home:
        host = reduce(np.maximum, (entries.host(stage) for stage in stages))
        disk = reduce(np.maximum, (entries.disk(stage) for stage in stages))
    first = CachingAllocator(entries, stages[0], ranks[0][0])
    for stage, moments in zip(stages, ranks, strict=True):
        for parts in moments:
            parts["margin"] = parts["margin"] + CachingAllocator(entries, stage, parts).slack()
    return PeakMemory(ranks, host, disk, first.reserved)


def least_memory(
    shape: Shape,
    machine: Machine,
    stack: SoftwareStack,
    grid: LayoutGrid,
    seq: int,
    precision: str,
    imbalance: float = 1.0,
) -> Array:
    """A lower bound of the peak of the layouts of a block, with any of its shardings, by what the
    first ranks hold at least."""
    entries = MemoryEntries(shape, machine, stack, grid, seq, precision, imbalance)
    stages = rank_stages(shape, entries.memory.split, grid, seq, stack.hop_forwards)
    return reduce(np.maximum, (entries.least(stage).any_sharding for stage in islice(stages, 2)))


def rank_peak_memory(
    shape: Shape,
    machine: Machine,
    stack: SoftwareStack,
    grid: LayoutGrid,
    seq: int,
    precision: str,
    imbalance: float,
    stage: RankStage,
) -> MemoryParts:
    """Peak memory of a rank with this stage, by category."""
    return _fullest(MemoryEntries(shape, machine, stack, grid, seq, precision, imbalance).of(stage))
