"""Seconds of one layer and of the head, for one microbatch on one rank: forward, input gradient,
weight gradient, and what recomputation repeats.

Seconds are kept by part (products, attention, tp, ...), so that the parts of a step can be shown.

Weights that do not learn, and the low-rank adapters beside them (LoRA).

A frozen weight has no gradient, no optimizer state and no master copy; its matmul has no third
pass. An adapter of rank r adds r · (inputs + outputs) weights to each matmul of attention and of a
dense MLP, and one small matmul more to each pass. Inputs of matmuls are saved all the same: the
adapters need them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from fivefold.core.layout import planned_weights
from fivefold.core.model import Module, Moe, Recompute, Shape, layer_kinds, parameters
from fivefold.cost import Array
from fivefold.cost.hardware import KERNEL_LAUNCH, SoftwareStack
from fivefold.cost.layer.kernels import NORM_PASSES, Gemm, LayerKernels, travelling_share
from fivefold.cost.step import SplitGemms, hide_exchange, shown_seconds, tensor_seconds
from fivefold.cost.traffic import (
    UNEVEN_AXES,
    CountedCollective,
    balance_layer,
    context_layer,
    expert_layer,
    fp8_layer,
    tensor_ends,
    tensor_layer,
)


def trainable_share(shape: Shape, stack: SoftwareStack) -> float:
    """Weights that learn over all weights: by the table of a model that a plan tunes, else by the
    rank of other people's adapters."""
    if shape.tuning is not None:
        return _learned_share(shape)
    if not stack.frozen:
        return 1.0
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.heads * shape.value_dim
    attention = 4 * shape.width + heads
    mlp = (3 if shape.gated else 2) * (shape.width + shape.ffn)
    adapters = 0
    for i, count in layer_kinds(shape).items():
        adapters += count * (attention + (0 if shape.is_moe_layer(i) else mlp))
    return stack.lora_rank * adapters / parameters(shape).total


@lru_cache(maxsize=16)
def _learned_share(shape: Shape) -> float:
    rows = planned_weights(shape)
    return sum(row.numel for row in rows if not row.frozen) / sum(row.numel for row in rows)


def freeze(
    passes: tuple[dict[str, Array], ...], weights: dict[str, Array], adapters: Array
) -> None:
    """Take the weight gradients out of a layer, and add its adapters, of so many seconds a pass."""
    for parts in passes:
        parts["products"] = parts.get("products", 0.0 * adapters) + adapters
    weights.clear()
    weights["products"] = adapters


TimeParts = dict[str, Array]

# Host seconds of a backward over those of a forward: assumed.
HOST_BACKWARD = 1.0

# Rows of an expert's matmul are padded to tiles of 128: half a tile is lost on average.
PADDED_ROWS = 64.0
# The part of a step that an axis belongs to.
_PARTS = {
    **{"tp": "tp", "etp": "tp", "ulysses": "cp", "ring": "cp", "row": "ep"},
    **{"scale": "tp", "replica": "tp"},
    **dict.fromkeys(UNEVEN_AXES, "ep"),
}


@dataclass(frozen=True)
class LayerTimes:
    """Seconds by part: forward, input gradient, weight gradient, and recomputation; `late`: more of
    the input gradient, if weight gradients are deferred."""

    forward: TimeParts
    inputs: TimeParts
    weights: TimeParts
    again: TimeParts
    late: TimeParts = field(default_factory=TimeParts)


class HostSeconds(NamedTuple):
    """Host seconds to launch the kernels of a layer: forward, and backward with recomputation."""

    forward: Array
    backward: Array

    @property
    def total(self) -> Array:
        return self.forward + self.backward


def total_seconds(parts: TimeParts) -> Array:
    return sum(parts.values(), np.zeros(1))


