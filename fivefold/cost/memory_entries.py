"""What one rank holds, category by category: the entries of a ledger."""

from __future__ import annotations

import numpy as np

from fivefold.core.count import layer_kinds, layer_parameters, mtp_parameters
from fivefold.core.machine import Machine
from fivefold.core.shape import Shape
from fivefold.cost.activations import Activations, GradientBytes, Gradients, Moment
from fivefold.cost.grid import OFFLOADS, Array, Grid
from fivefold.cost.pipeline_ranks import EndStage, keeps_all
from fivefold.cost.stack import SoftwareStack, StackMemory, keeps_of

Parts = dict[str, Array]
MOMENTS = 8  # bytes of an element: AdamW's two, in float32


class MemoryEntries:
    """What there is to count for one model on one machine under one stack."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        stack: SoftwareStack,
        grid: Grid,
        seq: int,
        itemsize: int,
        imbalance: float,
    ) -> None:
        self.shape, self.machine, self.stack, self.grid = shape, machine, stack, grid
        self.keeps: StackMemory = keeps_of(stack.name)
        self.itemsize = itemsize
        self.tokens = grid.rows * seq / grid.cp
        self.kept = Activations(shape, stack, self.keeps, grid, seq, itemsize, imbalance)
        self.master_bytes = 0 if itemsize == 4 else self.keeps.master_bytes

    def of(self, stage: EndStage) -> tuple[Parts, ...]:
        """One rank of the pipeline by category, at each moment that may be its fullest, without
        what the allocator caches."""
        return self._in_turn(stage) if self.keeps.in_turn else (self._at_once(stage),)

    def _in_turn(self, stage: EndStage) -> tuple[Parts, ...]:
        """Where the backward of the layers begins, where it ends, and before both at the loss."""
        held = self.held_by(stage)
        kept, working = self._layers(stage)
        kept = kept + self.kept.tables() * self.tokens * self.grid.chunks
        matrix = self.shape.vocab * self.shape.width / self.grid.tp
        size, owned = self.keeps.gradient_bytes, self._sliced(held, 1)
        sums = Gradients(held, stage, self.grid, matrix, owned, size)
        begin, end = kept * stage.flight, kept * sums.behind()
        # A tied weight has two gradients: the head's waits for the embedding's, and for their sum.
        tied = np.where(self.shape.tied & (self.grid.pp == 1), matrix * self.itemsize, 0.0)
        looked_up = stage.embedding * matrix * self.itemsize + 2 * tied
        states, messages, waiting = self._states(held), self._messages(), self._waiting()
        gathered, waiting = self._gathered(held, stage, np.zeros(1)), stage.head * waiting
        both = (waiting, messages + self._buffers(), gathered)
        last, first = begin + working + tied, end + np.maximum(working + tied, looked_up)
        found = [
            self._moment(states, sums.at_last_layer(), last, *both),
            self._moment(states, sums.at_first_layer(), first, *both),
        ]
        if stage.head.any():
            gathered = self._gathered(held, stage, stage.head * matrix)
            rest = (waiting + stage.head * self._loss(), messages, gathered)
            found.append(self._moment(states, sums.at_turn(), begin + self._at_head(stage), *rest))
        return tuple(found)

    def _moment(
        self,
        states: Parts,
        sums: Moment,
        activations: Array,
        logits: Array,
        buffers: Array,
        gathered: Array,
    ) -> Parts:
        return {
            **states,
            "gradients": sums.stay,
            "activations": activations,
            "logits": logits,
            "buffers": buffers,
            "prefetch": gathered + sums.fly,
            **self._aside(activations),
        }

    def _aside(self, activations: Array) -> Parts:
        """What is not a tensor's."""
        context = np.full((1,), self.keeps.context_bytes + self.keeps.pool_bytes)
        return {"context": context, "margin": self.keeps.fragments * activations}

    def _gathered(self, held: GradientBytes, stage: EndStage, end: Array) -> Array:
        """ZeRO-3: weights that are whole. Those of a layer, or an `end`, and the unit ahead; in a
        pipeline, whose microbatches lie far apart, all of them over the whole step."""
        grid = self.grid
        unit = (held.dense - held.ends) / np.maximum(stage.layers.all, 1.0)
        routed = held.experts / np.maximum(stage.layers.routed, 1.0)
        ahead = np.where(routed > 0, routed, unit)
        here = np.where(end > 0, end, unit + routed)
        whole = np.where(grid.pp > 1, held.all, np.minimum(here + ahead, held.all)) * self.itemsize
        return np.where((grid.zero == 3) & (grid.shard * grid.cp > 1), whole, 0.0)

    def _at_once(self, stage: EndStage) -> Parts:
        """All of it together."""
        held = self.held_by(stage)
        kept, working = self._layers(stage)
        parts = self._states(held)
        # Logits are gone when the layers' backward begins.
        working = np.maximum(working - stage.head * self._loss(), 0.0)
        parts["activations"] = kept * stage.flight + working + self._at_head(stage)
        parts["logits"] = stage.head * (self._loss() + self._waiting())
        parts["buffers"] = self._messages() + self._buffers()
        parts["prefetch"] = self._prefetch(held, stage)
        parts |= self._aside(parts["activations"])
        if self.keeps.backward_bytes:
            live = parts["activations"] + parts["logits"]
            behind = kept * (stage.flight - 1) + self.keeps.backward_bytes * held.all
            parts["gradients"] = parts["gradients"] + np.maximum(behind - live, 0.0)
        return parts

    def held_by(self, stage: EndStage) -> GradientBytes:
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
        return GradientBytes(dense + ends + final, experts, ends)

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

    def _counts(self, stage: EndStage) -> dict[int, Array]:
        """Layers of each kind, by the number of one of them."""
        shape, (layers, routed) = self.shape, stage.layers
        if shape.moe is None:
            return {0: layers}
        kinds = {shape.is_moe_layer(i): i for i in layer_kinds(shape)}
        plain = {kinds[False]: layers - routed} if False in kinds else {}
        return {**plain, kinds[True]: routed}

    def _states(self, held: GradientBytes) -> Parts:
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

    def _sliced(self, held: GradientBytes, from_zero: int) -> Array:
        """Parameters of a rank, of a slice of them from this ZeRO stage on."""
        grid = self.grid
        sliced = grid.zero >= from_zero
        dense = held.dense / np.where(sliced, grid.shard * grid.cp, 1.0)
        if self.shape.moe is None:
            return dense
        return dense + held.experts / np.where(sliced, grid.edp, 1.0)

    def host(self, stage: EndStage) -> Array:
        """What offload moves to the host: states, and the slices of weights under ZeRO-3. Of states
        that lie on disks, two layers' are there: one that is updated, one on its way."""
        grid, owned = self.grid, self._sliced(self.held_by(stage), 1)
        sliced = (grid.zero == 3) & (grid.shard * grid.cp > 1)
        buffers = np.minimum(2 / np.maximum(stage.layers.all, 1.0), 1.0)
        states = np.where(grid.offload == OFFLOADS.index("nvme"), buffers, 1.0)
        size = states * (MOMENTS + self.master_bytes) + np.where(sliced, self.itemsize, 0.0)
        return np.where(grid.offload > 0, owned * size, 0.0)

    def disk(self, stage: EndStage) -> Array:
        """States and master weights that lie on disks."""
        owned = self._sliced(self.held_by(stage), 1)
        there = self.grid.offload == OFFLOADS.index("nvme")
        return np.where(there, owned * (MOMENTS + self.master_bytes), 0.0)

    def _layers(self, stage: EndStage) -> tuple[Array, Array]:
        """What a microbatch keeps, and what one layer needs while it runs again and back."""
        repeat, covered = self.grid.recompute, self.stack.recomputed
        kept, working = np.zeros(1), np.zeros(1)
        counts = self._counts(stage)
        for i, count in counts.items():
            routed = self.shape.is_moe_layer(i)
            extra = self.shape.mtp * stage.head if i == max(counts) else 0.0
            everything = self.kept.everything(routed)
            few, again = everything, np.zeros(1)
            if (repeat > 0).any():
                few = np.where(repeat == 1, self.kept.selected(routed), everything)
                full = covered * self.kept.inputs() + (1 - covered) * everything
                few = np.where(repeat == 2, full, few)
                again = np.where(repeat > 0, self._again(repeat, everything, few), 0.0)
            kept = kept + (count + extra) * few
            inside = np.where(count > 0, again * self.tokens + self._inside(i, routed), 0.0)
            working = np.maximum(working, inside)
        return kept * self.tokens, working

    def _again(self, repeat: Array, everything: Array, few: Array) -> Array:
        """What a layer that runs again has beside what it kept."""
        there = self.kept.inputs() if self.keeps.in_turn else 0.0
        return np.where(repeat == 2, everything - there, np.maximum(everything - few, 0.0))

    def _inside(self, i: int, routed: bool) -> Array:
        """Gradients in the backward of a layer: of activations, or of its largest weight, which are
        there one after the other."""
        found = self.kept.inside(routed) * self.tokens
        if not self.keeps.in_turn:
            return found
        shape, matrices = self.shape, 3 if self.shape.gated else 2
        weight = shape.width * shape.ffn / self.grid.tp
        if routed:
            spread = matrices * self.grid.ep * self.grid.etp
            weight = layer_parameters(shape, i).experts / spread
        return np.maximum(found, weight * self.itemsize)

    def _at_head(self, stage: EndStage) -> Array:
        """The head's input, and its copies for multi-token prediction."""
        return stage.head * (1 + self.shape.mtp) * self.kept.at_head() * self.tokens

    def _loss(self) -> Array:
        """Logits of the one loss that is computed, and their gradients."""
        keeps, tp = self.keeps, self.grid.tp
        size = np.where(tp > 1, keeps.split_logits_bytes or keeps.logits_bytes, keeps.logits_bytes)
        return size * self.tokens * self.shape.vocab / tp

    def _waiting(self) -> Array:
        """What other losses keep until their backward."""
        losses = 1.0 + self.shape.mtp
        if (every := keeps_all(self.grid)).any():
            losses = losses * np.where(every, self.grid.microbatches, 1.0)
        words = self.tokens * self.shape.vocab / self.grid.tp
        return (losses - 1) * self.keeps.loss_bytes * words

    def _prefetch(self, held: GradientBytes, stage: EndStage) -> Array:
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

    def _passing_layers(self, stage: EndStage) -> Array | float:
        """Layers with whole gradients: some; or a chunk's that sums, and one's on its way."""
        if not self.stack.scatters_rounds:
            return self.keeps.passing_layers
        return 2 * stage.layers.all / self.grid.chunks

    def _messages(self) -> Array:
        """Those of the pipeline."""
        return np.where(self.grid.pp > 1, 4 * self.kept.residual, 0.0) * self.tokens

    def _buffers(self) -> Array:
        """Gathered tokens, the ring, and experts' slots."""
        kept = self.kept
        found = np.where(kept.split > 1, self.keeps.gather_buffers * kept.whole, 0.0)
        return (found + kept.of_other_ranks() + kept.between_experts()) * self.tokens
