"""One stage on one rank: its slice of the model, the data units of it, and its queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fivefold.model.batch import TokenBatch
from fivefold.model.decoder import Decoder
from fivefold.parallel.data import DataParallel
from fivefold.parallel.deferred import GradientQueue


@dataclass(frozen=True)
class StageChunk:
    """What the pipeline drives. Without a `queue` autograd delivers all gradients itself."""

    stage: int
    model: Decoder
    data: DataParallel
    queue: GradientQueue | None

    def forward(self, x: Tensor | None, batch: TokenBatch, microbatch: int) -> Tensor:
        return self.model(batch.tokens if x is None else x, batch)

    def backward(self, run: Callable[[], None], microbatch: int, split: bool, last: bool) -> None:
        with self.data.backward(last):
            if self.queue is None:
                run()
            elif split:
                with self.queue.keeping(microbatch):
                    run()
            else:
                with self.queue.taking(self.data):
                    run()

    def weight_gradients(self, microbatch: int, last: bool) -> None:
        assert self.queue is not None, "a backward that was not split owes nothing"
        with self.data.collecting(last):
            self.queue.settle(microbatch, self.data)
