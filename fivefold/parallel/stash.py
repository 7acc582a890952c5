"""Weights of some updates ago: what an asynchronous pipeline computes with.

A microbatch's backward must see the weights that its forward saw, while updates go on between the
two. A version is a set of leaves with the values of one update; microbatches in flight keep theirs,
and a version that none will use again is dropped. The optimizer's own weights come on top.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fivefold.model.batch import TokenBatch
from fivefold.parallel.chunk import Chunk

Version = dict[str, nn.Parameter]


class StashingChunk:
    """A chunk that updates its weights between microbatches, every so many of them.

    `version_of` says on which version the next microbatch is computed, given its number and how
    many updates there have been; it never goes back. `update` is called when an update is due.
    """

    def __init__(
        self,
        chunk: Chunk,
        every: int,
        version_of: Callable[[int, int], int],
        update: Callable[[], None],
    ) -> None:
        assert chunk.queue is None, "no asynchronous schedule splits its backward"
        self.chunk, self.every = chunk, every
        self.version_of, self.update = version_of, update
        self.num_updates = self.num_forwards = 0
        self.most_versions = 0
        self.used: dict[int, int] = {}  # version by microbatch in flight
        self.versions: dict[int, Version] = {}
        names = {id(parameter): name for name, parameter in chunk.model.named_parameters()}
        self.own = dict(chunk.model.named_parameters())
        self.places = [
            (module, attribute, names[id(parameter)])
            for module in chunk.model.modules()
            for attribute, parameter in module.named_parameters(recurse=False)
        ]
        self._add_version()

    def forward(self, x: Tensor | None, batch: TokenBatch, microbatch: int) -> Tensor:
        self.used[microbatch] = self.version_of(microbatch, self.num_updates)
        self.num_forwards += 1
        self._install(self.versions[self.used[microbatch]])
        return self.chunk.forward(x, batch, microbatch)

    def backward(self, run: Callable[[], None], microbatch: int, split: bool, last: bool) -> None:
        leaves = self.versions[self.used.pop(microbatch)]
        self._install(leaves)
        due = (microbatch + 1) % self.every == 0
        data = self.chunk.data
        with data.backward(due):
            run()
            for name, leaf in leaves.items():
                assert leaf.grad is not None
                data.add_gradient(self.own[name], leaf.grad)
                leaf.grad = None
        if due:
            self.update()
            self.num_updates += 1
            self._add_version()

    def weight_gradients(self, microbatch: int, last: bool) -> None:
        raise AssertionError("no asynchronous schedule splits its backward")

    def restore(self) -> None:
        """Give the model its own weights back."""
        self._install(self.own)

    def _add_version(self) -> None:
        self.versions[self.num_updates] = {
            name: nn.Parameter(own.detach().clone()) for name, own in self.own.items()
        }
        following = self.version_of(self.num_forwards, self.num_updates)
        oldest = min([following, *self.used.values()])
        self.versions = {
            number: leaves for number, leaves in self.versions.items() if number >= oldest
        }
        self.most_versions = max(self.most_versions, len(self.versions))

    def _install(self, weights: Version | dict[str, nn.Parameter]) -> None:
        for module, attribute, name in self.places:
            setattr(module, attribute, weights[name])
