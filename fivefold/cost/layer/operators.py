"""The operators of layers, embedding and head as one rank runs them, in bytes of a microbatch.

`operator_tape` plays them. Inside of experts only sums are known (`cost/memory/activations.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.core.model import LayerKind, Mla, Moe, Recompute
from fivefold.cost.layer.fp8_operators import RoundedSlots, rounded_slots
from fivefold.cost.layer.linear_operators import LinearOperators, number
from fivefold.cost.layer.operator_list import OperatorList, TapeTensor
from fivefold.cost.memory import WIDE
from fivefold.cost.traffic import max_nodes_per_token

EXPERTS = "mlp"  # how the names of a layer's router and experts begin


class LayerOperators(LinearOperators):
    """For one plan: layers, the embedding and the head."""

    def blocks(
        self,
        kinds: Sequence[LayerKind],
        rule: Recompute,
        rounds: Sequence[bool] = (),
        joins: bool = False,
    ) -> OperatorList:
        """Some layers of these kinds, one after another; `rounds`: with linears in fp8. `joins`: of
        multi-token prediction, after a GEMM that joins hidden states with later tokens."""
        x = TapeTensor(self.residual)
        found = OperatorList(x)
        if joins:
            normed = self._norm(found, x, "hidden_norm", Recompute())
            both = found.add([normed], TapeTensor(2 * self.residual))
            x = self._linear(found, both, self.residual, "join")
        for block, kind in enumerate(kinds):
            found.begin("", block, bool(rounds) and rounds[block])
            x = self._layer(found, x, kind, rule)
        return found

    def _layer(
        self, found: OperatorList, x: TapeTensor, kind: LayerKind, rule: Recompute
    ) -> TapeTensor:
        shape, block, experts = self.shape, found.block, kind.moe
        read = self._norm(found, x, "attention_norm", rule) if shape.inner_norms else x
        also = read  # of a parallel block with one norm
        if shape.parallel_block and shape.inner_norms > 1:
            also = self._norm(found, x, "mlp_norm", rule)
        found.begin("attention", block)
        added = self._mixed(found, read, kind, rule)
        found.begin("", block)
        x = self._added(found, x, added, "attention_out_norm")
        if not shape.parallel_block:
            also = self._norm(found, x, "mlp_norm", rule) if shape.inner_norms else x
        found.begin("experts" if experts else "mlp", block)
        added = (self._experts if experts else self._mlp)(found, also, rule)
        found.begin("", block)
        return self._added(found, x, added, "mlp_out_norm")

    def _added(
        self, found: OperatorList, x: TapeTensor, added: TapeTensor, norm: str
    ) -> TapeTensor:
        """To the residual, after a norm if there is one."""
        if self.shape.outer_norms:
            added = self._norm(found, added, norm, Recompute())
        return found.add([x, added], TapeTensor(self.residual), passes=True)

    def embedding(self) -> OperatorList:
        """Tokens, which take no memory of their own here, to vectors."""
        found = OperatorList(TapeTensor(0.0))
        rows = found.add([found.input], TapeTensor(self.whole), weights="embed")
        if self.split:  # other ranks have the rows of other tokens
            rows = self._leave(found, found.add([rows], TapeTensor(self.whole)))
        if self.shape.scaled_embedding:
            rows = found.add([rows], TapeTensor(self.residual))
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
        return found, self._enter_head(found, normed)

    def head(self, logits_bytes: float) -> OperatorList:
        """Final norm, head and loss. `logits_bytes` of a word: all that the backward of the loss
        holds, logits and their gradient among it."""
        found, wide = self._before_head()
        words = self.tokens * self.shape.vocab / self.tp
        size = self.activations.itemsize
        logits = TapeTensor(words * size, logits=True)
        found.add([wide], logits, saved=[wide], weights="head")
        if self.shape.logit_cap is not None:
            capped = TapeTensor(words * size, logits=True)
            logits = found.add([logits], capped, saved=[logits])
        extra = words * (logits_bytes - 2 * size)
        found.add([logits], TapeTensor(0.0), saved=[logits], backward_extra=extra)
        return found

    def _enter_head(self, found: OperatorList, x: TapeTensor) -> TapeTensor:
        """Before a head that is split over tp: all tokens."""
        if not self.split:
            return x
        base = None if self.sp else x
        return found.add([x], TapeTensor(self.whole, base=base, named=self.sp), collective=True)

    def _leave(self, found: OperatorList, x: TapeTensor) -> TapeTensor:
        """After an embedding: the sum over ranks."""
        if not self.sp:
            return found.add([x], TapeTensor(self.whole), passes=True, collective=True)
        return found.add([x], TapeTensor(self.residual), collective=True)

    def _mlp(self, found: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        kept, size = self._saves_shards(found, rule), self.shape.ffn / self.tp * self.unit
        inner = self._project(found, x, dict.fromkeys(self._inner("mlp"), size), kept)
        out = self._row_linear(found, self._activated(found, inner, rule), "mlp.down")
        return self._biased(found, out, self.shape.mlp_bias)

    def _experts(self, found: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        """Rows to experts, their MLPs, and back; shared experts while rows travel. What is saved
        besides waits with the results. Rows that have come to a node wait there for theirs."""
        moe, grid, residual = self.shape.moe, self.activations.grid, self.residual
        assert moe is not None
        shared = self._shared_experts(found, x, moe, rule) if moe.shared else None
        slots = self._size(self.activations.slots()) * self.activations.itemsize
        rows, width = slots * self.shape.width, slots * moe.ffn / number(grid.etp)
        nodes, rounded = int(number(grid.ep_nodes)) or 1, self._rounded_experts(found)
        apart, crossing, far, source = number(grid.ep) > nodes, 0.0, 0.0, x
        if nodes > 1:
            crossing = residual * float(max_nodes_per_token(moe, nodes)) * number(grid.etp)
            far = crossing if rounded is None else rounded.packed(crossing)
            came = TapeTensor(far, extra=far, named=True, gradient=crossing)
            source = found.add([x], came, [x], collective=True, backward_extra=crossing)
        moved = rows if apart else 0.0  # as sent, beside as received, and as received, as sorted
        made, there, back = TapeTensor(rows, extra=moved, adds=not apart), moved, 0.0
        if rounded is not None:  # to experts as codes, from them as values
            there, back = rounded.packed(rows if apart else residual), moved
            made = TapeTensor(rounded.packed(rows), extra=there, gradient=rows)
        saved = [] if crossing else [x]
        arrived = found.add([source], made, saved, collective=apart, backward_extra=back)
        result = self._inside(found, arrived, (width, rows), rule)
        returned = self.activations.memory.returned_slots  # saved, to weigh them at home
        besides = self._size(self.activations.beside_experts()) - (rows if returned else 0.0)
        if apart:
            result = found.add([result], TapeTensor(rows, gradient=there), collective=True)
        y = found.add(
            [result],
            TapeTensor(crossing or residual),
            [result] if returned else [],
            backward_extra=0.0 if apart else there,
            keeps=max(besides, 0.0),
        )
        if crossing:
            sums = TapeTensor(residual, extra=crossing)
            y = found.add([y], sums, collective=True, backward_extra=far)
        if shared is None:
            return y
        return found.add([y, shared], TapeTensor(residual), passes=True)

    def _shared_experts(
        self, found: OperatorList, x: TapeTensor, moe: Moe, rule: Recompute
    ) -> TapeTensor:
        size = self.unit * moe.shared_ffn / self.tp
        sizes = dict.fromkeys(self._inner(f"{EXPERTS}.shared"), size)
        hidden = self._project(found, x, sizes, self._saves_shards(found, rule))
        activated = self._activated(found, hidden, rule)
        return self._row_linear(found, activated, f"{EXPERTS}.shared.down")

    def _rounded_experts(self, found: OperatorList) -> RoundedSlots | None:
        """How routed experts of this layer are rounded."""
        linears = self._rounding(found)
        if linears is None or not linears.fp8.experts:
            return None
        column = self._size(self.activations.slots()) * self.activations.itemsize
        return rounded_slots(self.activations, column, linears.kept)

    def _inside(
        self, found: OperatorList, x: TapeTensor, sizes: tuple[float, float], rule: Recompute
    ) -> TapeTensor:
        """The MLPs of experts, with the bytes of their inner tensors and of their results."""
        name = f"{EXPERTS}.experts"
        if (rounded := self._rounded_experts(found)) is not None:
            inner = rounded.project(found, x, self._inner(name))
            return rounded.down(found, self._activated(found, inner, rule), f"{name}.down")
        inner = [
            self._linear(found, x, sizes[0], each, each.endswith("gate"))
            for each in self._inner(name)
        ]
        return self._linear(found, self._activated(found, inner, rule), sizes[1], f"{name}.down")

    def _mixed(
        self, found: OperatorList, x: TapeTensor, kind: LayerKind, rule: Recompute
    ) -> TapeTensor:
        """What mixes tokens in a layer of this kind."""
        return self._attention(found, x, rule)

    def _attention(self, found: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        heads = self._latent if self.shape.mla is not None else self._heads
        queries, keys, values, *gate = heads(found, x, rule)
        attended = self._attend(found, queries, keys, values)
        if gate:
            both = [attended, *gate]
            attended = found.add(both, TapeTensor(attended.bytes), saved=both)
        attended = self._in_rows(found, attended)
        out = self._row_linear(found, attended, "attention.out")
        return self._biased(found, out, self.shape.out_bias)

    def _heads(self, found: OperatorList, x: TapeTensor, rule: Recompute) -> tuple[TapeTensor, ...]:
        """Queries, keys, values, and the gate of what they give, if there is one."""
        wide, narrow = (
            number(each) * self.shape.head_dim * self.unit
            for each in (self.activations.heads, self.activations.kv_heads)
        )
        sizes = {"attention.q.": wide, "attention.k.": narrow, "attention.v.": narrow}
        sizes |= {"attention.gate.": wide} if self.shape.attention_gate else {}
        # Biases make tensors of their own. Values are copied, since attention saves them; norms
        # save queries and keys as they are.
        copied = sum(sizes.values()) if self.shape.qkv_bias else narrow
        norms = self.shape.qk_norm != "none" and not self.shape.qkv_bias and not self._copies
        how = (self._saves_shards(found, rule), copied, narrow if norms else 0.0)
        projected = self._project(found, x, sizes, *how)
        made: list[TapeTensor] = []
        for name, one in zip(("q", "k"), projected, strict=False):
            one = self._in_rows(found, one)
            if self.shape.qk_norm in ("head", "full"):
                one = self._norm(found, one, f"attention.{name}_norm", Recompute())
            one = self._rotated(found, one)
            if self.shape.qk_norm == "l2":
                one = found.add([one], TapeTensor(one.bytes), saved=[one])
            if name == "q" and (self.shape.score_dim or self.shape.head_dim) != self.shape.head_dim:
                one = found.add([one], TapeTensor(one.bytes, named=True))
            made.append(one)
        return *made, *(self._in_rows(found, each) for each in projected[2:])

    def _rotated(self, found: OperatorList, x: TapeTensor) -> TapeTensor:
        if self.shape.positions != "rotary":
            return x
        return found.add([x], TapeTensor(x.bytes, named=True))

    def _latent(
        self, found: OperatorList, x: TapeTensor, rule: Recompute
    ) -> tuple[TapeTensor, ...]:
        """Keys are joined of heads and the one rotated key; values are a part of a projection."""
        mla, shape = self.shape.mla, self.shape
        assert mla is not None
        heads = number(self.activations.heads) * self.unit
        inner = Recompute() if found.module in rule.modules else rule
        size = heads * shape.head_dim if mla.q_rank is None else mla.q_rank * self.unit
        sizes = {"attention.q." if mla.q_rank is None else "attention.q_down": size}
        sizes["attention.kv_down"] = (mla.kv_rank + mla.rope_dim) * self.unit
        # Latents are saved: in fp8 they hold queries that come from the input.
        held = size if mla.q_rank is None and not self._copies else 0.0
        projected = self._project(found, x, sizes, self._saves_shards(found, rule), 0.0, held)
        into_queries, down = (self._in_rows(found, each) for each in projected)
        queries = self._latent_queries(found, into_queries, mla, heads, inner)
        latent = found.add([down], TapeTensor(mla.kv_rank * self.unit, base=down), passes=True)
        normed = self._norm(found, latent, "attention.kv_latent_norm", inner)
        width = mla.nope_dim + mla.value_dim
        both = self._linear_alone(found, normed, heads * width, "attention.kv_up")
        keys = found.add([both], TapeTensor(heads * shape.head_dim))
        base = both if self.activations.memory.value_views else None
        values = found.add([both], TapeTensor(heads * mla.value_dim, base=base))
        return queries, keys, values

    def _latent_queries(
        self, found: OperatorList, x: TapeTensor, mla: Mla, heads: float, rule: Recompute
    ) -> TapeTensor:
        size = heads * self.shape.head_dim
        if mla.q_rank is not None:
            normed = self._norm(found, x, "attention.q_latent_norm", rule)
            x = self._linear_alone(found, normed, size, "attention.q_up")
        return found.add([x], TapeTensor(size))

    def _attend(
        self, found: OperatorList, queries: TapeTensor, keys: TapeTensor, values: TapeTensor
    ) -> TapeTensor:
        """It saves what it reads, its result, and the log-sum-exp."""
        heads = number(self.activations.heads)
        size = heads * self.shape.value_dim * self.unit
        lse, inputs = heads * WIDE * self.tokens, [queries, keys, values]
        kept = lse + self._size(self.activations.exchanged())
        buffers = self._size(self.activations.context_buffers())
        if not self.activations.by_formula:
            made = TapeTensor(size)
            saved = [*inputs, made]
            return found.add(inputs, made, saved, backward_extra=buffers, keeps=lse, kept=kept)
        # By the formula: it holds all scores, and its result in two orders.
        drawn, pairs = (self._size(each) / self.visits for each in self.activations.pairs())
        extra = pairs + 6 * size * WIDE / self.activations.itemsize + buffers
        made = TapeTensor(size, extra=drawn)
        saved = [*inputs, made]
        found.add(inputs, made, saved, backward_extra=extra, keeps=lse, kept=kept)
        return found.add([made], TapeTensor(size), passes=True, kept=0.0)
