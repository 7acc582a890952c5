"""Memory of the head and its losses: inputs, logits, and what waits for the backward of a loss."""

from __future__ import annotations

import numpy as np

from fivefold.cost import Array
from fivefold.cost.memory.activations import Activations
from fivefold.cost.stages import holds_all_microbatches


class LossMemory:
    """Bytes of the losses of the last stage, for every layout of a grid."""

    def __init__(self, activations: Activations, tokens: Array) -> None:
        self.activations, self.tokens = activations, tokens
        self.shape, self.grid, self.memory = activations.shape, activations.grid, activations.memory
        self.itemsize, self.chunks = activations.itemsize, np.ones(1)
        if self.memory.chunks_loss:
            self.chunks = self.grid.loss_chunks(self.shape, tokens)
        self.chunked = self.chunks > 1

    def input(self) -> Array:
        """Of the head, for the loss that is being computed."""
        return self.activations.at_head() * self.tokens

    def other_inputs(self) -> Array:
        """Of the head, for losses that wait for their backward."""
        return (self._number() - 1) * self.input()

    def computed(self) -> Array:
        """Logits of the loss that is being computed, and their gradients; if it is computed in
        chunks, those of a chunk, and the gradients that wait for the backward."""
        memory, tp = self.memory, self.grid.tp
        size = np.where(
            tp > 1, memory.split_logits_bytes or memory.logits_bytes, memory.logits_bytes
        )
        num_logits, capped = self.tokens * self.shape.vocab / tp, self.shape.logit_cap is not None
        size, wide = (
            num_bytes + capped * self.itemsize for num_bytes in (size, memory.chunk_bytes)
        )
        if not self.chunked.any():
            return size * num_logits
        chunk, waiting = num_logits / self.chunks, self.gradients()
        full_bytes = chunk * (self.itemsize + wide) + waiting
        # Over a split vocabulary, chunks are those of what is wide.
        split = num_logits * self.itemsize + np.maximum(chunk * wide, waiting)
        return np.where(self.chunked, np.where(tp > 1, split, full_bytes), size * num_logits)

    def gradients(self) -> Array:
        """Of the input and the weight of a head that computes them in its forward."""
        weight = self.shape.vocab * self.shape.width / self.grid.tp
        return (self.tokens * self.shape.width + weight) * self.itemsize

    def other_losses(self) -> Array:
        """What other losses save until their backward."""
        saved = self.memory.loss_bytes * self.tokens * self.shape.vocab / self.grid.tp
        return (self._number() - 1) * np.where(self.chunked, self.gradients(), saved)

    def _number(self) -> Array:
        """Losses that are there at once: one for each prediction of a token; of all microbatches,
        if no backward comes before the last forward."""
        num_losses = np.full(1, 1.0 + self.shape.mtp)
        if (every := holds_all_microbatches(self.grid)).any():
            num_losses = num_losses * np.where(every, self.grid.microbatches, 1.0)
        return num_losses
