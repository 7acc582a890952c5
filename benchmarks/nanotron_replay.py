"""Replay what one rank of nanotron allocates through the rules of torch's caching allocator.

    python -m benchmarks.nanotron_replay hf_sweep.jsonl

prints the replayed and the measured GiB of the first rank of every run that has a peak. Tensors are
those of nanotron's source (branch nouamane/bench2): a Llama with as many keys as queries, 1F1B, no
recomputation. Nothing is fitted.

Rules of torch 2.1: best fit; up to 1 MiB from segments of 2 MiB, up to 10 MiB from 20 MiB, above it
a segment of its own; a rest of more than 1 MiB is split off. A block that NCCL has read is free
once the GPU has passed, and the host may be ahead of the GPU by a full launch queue.
"""

from __future__ import annotations

import bisect
import json
import math
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.cost.hardware.stack import LAUNCH_QUEUE

MIB, GIB = 2**20, 2**30
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT = MIB, 2 * MIB, 20 * MIB, 10 * MIB
WORKSPACE = 32 * MIB  # cuBLAS on Hopper, one for each thread that computes
POOL = 77 * GIB  # of an H100, beside CUDA and NCCL
STEPS, MOST_MICROBATCHES = 3, 8  # what the sweep ran before it read the peak; enough to settle


@dataclass(eq=False)
class Block:
    """Bytes of a segment, with its neighbours there."""

    start: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.size, self.start


