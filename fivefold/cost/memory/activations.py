"""Memory of forward and backward: the activations of a microbatch and the gradients of a stage.

`Activations` counts what the forward of a layer saves for its backward, op by op, in bytes per
token of the microbatch: inputs of norms and matmuls, queries, keys and values, what attention
returns, and what the MLP computes inside. Tensor parallelism shards what is as wide as the heads or
the MLP. Sequence parallelism shards what is as wide as the model, except inputs that a stack keeps
gathered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fivefold.core.model import Mla, Module, Recompute, Shape
from fivefold.cost import Array, LayoutGrid, fullest_rank_load
from fivefold.cost.hardware import SoftwareStack, StackMemory
from fivefold.cost.layer import MixerSizes

DROPPED_PAIR = 25  # bytes of a query-key pair in backward: six float32 scores, and what is kept
DRAWN_PAIR = 24  # and in forward: three 64-bit draws
CAPPED_PAIR, CAPPED_BACKWARD = 12, 24  # bytes of a pair whose score is capped: float32 scores
LSE = 4  # bytes of a head's log-sum-exp
WIDE = 4  # bytes of a float32 element


NOTHING_AGAIN = Recompute()


class SavedTensor(NamedTuple):
    """Tensors of a layer that wait for its backward."""

    bytes: Array  # per token
    modules: tuple[Module, ...] = ()  # whose recomputation makes them again
    in_attention: bool = False

    def is_remade(self, rule: Recompute) -> bool:
        return any(rule.remakes(module) for module in self.modules)


class Activations:
    """Bytes per token that layers save on one rank, for each layout of a grid."""

    def __init__(
        self,
        shape: Shape,
        stack: SoftwareStack,
        memory: StackMemory,
        grid: LayoutGrid,
        seq: int,
        itemsize: int,
        imbalance: float,
    ) -> None:
        self.shape, self.stack, self.grid, self.memory, self.seq = shape, stack, grid, memory, seq
        self.itemsize, self.imbalance, self.balance = itemsize, imbalance, stack.balance
        self.unfused = stack.attention == "unfused"
        self.split = np.where(grid.sp, grid.tp, 1.0)
        self.heads = shape.heads / grid.tp
        self.kv_heads = np.maximum(shape.kv_heads / grid.tp, 1.0)
        self.residual = shape.width * itemsize / self.split
        self.full_residual = np.full_like(self.split, float(shape.width * itemsize))
        self.mixer = MixerSizes.of(shape, grid.tp, seq)
        self.saved_size = memory.input_bytes or itemsize  # of an element that a matmul reads
        self.head_input = self.input = (
            self.full_residual if memory.gathered_inputs else self.residual
        )
        self.fp8 = fp8 = stack.fp8
        # Codes of an input, which nothing makes again; this rank's tokens are saved as they are.
        self.coded = fp8 is not None and fp8.wgrad == "fp8"
        self.waiting = self.saved_size / itemsize if self.coded else 1.0  # for a weight gradient
        self.coded_slots = fp8 is not None and fp8.experts  # routed experts save codes
        self.slot_size = self.saved_size if fp8 is None else 1 if self.coded_slots else itemsize
        self.input = self.input * self.saved_size / itemsize
        if fp8 is None:
            self.head_input = self.input
        elif not memory.gathered_inputs:
            self.input = np.where(self.split > 1, self.residual, self.input)
        self._saved: dict[tuple[bool, Recompute], Array] = {}
        self._tensors_of: dict[bool, tuple[SavedTensor, ...]] = {}

    @property
    def key(self) -> tuple[Hashable, ...]:
        """All that these depend on, of a grid with one layout."""
        grid, job = self.grid, (self.shape, self.memory, self.seq, self.itemsize, self.imbalance)
        degrees = (grid.tp, grid.sp, grid.cp, grid.ep, grid.etp, grid.ep_nodes, grid.context)
        return *job, self.balance, self.unfused, *(degree.item() for degree in degrees)

    def of_layer(self, i: int) -> Activations:
        """Those of layers that mix tokens as layer i does."""
        return self.of_mixer if self.shape.is_recurrent(i) else self

    @cached_property
    def of_mixer(self) -> Activations:
        """Those of layers without attention."""
        job = (self.stack, self.memory, self.grid, self.seq, self.itemsize, self.imbalance)
        return Activations(self.shape.of_mixer, *job)

    def saved(self, routed: bool, rule: Recompute = NOTHING_AGAIN) -> Array:
        """By one layer, under a rule of recomputation by module; all stages have the same."""
        key = routed, rule
        if key not in self._saved:
            self._saved[key] = self._saved_under(routed, rule)
        return self._saved[key]

    def _saved_under(self, routed: bool, rule: Recompute) -> Array:
        if self.memory.selective == "remade":
            sizes = [tensor.bytes for tensor in self._tensors(routed) if not tensor.is_remade(rule)]
            return sum(sizes, np.zeros(1))
        saved = sum((tensor.bytes for tensor in self._tensors(routed)), np.zeros(1))
        if not rule.modules:
            return saved
        if self.memory.selective == "core":
            return saved - self._core()
        return self._every_second_matmul(routed)

    def remade(self, routed: bool, rule: Recompute) -> Array:
        """What recomputation adds at most in the backward of one layer: attention and MLP are not
        computed again at the same time."""
        if self.memory.selective != "remade":
            return np.maximum(self.saved(routed) - self.saved(routed, rule), 0.0)
        again = [tensor for tensor in self._tensors(routed) if tensor.is_remade(rule)]
        sides = [
            [tensor.bytes for tensor in again if tensor.in_attention == side] for side in (0, 1)
        ]
        return np.maximum(*(sum(side, np.zeros(1)) for side in sides))

    def _tensors(self, routed: bool) -> tuple[SavedTensor, ...]:
        """All that a layer saves without recomputation."""
        if routed not in self._tensors_of:
            self._tensors_of[routed] = tuple(self._all_tensors(routed))
        return self._tensors_of[routed]

    def _all_tensors(self, routed: bool) -> Iterator[SavedTensor]:
        norms = self.shape.inner_norms + self.shape.outer_norms
        masks = 2 * self.memory.mask_bytes * self.shape.width / self.split
        yield SavedTensor(norms * (self.residual + self._statistics / self.split) + masks)
        yield SavedTensor(self.input, self._remade, True)
        yield from self._queries_keys_values()
        yield SavedTensor(self._attended(), ("attention",), True)
        if routed:
            yield from self._routed()
            return
        if self.shape.inner_norms != 1:  # otherwise one norm serves both
            yield SavedTensor(self.input, self._remade)
        yield from self._mlp(self.shape.ffn / self.grid.tp, "mlp")

    @property
    def _remade(self) -> tuple[Module, ...]:
        """Whose recomputation makes inputs of linears again."""
        return () if self.coded or not self.shape.inner_norms else ("norm",)

    def deferred(self, routed: bool) -> Array:
        """Between input and weight gradient: the input and the output gradient of every weight.

        Tensor parallelism has gathered both by then, so this may be more than what was saved.
        """
        shape, size, mla = self.shape, self.itemsize, self.shape.mla
        norms = shape.inner_norms + shape.outer_norms
        num_bytes = (2 * norms + shape.out_bias + shape.mlp_bias) * self.residual
        num_bytes = num_bytes + 2 * self.full_residual * self.waiting
        if self.mixer is not None:
            heads = self.mixer.projected
        elif mla is None:
            heads = ((1 + shape.attention_gate) * self.heads + 2 * self.kv_heads) * shape.head_dim
            if shape.qk_norm != "none":
                num_bytes = num_bytes + 2 * (self.heads + self.kv_heads) * shape.head_dim * size
        else:
            ranks = (mla.q_rank or 0) + mla.kv_rank
            num_bytes = num_bytes + 2 * ranks * size
            heads = 2 * ranks + mla.rope_dim
            heads = heads + self.heads * (shape.head_dim + mla.nope_dim + mla.value_dim)
        num_bytes = num_bytes + (heads + self._read_back) * size * self.waiting
        return num_bytes + (self._deferred_experts() if routed else self._deferred_mlp())

    def beside_experts(self) -> Array:
        """What a layer saves beside the slots as they arrive and what is inside of experts: scores,
        weights, and slots as they come back."""
        moe = self.shape.moe
        assert moe is not None
        back = self.itemsize if self.memory.returned_slots or moe.weigh_inputs else 0
        scores = WIDE * 2 * moe.experts / self.split
        return scores + self.slots() * (self.shape.width * back + WIDE)

    def rounding_copies(self, routed: bool) -> Array | float:
        """Codes of the output gradients of a layer's widest linears, in both orders."""
        if self.fp8 is None:
            return 0.0
        shape, heads = self.shape, self.heads * self.shape.head_dim
        width = heads if routed else (2 if shape.gated else 1) * shape.ffn / self.grid.tp
        return (1 + self.coded) * self.fp8.code_bytes * width

    @property
    def _read_back(self) -> Array:
        """Elements that the linear back to the residual reads."""
        return self.heads * self.shape.value_dim if self.mixer is None else self.mixer.back

    def _deferred_mlp(self) -> Array:
        matrices, inputs = 3 if self.shape.gated else 2, 1 if self.shape.inner_norms == 1 else 2
        inside = matrices * self.shape.ffn / self.grid.tp * self.itemsize
        return (inputs * self.full_residual + inside) * self.waiting

    def _deferred_experts(self) -> Array:
        shape, moe, size = self.shape, self.shape.moe, self.itemsize
        assert moe is not None
        matrices = 3 if shape.gated else 2
        rows = 2 * shape.width + matrices * moe.ffn / self.grid.etp
        waiting = self.slots() * rows * (1 if self.coded_slots else size)
        num_bytes = self.residual + WIDE * moe.experts / self.split + waiting
        if moe.shared:
            shared = 2 * self.full_residual + matrices * moe.shared_ffn / self.grid.tp * size
            num_bytes = num_bytes + shared * self.waiting
        return num_bytes

    def deferred_at_head(self) -> Array:
        """The same for the head and the final norm: the gradient of the logits above all."""
        logit_bytes = self.shape.vocab / self.grid.tp * self.itemsize
        return self.full_residual + logit_bytes + 2 * self.residual

    def inputs(self) -> Array:
        """By one layer with full recomputation."""
        return self.residual

    def at_head(self) -> Array:
        """By the final norm and the head, without logits."""
        num_bytes = self.residual + self._statistics / self.split + self.head_input
        if self.memory.gathered_head_input:
            num_bytes = num_bytes + np.where(self.split > 1, self.full_residual, 0.0)
        return num_bytes

    def rotary_tables(self) -> float:
        """Sines and cosines of a microbatch, which all layers of a stage share."""
        if self.shape.positions != "rotary":
            return 0.0
        return float(WIDE * self.shape.rotated_dim * (1 if self.shape.local_theta is None else 2))

    def backward_gradients(self, routed: bool = False) -> Array:
        """Gradients of activations inside one layer while its backward runs."""
        shape, moe, copies = self.shape, self.shape.moe, self.memory.backward_copies * self.itemsize
        if moe is None or not routed or not self.memory.result_bytes:
            return copies * shape.ffn / self.grid.tp
        if self.coded_slots:
            return self.slots() * self._operands(moe.ffn / self.grid.etp)
        results = self.memory.result_bytes * shape.width
        return self.slots() * np.maximum(results, copies * moe.ffn / self.grid.etp)

    def _operands(self, inner: Array) -> Array:
        """Bytes of a slot in the backward of experts in fp8, beside all that was saved: gradients,
        their codes, and the operands of weight gradients as values. Of gate and up, which begin
        when what follows them is free, or of down."""
        width, size, into = self.shape.width, self.itemsize, 2 if self.shape.gated else 1
        first = 2 * width * size + inner * (size + into - 1)
        return np.maximum(first, width * (size + 1) + 2 * inner * size)

    def context_buffers(self) -> Array:
        """Keys and values of other context ranks, and their float32 gradients: the current block
        and the next one of the ring, or all blocks of an all-gather."""
        if self.mixer is not None:  # Ulysses has no keys of other ranks
            return np.zeros(1)
        width = (self.shape.head_dim + self.shape.value_dim) * self.kv_heads
        ring = width * (2 * self.itemsize + WIDE)
        all_of_them = width * self.grid.cp * (self.itemsize + WIDE)
        gathers = self.grid.context_has(lambda kind: kind.gathers)
        return np.where(self.grid.cp > 1, np.where(gathers, all_of_them, ring), 0.0)

    def dispatch_buffers(self) -> Array:
        """Slots on their way to experts and back, of one layer; 0 if backward has more at once."""
        if self.shape.moe is None or self.memory.result_bytes:
            return np.zeros(1)
        return np.where(self.grid.ep > 1, 2 * self.slots() * self.shape.width * self.itemsize, 0.0)

    @property
    def _statistics(self) -> float:
        return self.memory.statistics * (2 if self.shape.norm == "layer" else 1)

    def _queries_keys_values(self) -> Iterator[SavedTensor]:
        """As attention reads them; with QK norms, also as the norms read them."""
        shape, size = self.shape, self.itemsize
        if self.mixer is not None:
            yield SavedTensor(self.mixer.projected * size, ("attention",), True)
            return
        if shape.mla is not None:
            yield from self._latents(shape.mla)
            return
        queries = (1 + shape.attention_gate) * self.heads
        num_bytes = (queries + 2 * self.kv_heads) * shape.head_dim * size
        if shape.qk_norm != "none":
            num_bytes = num_bytes + (self.heads + self.kv_heads) * shape.head_dim * size
        if self.memory.packed and shape.kv_heads == shape.heads:
            num_bytes = num_bytes + 2 * self.kv_heads * shape.head_dim * size
        yield SavedTensor(num_bytes, ("attention",), True)

    def _latents(self, mla: Mla) -> Iterator[SavedTensor]:
        """Latents before and after their norms, on every tp rank; heads of queries, keys and
        values."""
        ranks, ones = (mla.q_rank or 0) + mla.kv_rank, np.ones_like(self.heads)
        heads = 2 * self.shape.head_dim + mla.value_dim
        heads = heads + (mla.nope_dim if self.memory.value_views else 0)
        yield SavedTensor((ranks + mla.rope_dim) * self.itemsize * ones, ("attention",), True)
        remade: tuple[Module, ...] = ("norm",) if self.memory.remakes_heads else ()
        yield SavedTensor(self.heads * heads * self.itemsize, (*remade, "attention"), True)
        yield SavedTensor(ranks * self.itemsize * ones, ("norm", "attention"), True)

    def _attended(self) -> Array:
        # As attention made it and as it is read, if these differ: of dropped pairs, or with a gate.
        copies = (2 if self.by_formula else 1) + self.shape.attention_gate
        size = copies * self.itemsize + (self.saved_size if self.coded else 0.0)
        return self._read_back * size + self._core()

    def kept_attention(self) -> Array:
        """By one layer with full recomputation whose attention does not run again."""
        copies = 2 if self.by_formula else 1
        result = self.heads * self.shape.value_dim * copies * self.itemsize
        return result + self._core() + self.exchanged()

    def exchanged(self) -> Array:
        """Queries, keys, values and results as context ranks exchange them, where these are other
        tensors than those of a layer: under Ulysses, and of latent attention in one width."""
        grid, shape, size = self.grid, self.shape, self.shape.attended_dim * self.itemsize
        swaps = grid.context_has(lambda kind: kind.heads in ("all", "some"))
        all_of_them = grid.context_has(lambda kind: kind.heads == "all")
        widened = shape.mla is not None
        heads = self.kv_heads
        copied = np.lcm(np.maximum(heads, 1).astype(np.int64), grid.cp.astype(np.int64))
        heads = np.where(all_of_them, copied, heads)
        num_bytes = (self.heads + 2 * heads) * size + swaps * self.heads * size
        return np.where((grid.cp > 1) & (swaps | widened), num_bytes, 0.0)

    @property
    def by_formula(self) -> bool:
        """Whether our own attention drops or caps scores, which no fused kernel does our way."""
        changed = self.shape.attention_dropout > 0 or self.shape.score_cap is not None
        return self.memory.unit_by_unit and changed

    def pairs(self) -> tuple[Array | float, Array | float]:
        """Scores of one layer in its forward and in its backward, if all are in memory."""
        pairs = self.heads * self.seq if self.by_formula else 0.0
        if not self.shape.attention_dropout:
            return pairs * CAPPED_PAIR, pairs * CAPPED_BACKWARD
        return pairs * DRAWN_PAIR, pairs * DROPPED_PAIR

    def _core(self) -> Array:
        """What attention saves for itself: its scores, or their log-sum-exp."""
        if self.mixer is not None:
            return self.mixer.saved * self.itemsize
        return self.heads * (self.memory.score_bytes * self.seq if self.unfused else LSE)

    def _mlp(
        self, width: Array, module: Module, slots: Array | float = 1.0, routed: bool = False
    ) -> Iterator[SavedTensor]:
        """Inside an MLP of this width: what the activation reads, and what the last matmul does."""
        copies = (self.memory.gated_copies if self.shape.gated else 2.0) - 1
        read = self.saved_size if self.memory.narrow_activations else self.itemsize
        yield SavedTensor(slots * copies * read * width, (module,))
        coded = self.coded_slots if routed else self.coded
        again: tuple[Module, ...] = (module,) if coded else ("act", module)
        yield SavedTensor(slots * (self.slot_size if routed else self.saved_size) * width, again)

    def slots(self) -> Array:
        """Rows of this rank's experts per token of the microbatch."""
        moe = self.shape.moe
        assert moe is not None
        cuts = self.grid.cp * self.split
        load = fullest_rank_load(moe, self.grid.ep, self.imbalance, self.balance, cuts)
        return load * moe.top_k * self.grid.etp / self.split

    def _routed(self) -> Iterator[SavedTensor]:
        """The router's input and float32 scores; slots as they arrive with their weights, inside
        the experts, and as they come back or, if inputs are weighed, before that; and the shared
        experts, whose input is the router's if that is not wide."""
        shape, moe, wide = self.shape, self.shape.moe, self.memory.wide_router
        assert moe is not None
        router = (WIDE if wide else self.itemsize) * shape.width / self.split
        yield SavedTensor(router, ("norm",))
        arrived = self.slots() * shape.width * self.slot_size
        yield SavedTensor(self.beside_experts() + arrived, ("experts",))
        yield from self._mlp(moe.ffn / self.grid.etp, "experts", self.slots(), routed=True)
        if moe.shared:
            if wide:
                yield SavedTensor(self.input)
            yield from self._mlp(moe.shared_ffn / self.grid.tp, "experts")

    def _gate_and_up(self, routed: bool) -> Iterator[Array]:
        """Results of the matmuls into the MLPs' widths: gate and up."""
        shape, moe = self.shape, self.shape.moe
        copies = (2.0 if shape.gated else 1.0) * self.itemsize
        if not routed or moe is None:
            yield copies * shape.ffn / self.grid.tp
            return
        yield self.slots() * copies * moe.ffn / self.grid.etp
        yield copies * moe.shared_ffn / self.grid.tp

    def _every_second_matmul(self, routed: bool) -> Array:
        """The layer's input and result; queries, values, attention, and gate."""
        shape = self.shape
        heads = (self.heads * shape.head_dim + self.kv_heads * shape.value_dim) * self.itemsize
        half = sum(self._gate_and_up(routed)) / (2.0 if shape.gated else 1.0)
        return 2 * self.residual + heads + self._attended() + half
