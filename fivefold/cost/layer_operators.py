"""The operators of layers, embedding and head as one rank runs them, in bytes of a microbatch.

`operator_tape` plays them. Inside of experts only sums are known (`cost/activations.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fivefold.core.recompute import Recompute
from fivefold.core.shape import Mla
from fivefold.cost.activations import WIDE, Activations
from fivefold.cost.grid import Array, Flags
from fivefold.cost.operator_tape import OperatorList, TapeTensor

EXPERTS = "mlp"  # how the names of a layer's router and experts begin
SCALED = 7  # bytes of 2 that the weight gradient of a norm holds besides: widened, and multiplied


class LayerOperators:
    """For one plan. Keys come to a query in so many `visits`. `shards`: inputs of split GEMMs are
    saved as this rank's tokens. `queued`: weight gradients go past autograd."""

    def __init__(
        self,
        activations: Activations,
        tokens: float,
        visits: int,
        shards: bool,
        queued: bool,
    ) -> None:
        self.activations, self.tokens, self.visits = activations, tokens, visits
        self.shards, self.queued, self.shape = shards, queued, activations.shape
        self.key = (activations.key, tokens, visits, shards, queued)
        grid = activations.grid
        self.tp, self.sp = int(_number(grid.tp)), bool(_number(grid.sp))
        self.split = self.tp > 1
        self.residual, self.whole = self._size(activations.residual), self._size(activations.whole)
        self.unit = activations.itemsize * tokens

    def _size(self, per_token: Array | float) -> float:
        return _number(per_token) * self.tokens

    def blocks(self, routed: Sequence[bool], rule: Recompute, joins: bool = False) -> OperatorList:
        """Some layers, one after another. `joins`: of multi-token prediction, after a GEMM that
        joins hidden states with later tokens."""
        x = TapeTensor(self.residual)
        found = OperatorList(x)
        if joins:
            normed = self._norm(found, x, "hidden_norm", Recompute())
            both = found.add([normed], TapeTensor(2 * self.residual))
            x = self._linear(found, both, self.residual, "join")
        for block, experts in enumerate(routed):
            found.begin("", block)
            normed = self._norm(found, x, "attention_norm", rule)
            found.begin("attention", block)
            attended = self._attention(found, normed, rule)
            found.begin("", block)
            x = found.add([x, attended], TapeTensor(self.residual), passes=True)
            normed = self._norm(found, x, "mlp_norm", rule)
            found.begin("experts" if experts else "mlp", block)
            added = (self._experts if experts else self._mlp)(found, normed, rule)
            found.begin("", block)
            x = found.add([x, added], TapeTensor(self.residual), passes=True)
        return found

    def embedding(self) -> OperatorList:
        """Tokens, which take no memory of their own here, to vectors."""
        found = OperatorList(TapeTensor(0.0))
        rows = found.add([found.input], TapeTensor(self.whole), weights="embed")
        if self.split:  # other ranks have the rows of other tokens
            rows = self._leave(found, found.add([rows], TapeTensor(self.whole)))
        if self.shape.positions == "learned":
            rows = found.add([rows], TapeTensor(self.residual), passes=True)
        return found

    def head_in_chunks(self, at_loss: float, gradients: float) -> OperatorList:
        """Final norm, and a head whose forward makes its gradients: bytes of all that it holds
        besides its input, and what of that waits for the backward."""
        found, wide = self._before_head()
        loss = TapeTensor(0.0, extra=at_loss)
        found.add([wide], loss, weights="head", keeps=gradients, early=True, collective=self.split)
        return found

    def _before_head(self) -> tuple[OperatorList, TapeTensor]:
        found = OperatorList(TapeTensor(self.residual))
        normed = self._norm(found, found.input, "norm", Recompute())
        return found, self._enter(found, normed, kept=False)

    def head(self, logits_bytes: float) -> OperatorList:
        """Final norm, head and loss. `logits_bytes` of a word: all that the backward of the loss
        holds, logits and their gradient among it."""
        found, wide = self._before_head()
        words = self.tokens * self.shape.vocab / self.tp
        size = self.activations.itemsize
        logits = TapeTensor(words * size, logits=True)
        found.add([wide], logits, saved=[wide], weights="head")
        extra = words * (logits_bytes - 2 * size)
        found.add([logits], TapeTensor(0.0), saved=[logits], backward_extra=extra)
        return found

    def _norm(self, found: OperatorList, x: TapeTensor, name: str, rule: Recompute) -> TapeTensor:
        """Its output may be made again from its input, for the GEMMs that read it."""
        made = TapeTensor(x.bytes, remade=rule.remakes("norm"), source=x)
        if not self.queued:
            return found.add([x], made, saved=[x], weights=name)
        plain = found.add([x], TapeTensor(x.bytes), saved=[x])
        extra = SCALED * x.bytes
        return found.add([plain], made, saved=[x], weights=name, settle_extra=extra)

    def _enter(self, found: OperatorList, x: TapeTensor, kept: bool) -> TapeTensor:
        """Before GEMMs that are split over tp: all tokens, in rank order first."""
        if not self.split:
            return x
        if not self.sp:
            return found.add([x], TapeTensor(self.whole, base=x), collective=True)
        wide = TapeTensor(self.whole, remade=kept, source=x, extra=self.whole, named=True)
        source = x if kept else None
        return found.add([x], wide, backward_extra=self.whole, holds=source, collective=True)

    def _leave(self, found: OperatorList, x: TapeTensor) -> TapeTensor:
        """After them: the sum over ranks."""
        if not self.split:
            return x
        if not self.sp:
            return found.add([x], TapeTensor(self.whole), passes=True, collective=True)
        made = TapeTensor(self.residual, extra=self.whole)
        return found.add([x], made, backward_extra=self.whole, collective=True)

    def _linear(
        self, found: OperatorList, x: TapeTensor, size: float, name: str, named: bool = False
    ) -> TapeTensor:
        return found.add([x], TapeTensor(size, named=named), saved=[x], weights=name)

    def _saves_shards(self, found: OperatorList, rule: Recompute) -> bool:
        return self.shards and not (rule.full or found.module in rule.modules)

    def _mlp(self, found: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        wide = self._enter(found, x, self._saves_shards(found, rule))
        sizes = (self.shape.ffn / self.tp * self.unit, self.whole)
        out = self._inside(found, wide, sizes, "mlp", rule)
        return self._biased(found, self._leave(found, out), self.shape.mlp_bias)

    def _biased(self, found: OperatorList, x: TapeTensor, bias: bool) -> TapeTensor:
        """A bias after the sum over ranks; that of one rank is part of the GEMM."""
        if not bias or not self.split:
            return x
        return found.add([x], TapeTensor(x.bytes), passes=True)

    def _experts(self, found: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        """Rows to experts, their MLPs, and back. What is saved besides waits with the results."""
        moe, shape = self.shape.moe, self.shape
        assert moe is not None
        slots = self._size(self.activations.slots()) * self.activations.itemsize
        rows, width = slots * shape.width, slots * moe.ffn / _number(self.activations.grid.etp)
        apart = _number(self.activations.grid.ep) > 1
        moved = rows if apart else 0.0  # as sent, beside as received, and as received, as sorted
        made = TapeTensor(rows, extra=moved, adds=not apart)
        arrived = found.add([x], made, [x], collective=apart)
        result = self._inside(found, arrived, (width, rows), f"{EXPERTS}.experts", rule)
        shared = self.unit * moe.shared_ffn / self.tp if moe.shared else 0.0
        inner = 3 if shape.gated else 2
        returned = self.activations.memory.returned_slots  # saved, to weigh them at home
        whole = self._size(self.activations.experts()) - inner * (width + shared)
        besides = whole - (2 if returned else 1) * rows
        y = found.add(
            [result],
            TapeTensor(self.residual, extra=moved),
            [result] if returned else [],
            backward_extra=moved,
            keeps=max(besides, 0.0),
            collective=apart,
        )
        if not moe.shared:
            return y
        wide = self._enter(found, x, self._saves_shards(found, rule))
        out = self._inside(found, wide, (shared, self.whole), f"{EXPERTS}.shared", rule)
        return found.add([y, self._leave(found, out)], TapeTensor(self.residual), passes=True)

    def _inside(
        self,
        found: OperatorList,
        x: TapeTensor,
        sizes: tuple[float, float],
        name: str,
        rule: Recompute,
    ) -> TapeTensor:
        """An MLP, with the bytes of its inner tensors and of its result."""
        names = ("gate", "up") if self.shape.gated else ("up",)
        inner = [
            self._linear(found, x, sizes[0], f"{name}.{each}", each == "gate") for each in names
        ]
        again = rule.remakes("act") and found.module not in rule.modules
        copies = self.activations.memory.gated_copies - 3 if self.shape.gated else 0.0
        made = TapeTensor(sizes[0], remade=again)
        activated = found.add(inner, made, saved=inner, keeps=copies * sizes[0])
        return self._linear(found, activated, sizes[1], f"{name}.down")

    def _attention(self, found: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        wide = self._enter(found, x, self._saves_shards(found, rule))
        heads = self._latent if self.shape.mla is not None else self._heads
        queries, keys, values = heads(found, wide, rule)
        attended = self._attend(found, queries, keys, values)
        out = self._linear(found, attended, self.whole, "attention.out")
        return self._biased(found, self._leave(found, out), self.shape.out_bias)

    def _heads(
        self, found: OperatorList, x: TapeTensor, rule: Recompute
    ) -> tuple[TapeTensor, TapeTensor, TapeTensor]:
        wide, narrow = (
            _number(each) * self.shape.head_dim * self.unit
            for each in (self.activations.heads, self.activations.kv_heads)
        )
        made: list[TapeTensor] = []
        for name, size in (("q", wide), ("k", narrow)):
            one = self._linear(found, x, size, f"attention.{name}.")
            if self.shape.qk_norm != "none":
                one = self._norm(found, one, f"attention.{name}_norm", Recompute())
            made.append(self._rotated(found, one))
        values = self._linear(found, x, narrow, "attention.v.", named=True)
        return made[0], made[1], values

    def _rotated(self, found: OperatorList, x: TapeTensor) -> TapeTensor:
        if self.shape.positions != "rotary":
            return x
        return found.add([x], TapeTensor(x.bytes, named=True))

    def _latent(
        self, found: OperatorList, x: TapeTensor, rule: Recompute
    ) -> tuple[TapeTensor, TapeTensor, TapeTensor]:
        """Keys are joined of heads and the one rotated key; values are a part of a projection."""
        mla, shape = self.shape.mla, self.shape
        assert mla is not None
        heads = _number(self.activations.heads) * self.unit
        inner = Recompute() if found.module in rule.modules else rule
        queries = self._latent_queries(found, x, mla, heads, inner)
        down = self._linear(found, x, (mla.kv_rank + mla.rope_dim) * self.unit, "attention.kv_down")
        latent = found.add([down], TapeTensor(mla.kv_rank * self.unit, base=down), passes=True)
        normed = self._norm(found, latent, "attention.kv_latent_norm", inner)
        width = mla.nope_dim + mla.value_dim
        both = self._linear(found, normed, heads * width, "attention.kv_up")
        keys = found.add([both], TapeTensor(heads * shape.head_dim))
        values = found.add([both], TapeTensor(heads * mla.value_dim, base=both))
        return queries, keys, values

    def _latent_queries(
        self, found: OperatorList, x: TapeTensor, mla: Mla, heads: float, rule: Recompute
    ) -> TapeTensor:
        size = heads * self.shape.head_dim
        if mla.q_rank is None:
            projected = self._linear(found, x, size, "attention.q.")
        else:
            down = self._linear(found, x, mla.q_rank * self.unit, "attention.q_down")
            normed = self._norm(found, down, "attention.q_latent_norm", rule)
            projected = self._linear(found, normed, size, "attention.q_up")
        return found.add([projected], TapeTensor(size))

    def _attend(
        self, found: OperatorList, queries: TapeTensor, keys: TapeTensor, values: TapeTensor
    ) -> TapeTensor:
        """It saves what it reads, its result, and the log-sum-exp."""
        heads = _number(self.activations.heads)
        size = heads * self.shape.value_dim * self.unit
        lse, inputs = heads * WIDE * self.tokens, [queries, keys, values]
        if self.activations.drops_pairs:
            return self._attend_by_formula(found, inputs, size, lse)
        made = TapeTensor(size)
        buffers = self._size(self.activations.context_buffers())
        return found.add(inputs, made, [*inputs, made], backward_extra=buffers, keeps=lse)

    def _attend_by_formula(
        self, found: OperatorList, inputs: Sequence[TapeTensor], size: float, lse: float
    ) -> TapeTensor:
        """Attention that drops pairs holds all scores, and its result in two orders."""
        drawn, pairs = (self._size(each) / self.visits for each in self.activations.pairs())
        buffers = self._size(self.activations.context_buffers())
        made = TapeTensor(size, extra=drawn)
        extra = pairs + 6 * size * WIDE / self.activations.itemsize + buffers
        found.add(inputs, made, [*inputs, made], backward_extra=extra, keeps=lse)
        return found.add([made], TapeTensor(size), passes=True)


def _number(one: Array | Flags | float) -> float:
    return float(np.asarray(one).reshape(-1)[0])