@dataclass
class CachingPool:
    """Segments and their free blocks, those of small tensors apart."""

    reserved: int = 0
    end: int = 0
    spare: dict[bool, list[Block]] = field(default_factory=lambda: {True: [], False: []})

    def take(self, size: int) -> Block:
        size = max(512, -(-size // 512) * 512)
        small = size <= SMALL
        found = self._best(size, small) or self._segment(size, small)
        rest = found.size - size
        if rest >= 512 if small else rest > SMALL:
            split = Block(found.start + size, rest, small, True, found, found.after)
            if found.after is not None:
                found.after.before = split
            found.after, found.size = split, size
            self._add(split)
        found.free = False
        return found

    def give(self, block: Block) -> None:
        """Free a block, and join it with free neighbours."""
        if block.before is not None and block.before.free:
            self._remove(block.before)
            block = self._joined(block.before, block)
        if block.after is not None and block.after.free:
            self._remove(block.after)
            block = self._joined(block, block.after)
        block.free = True
        self._add(block)

    def _joined(self, one: Block, other: Block) -> Block:
        one.size, one.after = one.size + other.size, other.after
        if other.after is not None:
            other.after.before = one
        return one

    def _segment(self, size: int, small: bool) -> Block:
        least = SMALL_SEGMENT if small else LARGE_SEGMENT
        if size >= OWN_SEGMENT:
            least = -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + least > POOL:
            raise MemoryError
        self.reserved += least
        self.end += least + GIB  # segments never touch
        return Block(self.end, least, small)

    def _best(self, size: int, small: bool) -> Block | None:
        spare = self.spare[small]
        place = bisect.bisect_left(spare, (size, 0), key=lambda each: each.order)
        return spare.pop(place) if place < len(spare) else None

    def _add(self, block: Block) -> None:
        bisect.insort(self.spare[block.small], block, key=lambda each: each.order)

    def _remove(self, block: Block) -> None:
        spare = self.spare[block.small]
        spare.pop(bisect.bisect_left(spare, block.order, key=lambda each: each.order))


class RankReplay:
    """The first rank of a run, or the only one: its tensors in bytes, and how it steps."""

    def __init__(self, row: Mapping[str, Any], ahead: bool) -> None:
        self.tp, self.dp, self.pp = row["tp"], row["dp"], row["pp"]
        self.sharded, self.rows = row["zero"] == 1 and self.dp > 1, row["micro_batch"]
        self.width, self.ffn, self.vocab = row["hidden"], row["ffn_hidden"], row["vocab"]
        tokens = row["seq_len"] * self.rows
        self.full = 2 * tokens * self.width
        self.shard, self.inner = self.full // self.tp, 2 * tokens * self.ffn // self.tp
        self.sums = 4 * tokens * row["heads"] // self.tp
        self.logits = 2 * tokens * self.vocab // self.tp
        self.matrix = 2 * self.vocab * self.width // self.tp
        layer = 4 * self.width**2 + 3 * self.width * self.ffn
        share = (row["layers"] + self.vocab * self.width / layer) / self.pp
        self.layers = min(math.ceil(share), row["layers"])
        self.head, self.tied = self.pp == 1, row["params_b"] < 4
        self.microbatches = row["global_batch"] // (self.dp * self.rows)
        self.pool, self.ahead = CachingPool(), ahead and self.tp > 1
        self.launched = 0
        self.waiting: deque[tuple[int, Block]] = deque()
        self.once: dict[str, Block] = {}

    def make(self, size: int, launches: int = 1) -> Block:
        """A tensor and the kernels that fill it; what the GPU has passed by now is free."""
        while self.waiting and self.waiting[0][0] <= self.launched - LAUNCH_QUEUE:
            self.pool.give(self.waiting.popleft()[1])
        self.launched += launches
        return self.pool.take(size)

    def drop(self, *blocks: Block) -> None:
        for each in blocks:
            self.pool.give(each)

    def drop_read(self, *blocks: Block) -> None:
        """Of blocks that a collective has read."""
        if not self.ahead:
            self.drop(*blocks)
            return
        self.waiting.extend((self.launched, each) for each in blocks)

    def meet(self) -> None:
        """The host waits for the GPU."""
        while self.waiting:
            self.pool.give(self.waiting.popleft()[1])

    def keep(self, name: str, size: int) -> None:
        """A buffer that stays from its first use on."""
        if name not in self.once:
            self.once[name] = self.make(size)

    def summed(self) -> Block:
        """The result of a row-parallel matmul, reduced and scattered."""
        full = self.make(self.full)
        if self.tp == 1:
            return full
        shard = self.make(self.shard)
        self.drop_read(full)
        return shard

    def forward(self) -> list[dict[str, Block]]:
        """All layers, each with what it saves."""
        self.keep("workspace", WORKSPACE)
        x = self._embedded()
        found: list[dict[str, Block]] = []
        for _ in range(self.layers):
            found.append({"x": x} | self._layer())
            x = self.make(self.shard)
            self.drop_read(found[-1].pop("sum"))
        found.append({"x": x})
        if self.head:
            found[-1]["norm"] = self.make(self.shard)
            narrow = self.make(self.logits, 3)
            wide = self.make(2 * self.logits)
            self.drop(narrow)
            found[-1]["softmax"] = self.make(2 * self.logits, 16)
            self.drop(wide)
        return found

    def _embedded(self) -> Block:
        found = self.make(self.full)
        if self.tp == 1:
            return found
        masked = self.make(self.full, 4)
        self.drop(found)
        shard = self.make(self.shard)
        self.drop_read(masked)
        return shard

    def _layer(self) -> dict[str, Block]:
        one, heads = self.shard, self.full // self.tp
        kept = {"norm1": self.make(one)}
        if self.tp > 1:
            self.keep("gathered", self.full)
        packed = self.make(3 * heads, 3)
        kept["qkv"] = self.make(3 * heads)
        self.drop(packed)
        pair = self.make(2 * heads, 2)
        kept["kv"] = self.make(2 * heads, 3)
        self.drop(pair)
        kept |= {"out": self.make(heads, 11), "lse": self.make(self.sums, 0)}
        copy = self.make(heads) if self.rows > 1 else None
        total = self.summed()
        if copy is not None:
            self.drop(copy)
        kept["middle"] = self.make(one)
        self.drop_read(total)
        kept |= {"norm2": self.make(one), "up": self.make(2 * self.inner, 3)}
        kept |= {"act": self.make(self.inner), "product": self.make(self.inner)}
        kept["sum"] = self.summed()
        return kept

    def backward(self, saved: list[dict[str, Block]]) -> None:
        """All layers, the gradients of all weights, and their sums in 32 bits."""
        last, grads = saved.pop(), list[Block]()
        if self.head:
            gradient = self.make(self.logits, 7)
            self.drop(last.pop("softmax"))
            self.keep("backward workspace", WORKSPACE)
            x = self._column(gradient, last.pop("norm"), self.matrix, grads)
            g = self.make(self.shard, 3)
            self.drop_read(x)
        else:
            self.meet()  # the host reads the sizes of the gradient that comes
            g = self.make(self.shard)
        self.drop(last["x"])
        for number, layer in reversed(list(enumerate(saved))):
            g = self._mlp_backward(layer, g, grads)
            g = self._attention_backward(layer, g, grads)
            if number:
                self.drop(layer["x"])
        self._embedding_backward(saved[0]["x"], g, grads)
        self.launched += 6 * self.layers
        self.drop(*grads)

    def _embedding_backward(self, x: Block, g: Block, grads: list[Block]) -> None:
        if self.tp > 1:
            gathered = self.make(self.full)
            self.drop_read(g)
            g = self.make(self.full, 2)
            self.drop_read(gathered)
        gradient = self.make(self.matrix, 3)
        self.drop(g, x)
        if self.head and self.tied:
            both = self.make(self.matrix)
            self.drop(gradient, grads.pop(0))
            gradient = both
        grads.append(gradient)

    def _column(
        self, gradient: Block, x: Block, weight: int, grads: list[Block], transposed: bool = False
    ) -> Block:
        """A column-parallel matmul backward: the input's gradient, reduced and scattered."""
        copy = self.make(gradient.size) if transposed else None
        full = self.make(self.full, 2)
        if copy is not None:
            self.drop(copy)
            copy = self.make(gradient.size)
            self.drop(gradient)
            gradient = copy
        shard = self.make(self.shard) if self.tp > 1 else full
        grads.append(self.make(weight))
        if self.tp > 1:
            self.drop_read(full)
        self.drop_read(x)
        self.drop(gradient)
        return shard

    def _normed(self, gradient: Block, other: Block, grads: list[Block]) -> Block:
        """A norm backward, and the sum with the gradient that went around it."""
        x = self.make(self.shard, 3)
        self.drop_read(gradient)
        grads.append(self.make(2 * self.width, 0))
        total = self.make(self.shard)
        self.drop(x)
        self.drop_read(other)
        return total

    def _mlp_backward(self, layer: dict[str, Block], g: Block, grads: list[Block]) -> Block:
        if self.tp > 1:
            self.keep("gathered gradient", self.full)
        self.keep("backward workspace", WORKSPACE)
        product = self.make(self.inner, 3)
        grads.append(self.make(2 * self.width * self.ffn // self.tp))
        self.drop(layer["product"])
        act, up = self.make(self.inner), self.make(self.inner)
        self.drop(product, layer["act"])
        gate = self.make(self.inner)
        self.drop(act)
        both = self.make(2 * self.inner)
        self.drop(gate, up, layer["up"])
        weight = 4 * self.width * self.ffn // self.tp
        found = self._normed(self._column(both, layer["norm2"], weight, grads), g, grads)
        self.drop(layer["middle"])
        return found

    def _attention_backward(self, layer: dict[str, Block], g: Block, grads: list[Block]) -> Block:
        heads, square = self.full // self.tp, 2 * self.width**2 // self.tp
        out = self.make(heads, 3)
        copy = self.make(heads) if self.rows > 1 else None
        grads.append(self.make(square))
        if copy is not None:
            self.drop(copy)
            copy = self.make(heads)
            self.drop(out)
            out = copy
        three = [self.make(heads) for _ in range(3)]
        work = [self.make(2 * heads, 0), self.make(self.sums, 0)]
        self.drop(*work, out, layer["out"], layer["lse"])
        pair = self.make(2 * heads, 3)
        self.drop(*three[1:])
        packed = self.make(3 * heads)
        self.drop(three[0], pair, layer["qkv"], layer["kv"])
        x = self._column(packed, layer["norm1"], 3 * square, grads, transposed=True)
        return self._normed(x, g, grads)

    def run(self) -> float:
        """GiB that are reserved after some steps."""
        sizes = self._weights()
        for each in sizes:
            self.pool.take(2 * each)
        if self.dp > 1 and not self.sharded:
            self._buckets(sizes)
        own = [-(-each // (self.dp if self.sharded else 1)) for each in sizes]
        self.pool.take(4 * sum(sizes))
        self.pool.take(4 * sum(own))
        for step in range(STEPS):
            self._step()
            if step == 0:
                for each in own:
                    self.pool.take(4 * each), self.pool.take(4 * each)
            if self.sharded:
                flat = [self.pool.take(2 * sum(own)) for _ in range(self.dp + 1)]
                self.drop(*flat, self.pool.take(2 * sum(sizes)))
        return self.pool.reserved / GIB

    def _step(self) -> None:
        number = min(self.microbatches, max(MOST_MICROBATCHES, 2 * self.pp))
        flight = min(self.pp, number)
        saved = deque(self.forward() for _ in range(flight - 1))
        for _ in range(number - flight + 1):
            saved.append(self.forward())
            self.backward(saved.popleft())
        while saved:
            self.backward(saved.popleft())
        self.meet()

    def _weights(self) -> list[int]:
        square, wide = self.width**2 // self.tp, self.width * self.ffn // self.tp
        layer = [3 * square, square, 2 * wide, wide, self.width, self.width]
        found = [self.matrix // 2, *(layer * self.layers)]
        if self.head:
            found += [self.width] + ([] if self.tied else [self.matrix // 2])
        return found

    def _buckets(self, sizes: list[int]) -> None:
        """Of DDP: weights from the last on, until there are 25 MiB."""
        size = 0
        for each in reversed(sizes):
            size += 2 * each
            if size >= 25 * MIB:
                self.pool.take(size)
                size = 0
        if size:
            self.pool.take(size)


def main(path: Path) -> None:
    errors: dict[int, list[float]] = {}
    for row in map(json.loads, path.read_text("utf-8").splitlines()):
        measured = row["achieved"]["peak_mem_gib"]
        if measured is None:
            continue
        said = "dp={dp} tp={tp} pp={pp} zero={zero} rows={micro_batch}".format_map(row)
        try:
            levels = [RankReplay(row, ahead).run() for ahead in (False, True)]
        except MemoryError:
            print(f"{said}: meets the limit, measured {measured:.2f}")
            continue
        errors.setdefault(row["tp"], []).append(abs(levels[-1] / measured - 1))
        print(f"{said}: {levels[0]:.2f}, host ahead {levels[1]:.2f}, measured {measured:.2f} GiB")
    for tp, found in sorted(errors.items()):
        print(f"tp={tp}: {len(found)} runs, host ahead {sum(found) / len(found):.1%} in the mean")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
