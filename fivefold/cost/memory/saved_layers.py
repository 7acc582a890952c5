"""What the layers of a stage hold for one microbatch: saved by its forward, made again in its
backward, and left between its input and weight gradients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fivefold.core.model import Recompute, Shape, layer_kinds, layer_parameters
from fivefold.cost import Array
from fivefold.cost.hardware import SoftwareStack
from fivefold.cost.memory.activations import Activations
from fivefold.cost.stages import RankLayers, RankStage, looped


class SavedLayers:
    """Bytes of a microbatch in the layers of a stage, for every layout of a grid."""

    def __init__(self, activations: Activations, stack: SoftwareStack, tokens: Array) -> None:
        self.activations, self.stack, self.tokens = activations, stack, tokens
        self.shape, self.grid, self.memory = activations.shape, activations.grid, activations.memory

    def of(self, stage: RankStage) -> tuple[Array, Array]:
        """What a microbatch saves, and what one layer needs during recomputation and backward."""
        return self.saved(stage), self.working(stage)

    def working(self, stage: RankStage) -> Array:
        """What one layer needs during recomputation and backward."""
        working = np.zeros(1)
        for rule, layers in self._by_rule(stage):
            for i, count in layer_numbers(self.shape, layers).items():
                backward = self._again(rule, layers, i) * self.tokens
                backward = backward + self._backward_gradients(i)
                working = np.maximum(working, np.where(count > 0, backward, 0.0))
        return working

    def saved(self, stage: RankStage) -> Array:
        """What a microbatch saves."""
        num_bytes = np.zeros(1)
        for rule, layers in self._by_rule(stage):
            counts = layer_numbers(self.shape, layers)
            if rule.full:
                num_bytes = (
                    num_bytes + self._segments(rule, stage, layers) * self.activations.inputs()
                )
            for i, count in counts.items():
                # Layers that predict ahead are like the last ones.
                ahead = self._ahead(i) * stage.head * (count > 0)
                num_bytes = num_bytes + (count + ahead) * self._saved_beside_inputs(rule, i)
        return num_bytes * self.tokens * (1 - self.memory.offloaded)

    def most(self, stage: RankStage, saved: Array, done: Array | float = 0.0) -> Array:
        """What microbatches that `saved` so much hold at most, in flight or while they wait for
        weight gradients; after so many are `done`."""
        num_bytes = saved * (stage.flight - done)
        if stage.deferred:
            left, share = self._left(stage), self._share_of_last_chunk(stage)
            for before, waiting in stage.deferred:
                in_layers = waiting * share
                before = before - (in_layers - waiting)
                early = np.maximum(before - np.maximum(done - in_layers, 0.0), 0.0)
                late = np.maximum(in_layers - done, 0.0)
                num_bytes = np.maximum(num_bytes, early * saved + late * left)
        return num_bytes

    def _share_of_last_chunk(self, stage: RankStage) -> Array:
        """Layers of a rank's last chunk over the mean of its chunks. In a loop weight gradients of
        that one wait, and layers that do not divide by chunks are in the last ones."""
        layers, chunks = np.maximum(stage.layers.all, 1.0), self.grid.chunks
        return np.where(looped(self.grid), np.ceil(layers / chunks) * chunks / layers, 1.0)

    def microbatch_bytes(self, stage: RankStage) -> tuple[Array, Array]:
        """Bytes of a microbatch from its forward on, and between its input and weight gradients."""
        return self.saved(stage), self._left(stage)

    def _left(self, stage: RankStage) -> Array:
        """Bytes of a microbatch between its input and weight gradients."""
        left = stage.head * (1 + self.shape.mtp) * self.activations.deferred_at_head()
        left = left + stage.embedding * self.activations.residual
        counts = layer_numbers(self.shape, stage.layers)
        for i, count in counts.items():
            ahead = self._ahead(i) * stage.head
            deferred = self.activations.of_layer(i).deferred(self.shape.is_moe_layer(i))
            left = left + (count + ahead) * deferred
        return left * self.tokens

    def _ahead(self, i: int) -> int:
        """Layers that predict ahead and are like layer i: all are like the last one."""
        shape, last = self.shape, self.shape.layers - 1
        alike = all(of(i) == of(last) for of in (shape.is_moe_layer, shape.is_recurrent))
        return shape.mtp if alike else 0

    def _by_rule(self, stage: RankStage) -> Iterator[tuple[Recompute, RankLayers]]:
        """The layers of a rank by their rule of recomputation."""
        if stage.by_rule:
            yield from stage.by_rule
            return
        for number, rule in enumerate(self.grid.rules):
            matches = self.grid.recompute == number
            if matches.any():
                yield rule, RankLayers(*(np.where(matches, count, 0.0) for count in stage.layers))

    def _segments(self, rule: Recompute, stage: RankStage, layers: RankLayers) -> Array:
        """How many inputs full recomputation saves: one for each segment of every chunk."""
        chunks = self.grid.chunks
        segments = chunks * np.ceil(layers.all / chunks / rule.blocks) * self.stack.recomputed
        return segments + self.shape.mtp * stage.head * (layers.all > 0)

    def _saved_beside_inputs(self, rule: Recompute, i: int) -> Array:
        """What layer i saves, without the inputs of segments."""
        activations, routed = self.activations.of_layer(i), self.shape.is_moe_layer(i)
        if not rule.full:
            return activations.saved(routed, rule)
        saved_bytes = self.stack.recomputed * self._kept(rule)
        return (1 - self.stack.recomputed) * activations.saved(routed) + saved_bytes

    def _kept(self, rule: Recompute) -> Array | float:
        """Of attention, in a layer that is recomputed."""
        return self.activations.kept_attention() if rule.keeps_attention else 0.0

    def _again(self, rule: Recompute, layers: RankLayers, i: int) -> Array:
        """What recomputation adds to what layers like i saved, at most: a segment, or a module."""
        activations, routed = self.activations.of_layer(i), self.shape.is_moe_layer(i)
        if not rule.full:
            return activations.remade(routed, rule)
        input_bytes = self.activations.inputs() if self.memory.unit_by_unit else 0.0
        blocks = np.minimum(rule.blocks, np.maximum(layers.all, 1.0))
        return blocks * (activations.saved(routed) - self._kept(rule)) - input_bytes

    def _backward_gradients(self, i: int) -> Array:
        """Gradients in the backward of a layer: of activations, or of its largest weight; they are
        not alive at the same time."""
        routed = self.shape.is_moe_layer(i)
        num_bytes = self.activations.backward_gradients(routed) * self.tokens
        besides = self.activations.pairs()[1] + self.activations.rounding_copies(routed)
        num_bytes = num_bytes + besides * self.tokens
        if not self.memory.unit_by_unit:
            return num_bytes
        shape, matrices = self.shape, 3 if self.shape.gated else 2
        weight = shape.width * shape.ffn / self.grid.tp
        if routed:
            spread = matrices * self.grid.ep * self.grid.etp
            weight = layer_parameters(shape, i).experts / spread
            if self.activations.coded_slots:  # operands that are values again, and their products
                stacks = 2 if shape.gated else 1
                return num_bytes + stacks * weight * self.activations.itemsize
        return np.maximum(num_bytes, weight * self.activations.itemsize)


def layer_numbers(shape: Shape, layers: RankLayers) -> dict[int, Array]:
    """How many layers of each kind, by the index of one of them."""
    first: dict[tuple[bool, bool], int] = {}
    for i in layer_kinds(shape):
        first.setdefault((shape.is_moe_layer(i), shape.is_recurrent(i)), i)
    return {i: layers.kinds[kind] for kind, i in first.items()}