class LayerTimer(LayerKernels):
    """Times the layers and the head of one model on one machine, for every layout of a grid."""

    @cached_property
    def _layers(self) -> dict[int, LayerTimes]:
        """Those that are timed already."""
        return {}

    def under(self, rule: Recompute) -> LayerTimer:
        """The same with one of the grid's rules of recomputation for all layouts."""
        number = np.array([float(self.grid.rules.index(rule))])
        if (self.grid.recompute == number).all():
            return self
        grid = replace(self.grid, recompute=number)
        job = (self.shape, self.machine, self.stack, grid, self.seq, self.precision)
        return LayerTimer(*job, self.imbalance)

    @cached_property
    def unrounded(self) -> LayerTimer:
        """The same for layers whose linears are not rounded."""
        stack = replace(self.stack, fp8=None)
        job = (self.shape, self.machine, stack, self.grid, self.seq, self.wide)
        return LayerTimer(*job, self.imbalance)

    def message(self) -> Array:
        """Seconds to send the activations of a microbatch to the next stage."""
        grid = self.grid
        return self.links.send(self.message_bytes(), grid.tp * grid.cp * grid.dp)

    def message_bytes(self) -> Array:
        """One rank's activations of a microbatch between two stages."""
        size = self.tokens * self.shape.width * self.itemsize / self.split
        if self.stack.scatters_messages:
            size = size / np.where(self.grid.sp, 1.0, self.grid.tp)
        return size

    def layer(self, i: int) -> LayerTimes:
        """Layer i of the model."""
        if i not in self._layers:
            self._layers[i] = self.of_layer(i)._layer(i)
        return self._layers[i]

    def of_layer(self, i: int) -> LayerTimer:
        """The timer of layers that mix tokens as layer i does."""
        return self._of_mixer if self.shape.is_recurrent(i) else self

    @cached_property
    def _of_mixer(self) -> LayerTimer:
        job = (self.machine, self.stack, self.grid, self.seq, self.precision, self.imbalance)
        return LayerTimer(self.shape.of_mixer, *job)

    def scheduled_layer(self, i: int) -> LayerTimes:
        """The same with what more of it shows, if the schedule defers weight gradients."""
        times, defers = self.layer(i), self.grid.defers
        if "tp" not in times.late or not np.any(defers):
            return times
        shown = times.inputs["tp"] + np.where(defers, times.late["tp"], 0.0)
        return replace(times, inputs={**times.inputs, "tp": shown})

    def host_seconds(self, *, routed: bool = False) -> HostSeconds:
        """Host seconds of a layer, with experts if it is `routed`."""
        stack, grid, reach = self.stack, self.grid, self.machine.efficiency
        launch = np.full_like(grid.ep, stack.launch)
        if routed and stack.expert_launch:
            launch = stack.expert_launch + np.where(grid.ep > 1, stack.dispatch_launch, 0.0)
        if self.mixer is not None and stack.launch:
            launch = launch + self.mixer.kernels * KERNEL_LAUNCH
        forward = launch * (1 + stack.straggler_share * (grid.tp - 1))
        again = grid.recompute_has(_repeated_share) * stack.recomputed
        if self.machine.is_cpu and stack.launch:  # as much more for experts as on another host
            times = forward / stack.launch
            forward = times * reach.forward_host
            return HostSeconds(forward, times * reach.backward_host + again * forward)
        backward = forward * (HOST_BACKWARD + again)
        if stack.crowding:
            crossed = (grid.pp > 1) & (grid.world > self.machine.gpus_per_node)
            backward = backward + np.where(crossed, stack.crowding * grid.tp, 0.0)
        return HostSeconds(forward, backward)

    def _layer(self, i: int) -> LayerTimes:
        shape = self.shape
        moe = shape.moe if shape.is_moe_layer(i) else None
        gemms = [*self._attention_gemms()]
        if moe is None:
            gemms += self._mlp_gemms(shape.ffn)
        seconds = self._gemm_seconds(gemms)
        core, core_backward = self._attention(i)
        elementwise = self._elementwise(shape.ffn if moe is None else 0)
        cast = self._casts(gemms)
        copies = self._head_copies()
        forward: TimeParts = {"products": seconds, "attention": core}
        forward["elementwise"] = elementwise + cast + copies
        inputs: TimeParts = {"products": seconds, "attention": core_backward}
        passes = self.stack.elementwise_backward * elementwise + cast
        inputs["elementwise"] = passes + copies + self._all_tokens(self.stack.summed_passes)
        size = sum((gemm.outputs * gemm.inputs for gemm in gemms), np.zeros(1))
        summed = self._accumulated(size)
        weights: TimeParts = {"products": seconds / self.late_speed + summed}
        if self.stack.fp8 is not None:
            modules = [gemms[:-2], gemms[-2:]] if moe is None else [gemms, self._shared_gemms(moe)]
            first, second = (self.rounding_seconds(module_gemms) for module_gemms in modules)
            forward["rounding"], inputs["rounding"] = first[0] + second[0], first[1] + second[1]
        if moe is not None:
            self._add_experts(moe, forward, inputs, weights)
        again = self._recomputation(forward, moe)
        if self.stack.stops_early and moe is None and not self.shape.outer_norms:
            # No backward reads the last matmul of what is computed again together.
            segments = self.grid.recompute_has(lambda rule: 1 / rule.blocks if rule.full else 0)
            skipped = segments * self._gemm_seconds(gemms[-1:])
            again["products"] = again["products"] - self.stack.recomputed * skipped
        times = LayerTimes(forward, inputs, weights, again)
        if self.stack.frozen:
            freeze((forward, inputs), weights, self._adapter_seconds(gemms))
        self._add_traffic(times, moe)
        if self.grid.cp.max() > 1:
            self._add_context(times)
        if moe is not None:
            shared = self._gemm_seconds(self._shared_gemms(moe))
            passes = (times.forward, times.inputs, times.again)
            host = self.host_seconds(routed=True).total
            hide_exchange(passes, times.weights, shared, self.grid, self.stack, host)
        return times

    def _add_traffic(self, times: LayerTimes, moe: Moe | None) -> None:
        """The collectives of the layer, without those inside attention."""
        joined = self.stack.joins_blocks and self.shape.parallel_block and moe is None
        for collective in self.collectives(moe):
            part = _PARTS[collective.axis]
            seconds = self.seconds_of(collective) * (1 - self._hidden[part])
            if joined and part == "tp":
                seconds = seconds / 2
            if self.stack.tp_overlap and collective.module:
                self._add_split(times, seconds, collective, moe)
            else:
                self._add(times, part, seconds, collective)

    def _add_split(
        self, times: LayerTimes, seconds: Array, issued: CountedCollective, moe: Moe | None
    ) -> None:
        """Collectives of a module that is split over tp, beside its matmuls."""
        gemms, chunks = self._split_gemms(issued.module, moe), self.job.tp_chunks
        used, again = (count / chunks for count in (issued.forward, issued.again))
        extra = issued.backward / chunks - used
        tensor_times = tensor_seconds(issued.kind, chunks * seconds, extra, chunks, gemms)
        counted = (
            (times.forward, used * tensor_times.forward),
            (times.inputs, used * tensor_times.backward),
        )
        repeated = (times.again, self.stack.recomputed * again * tensor_times.forward)
        for parts, part_seconds in (*counted, repeated, (times.late, used * tensor_times.late)):
            parts["tp"] = parts.get("tp", np.zeros(1)) + part_seconds

    def _split_gemms(self, module: str, moe: Moe | None) -> SplitGemms:
        """The matmuls beside which the collectives of a module run."""
        if module == "attention":
            gemms = list(self._attention_gemms())
        else:
            gemms = self._mlp_gemms(self.shape.ffn if moe is None else moe.shared_ffn)
        columns = self._gemm_seconds(self._reading_input(gemms))
        return SplitGemms(columns, self._gemm_seconds(gemms[-1:]), columns / self.late_speed)

    def collectives(self, moe: Moe | None) -> list[CountedCollective]:
        """What a layer with or without experts issues outside of attention."""
        ends_segment = self.grid.recompute_has(lambda rule: 1 / max(1, rule.blocks))
        ends_segment = ends_segment * self.stack.stops_early
        fp8 = self.job.fp8
        issued = [*tensor_layer(self.job, moe is not None, ends_segment, fp8 is not None)]
        if fp8 is not None:
            issued += fp8_layer(self.job, fp8, moe is not None)
        if moe is not None:
            rounded = fp8 is not None and fp8.experts
            issued += expert_layer(self.job, moe, ends_segment, rounded)
            issued += balance_layer(self.job, moe, self.grid.cp)
        return issued

    def _add(self, times: LayerTimes, part: str, seconds: Array, issued: CountedCollective) -> None:
        """Add so many collectives of so many seconds each."""
        counts = (issued.forward, issued.backward, self.stack.recomputed * issued.again)
        for parts, count in zip((times.forward, times.inputs, times.again), counts, strict=True):
            before = parts.setdefault(part, np.zeros(1))
            if np.any(count):
                parts[part] = before + count * seconds

    def seconds_of(self, issued: CountedCollective) -> Array:
        """Seconds of one of these collectives; not timed if no layout issues it."""
        if not any(map(np.any, (issued.forward, issued.backward, issued.again))):
            return np.zeros(1)
        job, size, once = self.job, issued.bytes, None
        near = job.etp * (job.ep // job.ep_nodes)
        strides = {"etp": 1, "tp": 1, "ulysses": job.tp, "ring": job.tp * job.inner}
        strides |= {"ep": job.etp, "ep-near": job.etp, "ep-far": near, "row": 1}
        strides |= {"scale": 1, "replica": 1}
        stride = strides[issued.axis] * np.ones_like(self.grid.tp)
        moe = self.shape.moe
        if moe is not None and issued.axis in UNEVEN_AXES:
            # All ranks wait for the rank with the fullest expert.
            size = size * self.dispatched
            if job.capacity is None:
                size = size * self._load(moe)
            copies = moe.groups_kept if moe.groups > 1 else moe.top_k
            once = (moe.top_k, copies) if self.stack.crosses_once else None
        ranks = issued.group * np.ones_like(self.grid.tp)
        seconds = self.links.seconds(issued.kind, size, ranks, stride, once)
        if self.stack.node_wait and issued.axis == "tp":
            seconds = seconds + self.stack.node_wait * (self.links.domains(ranks, stride) - 1)
        return seconds

    def _recomputation(self, forward: TimeParts, moe: Moe | None) -> TimeParts:
        """What is computed again: the full forward, or that of some modules."""
        full = self.stack.recomputed * self.grid.recompute_has(lambda rule: rule.full)
        repeats = {name: full * part_seconds for name, part_seconds in forward.items()}
        repeats["attention"] *= self.grid.recompute_has(lambda rule: not rule.keeps_attention)
        ours = self.stack.runs_plans
        by_module = self._modules(forward, moe) if ours else self._selective(forward)
        for module, parts in by_module.items():
            again = self.grid.recompute_has(partial(Recompute.remakes, module=module))
            for name, seconds in parts.items():
                repeats[name] = repeats[name] + again * seconds
        return repeats

    def _selective(self, forward: TimeParts) -> dict[Module, TimeParts]:
        """In other stacks: attention (unfused) or the elementwise kernels, and some matmuls."""
        cheap = "attention" if self.stack.attention == "unfused" else "elementwise"
        repeated = self.stack.selective_repeats * forward["products"]
        return {"norm": {cheap: forward[cheap], "products": repeated}}

    def _modules(self, forward: TimeParts, moe: Moe | None) -> dict[Module, TimeParts]:
        """The modules of a layer of fivefold; of attention and MLP no backward reads the last
        matmul."""
        shape, tp = self.shape, self.grid.tp
        passes, inner = self.stack.narrow_passes, 1.5 if shape.gated else 1.0
        wide = NORM_PASSES * shape.inner_norms * shape.width / self.split
        norms = self.moved(wide * self.tokens * self.itemsize)
        *into, out = self._attention_gemms()
        attention: TimeParts = {
            "products": self._gemm_seconds(into),
            "attention": forward["attention"],
            "elementwise": self._elementwise(0) - norms,
            **self._rounding_again([*into, out]),
        }
        if moe is not None:
            again = {name: forward[name] for name in ("experts", "launch")}
            slots = forward["elementwise"] - self._elementwise(0)
            act = self.moved(inner * passes * self._slots(moe) * moe.ffn * self.itemsize)
            rounded = self._rounding_again(self._shared_gemms(moe))
            if self.rounds_experts:
                rounded["rounding"] = rounded["rounding"] + self.expert_rounding(moe).forward
            experts: TimeParts = {**again, "elementwise": slots, **rounded}
            return {
                "norm": {"elementwise": norms},
                "act": {"elementwise": act},
                "attention": attention,
                "experts": experts,
            }
        act = self.moved(inner * passes * shape.ffn / tp * self.tokens * self.itemsize)
        mlp: TimeParts = {
            "products": self._gemm_seconds(self._mlp_gemms(shape.ffn)[:1]),
            "elementwise": act,
            **self._rounding_again(self._mlp_gemms(shape.ffn)),
        }
        return {
            "norm": {"elementwise": norms},
            "act": {"elementwise": act},
            "attention": attention,
            "mlp": mlp,
        }

    def _rounding_again(self, gemms: list[Gemm]) -> TimeParts:
        """What a module that runs again rounds again: the input of its last matmul is saved."""
        return {} if self.stack.fp8 is None else {"rounding": self.rounding_seconds(gemms)[0]}

    def _shared_gemms(self, moe: Moe) -> list[Gemm]:
        return self._mlp_gemms(moe.shared_ffn) if moe.shared else []

    def head(self) -> LayerTimes:
        """The LM head and the loss, and again for each MTP layer."""
        shape, grid = self.shape, self.grid
        vocab_shard = shape.vocab / grid.tp
        seconds = self.matmul(2 * self.tokens * shape.width * vocab_shard, narrow=False)
        seconds = (1 + shape.mtp) * seconds / self.stack.head_efficiency
        loss = (1 + shape.mtp) * self.moved(self.stack.loss_bytes * self.tokens * vocab_shard)
        learns = 0.0 if self.stack.frozen else 1.0
        summed = self._accumulated(shape.width * vocab_shard)
        passes = [seconds + loss / 2, seconds + loss / 2, learns * (seconds + summed)]
        if self.stack.memory.chunks_loss:
            chunks = grid.loss_chunks(shape, self.tokens)
            early = self._head_in_chunks(seconds, chunks, learns)
            early = [*early, learns * summed]
            passes = [np.where(chunks > 1, *pair) for pair in zip(early, passes, strict=True)]
        forward, inputs, weights = ({"head": head_seconds} for head_seconds in passes)
        times = LayerTimes(forward, inputs, weights, {})
        # The embedding's lookup counts here too, though the first stage has it.
        for collective in tensor_ends(self.job, 1 + shape.mtp, 1 + shape.mtp):
            self._add(
                times, "tp", self.seconds_of(collective) * (1 - self._hidden["tp"]), collective
            )
        if self.machine.is_cpu:  # an embedding and a head have as many operators as a layer each
            host = self.host_seconds()
            times.forward["launch"], times.inputs["launch"] = 2 * host.forward, 2 * host.backward
        return times

    def _head_in_chunks(self, seconds: Array, chunks: Array, learns: float) -> tuple[Array, Array]:
        """Forward and backward of a head that computes its gradients in forward: every chunk but
        the first reads the sum of the weight's, and backward multiplies it and the input's."""
        shape, tp = self.shape, self.grid.tp
        losses, vocab_shard = 1 + shape.mtp, shape.vocab / tp
        weight = learns * losses * shape.width * vocab_shard * self.itemsize
        loss = losses * self.moved(self.stack.chunk_loss_bytes * self.tokens * vocab_shard)
        sums = np.where(tp > 1, 0.0, self.moved(2 * (chunks - 1) * weight))
        scaled = 2 * (weight + losses * self.tokens * shape.width * self.itemsize)
        return (2 + learns) * seconds + loss + sums, self.moved(scaled)

    def _add_experts(
        self, moe: Moe, forward: TimeParts, inputs: TimeParts, weights: TimeParts
    ) -> None:
        shape, grid = self.shape, self.grid
        tokens = self.tokens / self.split
        # All ranks wait for the rank with the fullest expert: its dispatch, compute and combine.
        slots = self._slots(moe)
        rows = slots * grid.etp + PADDED_ROWS * moe.experts / grid.ep
        inner = (3 if shape.gated else 2) * moe.ffn / grid.etp
        size = moe.experts / grid.ep * shape.width * inner
        router = self._router(2 * tokens * shape.width * moe.experts)
        read = self.moved(size * self.itemsize)
        seconds, late = self.grouped_seconds(2 * rows * shape.width * inner, read, router)
        shared = self._gemm_seconds(self._shared_gemms(moe)) if moe.shared else np.zeros(1)
        moved = self.stack.slot_passes + np.where(grid.ep > 1, self.stack.reorder_passes, 0.0)
        if self.rounds_experts:
            moved = moved * travelling_share(shape.width, self.itemsize)
            rounding = self.expert_rounding(moe)
            forward["rounding"] = forward["rounding"] + rounding.forward
            inputs["rounding"] = inputs["rounding"] + rounding.backward
            weights["rounding"] = rounding.weights
        passes = moved * shape.width + inner
        elementwise = self.moved(passes * slots * grid.etp * self.itemsize)
        for parts, factor in ((forward, 1.0), (inputs, self.stack.elementwise_backward)):
            parts["elementwise"] = parts["elementwise"] + factor * elementwise
            parts["experts"] = seconds + shared
            parts["launch"] = np.full_like(grid.ep, self.stack.expert_wait)
        weights["experts"] = late + shared / self.late_speed
        weights["experts"] = weights["experts"] + self._accumulated(size)

    def _add_context(self, times: LayerTimes) -> None:
        """What context parallelism adds to attention.

        Rings overlap keys and values with attention, which slows it down, and merge a partial
        result at every hop; the last hop of the gradients overlaps with nothing. Only zigzag gives
        all ranks equal work. An all-gather is not hidden, nor are the all-to-alls of Ulysses.
        """
        grid, job = self.grid, self.job
        heads = self.shape.heads / grid.tp * self.shape.value_dim
        merge = self.moved(self.stack.merge_bytes * self.tokens * heads) + self.reach.start
        merges = grid.context_has(lambda kind: kind.merges)
        uneven = (grid.cp > 1) & grid.context_has(lambda kind: not kind.zigzag)
        slowest = np.where(uneven, 2 - 1 / grid.cp, 1.0)
        shown, hidden = (LayerTimes({}, {}, {}, {}) for _ in range(2))
        for collective in context_layer(job):
            of_ring, seconds = collective.kind in ("send", "recv"), self.seconds_of(collective)
            self._add(hidden if of_ring else shown, "cp", seconds, collective)
            if of_ring and np.all(collective.forward == 0):  # gradients: in backward alone
                last = np.where(collective.backward > 0, seconds, 0.0)
                shown.inputs["cp"] = shown.inputs.get("cp", np.zeros(1)) + last
        for name in ("forward", "inputs", "again"):
            own_parts, bare, behind = (
                getattr(layer_times, name) for layer_times in (times, shown, hidden)
            )
            runs = merges & (own_parts["attention"] > 0)
            core = own_parts["attention"] * slowest + np.where(runs, merge * (job.outer - 1), 0)
            own_parts["attention"] = core
            own_parts["cp"] = bare["cp"] + shown_seconds(behind.get("cp", np.zeros(1)), core)


def _repeated_share(rule: Recompute) -> float:
    """How much of a layer's kernels backward launches again, about: attention is a half of them."""
    halves = rule.repeats("attention") + (rule.repeats("mlp") or rule.repeats("experts"))
    return halves / 2
