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
        operators = OperatorList(x)
        if joins:
            normed = self._norm(operators, x, "hidden_norm", Recompute())
            pair = operators.add([normed], TapeTensor(2 * self.residual))
            x = self._linear(operators, pair, self.residual, "join")
        for block, kind in enumerate(kinds):
            operators.begin("", block, bool(rounds) and rounds[block])
            x = self._layer(operators, x, kind, rule)
        return operators

    def _layer(
        self, operators: OperatorList, x: TapeTensor, kind: LayerKind, rule: Recompute
    ) -> TapeTensor:
        shape, block, experts = self.shape, operators.block, kind.moe
        read = self._norm(operators, x, "attention_norm", rule) if shape.inner_norms else x
        also = read  # of a parallel block with one norm
        if shape.parallel_block and shape.inner_norms > 1:
            also = self._norm(operators, x, "mlp_norm", rule)
        operators.begin("attention", block)
        added = self._mixed(operators, read, kind, rule)
        operators.begin("", block)
        x = self._added(operators, x, added, "attention_out_norm")
        if not shape.parallel_block:
            also = self._norm(operators, x, "mlp_norm", rule) if shape.inner_norms else x
        operators.begin("experts" if experts else "mlp", block)
        added = (self._experts if experts else self._mlp)(operators, also, rule)
        operators.begin("", block)
        return self._added(operators, x, added, "mlp_out_norm")

    def _added(
        self, operators: OperatorList, x: TapeTensor, added: TapeTensor, norm: str
    ) -> TapeTensor:
        """To the residual, after a norm if there is one."""
        if self.shape.outer_norms:
            added = self._norm(operators, added, norm, Recompute())
        return operators.add([x, added], TapeTensor(self.residual), passes=True)

    def embedding(self) -> OperatorList:
        """Tokens, which take no memory of their own here, to vectors."""
        operators = OperatorList(TapeTensor(0.0))
        rows = operators.add([operators.input], TapeTensor(self.full_residual), weights="embed")
        if self.split:  # other ranks have the rows of other tokens
            rows = self._leave(operators, operators.add([rows], TapeTensor(self.full_residual)))
        if self.shape.scaled_embedding:
            rows = operators.add([rows], TapeTensor(self.residual))
        if self.shape.positions == "learned":
            rows = operators.add([rows], TapeTensor(self.residual), passes=True)
        return operators

    def head_in_chunks(self, at_loss: float, gradients: float) -> OperatorList:
        """Final norm, and a head whose forward makes its gradients: bytes of all that it holds
        besides its input, and what of that waits for the backward."""
        operators, wide = self._before_head()
        loss = TapeTensor(0.0, extra=at_loss)
        operators.add(
            [wide], loss, weights="head", keeps=gradients, early=True, collective=self.split
        )
        return operators

    def _before_head(self) -> tuple[OperatorList, TapeTensor]:
        operators = OperatorList(TapeTensor(self.residual))
        normed = self._norm(operators, operators.input, "norm", Recompute())
        return operators, self._enter_head(operators, normed)

    def head(self, logits_bytes: float) -> OperatorList:
        """Final norm, head and loss. `logits_bytes` of a word: all that the backward of the loss
        holds, logits and their gradient among it."""
        operators, wide = self._before_head()
        num_logits = self.tokens * self.shape.vocab / self.tp
        size = self.activations.itemsize
        logits = TapeTensor(num_logits * size, logits=True)
        operators.add([wide], logits, saved=[wide], weights="head")
        if self.shape.logit_cap is not None:
            capped = TapeTensor(num_logits * size, logits=True)
            logits = operators.add([logits], capped, saved=[logits])
        extra = num_logits * (logits_bytes - 2 * size)
        operators.add([logits], TapeTensor(0.0), saved=[logits], backward_extra=extra)
        return operators

    def _enter_head(self, operators: OperatorList, x: TapeTensor) -> TapeTensor:
        """Before a head that is split over tp: all tokens."""
        if not self.split:
            return x
        base = None if self.sp else x
        return operators.add(
            [x], TapeTensor(self.full_residual, base=base, named=self.sp), collective=True
        )

    def _leave(self, operators: OperatorList, x: TapeTensor) -> TapeTensor:
        """After an embedding: the sum over ranks."""
        if not self.sp:
            return operators.add([x], TapeTensor(self.full_residual), passes=True, collective=True)
        return operators.add([x], TapeTensor(self.residual), collective=True)

    def _mlp(self, operators: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        saves_shards = self._saves_shards(operators, rule)
        size = self.shape.ffn / self.tp * self.unit
        inner = self._project(operators, x, dict.fromkeys(self._inner("mlp"), size), saves_shards)
        out = self._row_linear(operators, self._activated(operators, inner, rule), "mlp.down")
        return self._biased(operators, out, self.shape.mlp_bias)

    def _experts(self, operators: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        """Rows to experts, their MLPs, and back; shared experts while rows travel. What is saved
        besides waits with the results. Rows that have come to a node wait there for theirs."""
        moe, grid, residual = self.shape.moe, self.activations.grid, self.residual
        assert moe is not None
        shared = self._shared_experts(operators, x, moe, rule) if moe.shared else None
        slots = self._size(self.activations.slots()) * self.activations.itemsize
        rows, width = slots * self.shape.width, slots * moe.ffn / number(grid.etp)
        nodes, rounded = int(number(grid.ep_nodes)) or 1, self._rounded_experts(operators)
        apart, crossing, far, source = number(grid.ep) > nodes, 0.0, 0.0, x
        if nodes > 1:
            crossing = residual * float(max_nodes_per_token(moe, nodes)) * number(grid.etp)
            far = crossing if rounded is None else rounded.packed(crossing)
            came = TapeTensor(far, extra=far, named=True, gradient=crossing)
            source = operators.add([x], came, [x], collective=True, backward_extra=crossing)
        moved = rows if apart else 0.0  # as sent, beside as received, and as received, as sorted
        expert_input, slot_bytes, back = TapeTensor(rows, extra=moved, adds=not apart), moved, 0.0
        if rounded is not None:  # to experts as codes, from them as values
            slot_bytes, back = rounded.packed(rows if apart else residual), moved
            expert_input = TapeTensor(rounded.packed(rows), extra=slot_bytes, gradient=rows)
        saved = [] if crossing else [x]
        arrived = operators.add(
            [source], expert_input, saved, collective=apart, backward_extra=back
        )
        result = self._inside(operators, arrived, (width, rows), rule)
        returned = self.activations.memory.returned_slots  # saved, to weigh them at home
        besides = self._size(self.activations.beside_experts()) - (rows if returned else 0.0)
        if apart:
            result = operators.add([result], TapeTensor(rows, gradient=slot_bytes), collective=True)
        y = operators.add(
            [result],
            TapeTensor(crossing or residual),
            [result] if returned else [],
            backward_extra=0.0 if apart else slot_bytes,
            keeps=max(besides, 0.0),
        )
        if crossing:
            sums = TapeTensor(residual, extra=crossing)
            y = operators.add([y], sums, collective=True, backward_extra=far)
        if shared is None:
            return y
        return operators.add([y, shared], TapeTensor(residual), passes=True)

    def _shared_experts(
        self, operators: OperatorList, x: TapeTensor, moe: Moe, rule: Recompute
    ) -> TapeTensor:
        size = self.unit * moe.shared_ffn / self.tp
        sizes = dict.fromkeys(self._inner(f"{EXPERTS}.shared"), size)
        hidden = self._project(operators, x, sizes, self._saves_shards(operators, rule))
        activated = self._activated(operators, hidden, rule)
        return self._row_linear(operators, activated, f"{EXPERTS}.shared.down")

    def _rounded_experts(self, operators: OperatorList) -> RoundedSlots | None:
        """How routed experts of this layer are rounded."""
        linears = self._rounding(operators)
        if linears is None or not linears.fp8.experts:
            return None
        column = self._size(self.activations.slots()) * self.activations.itemsize
        return rounded_slots(self.activations, column, linears.caches_weights)

    def _inside(
        self, operators: OperatorList, x: TapeTensor, sizes: tuple[float, float], rule: Recompute
    ) -> TapeTensor:
        """The MLPs of experts, with the bytes of their inner tensors and of their results."""
        name = f"{EXPERTS}.experts"
        if (rounded := self._rounded_experts(operators)) is not None:
            inner = rounded.project(operators, x, self._inner(name))
            return rounded.down(operators, self._activated(operators, inner, rule), f"{name}.down")
        inner = [
            self._linear(operators, x, sizes[0], weight_name, weight_name.endswith("gate"))
            for weight_name in self._inner(name)
        ]
        return self._linear(
            operators, self._activated(operators, inner, rule), sizes[1], f"{name}.down"
        )

    def _mixed(
        self, operators: OperatorList, x: TapeTensor, kind: LayerKind, rule: Recompute
    ) -> TapeTensor:
        """What mixes tokens in a layer of this kind."""
        return self._attention(operators, x, rule)

    def _attention(self, operators: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        heads = self._latent if self.shape.mla is not None else self._heads
        queries, keys, values, *gate = heads(operators, x, rule)
        attended = self._attend(operators, queries, keys, values)
        if gate:
            operands = [attended, *gate]
            attended = operators.add(operands, TapeTensor(attended.bytes), saved=operands)
        attended = self._in_rows(operators, attended)
        out = self._row_linear(operators, attended, "attention.out")
        return self._biased(operators, out, self.shape.out_bias)

    def _heads(
        self, operators: OperatorList, x: TapeTensor, rule: Recompute
    ) -> tuple[TapeTensor, ...]:
        """Queries, keys, values, and the gate of what they give, if there is one."""
        wide, narrow = (
            number(num_heads) * self.shape.head_dim * self.unit
            for num_heads in (self.activations.heads, self.activations.kv_heads)
        )
        sizes = {"attention.q.": wide, "attention.k.": narrow, "attention.v.": narrow}
        sizes |= {"attention.gate.": wide} if self.shape.attention_gate else {}
        # Biases make tensors of their own. Values are copied, since attention saves them; norms
        # save queries and keys as they are.
        copied = sum(sizes.values()) if self.shape.qkv_bias else narrow
        norms = self.shape.qk_norm != "none" and not self.shape.qkv_bias and not self._copies
        options = (self._saves_shards(operators, rule), copied, narrow if norms else 0.0)
        projected = self._project(operators, x, sizes, *options)
        head_tensors: list[TapeTensor] = []
        for name, tensor in zip(("q", "k"), projected, strict=False):
            tensor = self._in_rows(operators, tensor)
            if self.shape.qk_norm in ("head", "full"):
                tensor = self._norm(operators, tensor, f"attention.{name}_norm", Recompute())
            tensor = self._rotated(operators, tensor)
            if self.shape.qk_norm == "l2":
                tensor = operators.add([tensor], TapeTensor(tensor.bytes), saved=[tensor])
            if name == "q" and (self.shape.score_dim or self.shape.head_dim) != self.shape.head_dim:
                tensor = operators.add([tensor], TapeTensor(tensor.bytes, named=True))
            head_tensors.append(tensor)
        return *head_tensors, *(
            self._in_rows(operators, projection) for projection in projected[2:]
        )

    def _rotated(self, operators: OperatorList, x: TapeTensor) -> TapeTensor:
        if self.shape.positions != "rotary":
            return x
        return operators.add([x], TapeTensor(x.bytes, named=True))

    def _latent(
        self, operators: OperatorList, x: TapeTensor, rule: Recompute
    ) -> tuple[TapeTensor, ...]:
        """Keys are joined of heads and the one rotated key; values are a part of a projection."""
        mla, shape = self.shape.mla, self.shape
        assert mla is not None
        heads = number(self.activations.heads) * self.unit
        inner = Recompute() if operators.module in rule.modules else rule
        size = heads * shape.head_dim if mla.q_rank is None else mla.q_rank * self.unit
        sizes = {"attention.q." if mla.q_rank is None else "attention.q_down": size}
        sizes["attention.kv_down"] = (mla.kv_rank + mla.rope_dim) * self.unit
        # Latents are saved: in fp8 they hold queries that come from the input.
        live_bytes = size if mla.q_rank is None and not self._copies else 0.0
        projected = self._project(
            operators, x, sizes, self._saves_shards(operators, rule), 0.0, live_bytes
        )
        into_queries, down = (self._in_rows(operators, projection) for projection in projected)
        queries = self._latent_queries(operators, into_queries, mla, heads, inner)
        latent = operators.add([down], TapeTensor(mla.kv_rank * self.unit, base=down), passes=True)
        normed = self._norm(operators, latent, "attention.kv_latent_norm", inner)
        width = mla.nope_dim + mla.value_dim
        key_values = self._linear_alone(operators, normed, heads * width, "attention.kv_up")
        keys = operators.add([key_values], TapeTensor(heads * shape.head_dim))
        base = key_values if self.activations.memory.value_views else None
        values = operators.add([key_values], TapeTensor(heads * mla.value_dim, base=base))
        return queries, keys, values

    def _latent_queries(
        self, operators: OperatorList, x: TapeTensor, mla: Mla, heads: float, rule: Recompute
    ) -> TapeTensor:
        size = heads * self.shape.head_dim
        if mla.q_rank is not None:
            normed = self._norm(operators, x, "attention.q_latent_norm", rule)
            x = self._linear_alone(operators, normed, size, "attention.q_up")
        return operators.add([x], TapeTensor(size))

    def _attend(
        self, operators: OperatorList, queries: TapeTensor, keys: TapeTensor, values: TapeTensor
    ) -> TapeTensor:
        """It saves what it reads, its result, and the log-sum-exp."""
        heads = number(self.activations.heads)
        size = heads * self.shape.value_dim * self.unit
        lse, inputs = heads * WIDE * self.tokens, [queries, keys, values]
        saved_bytes = lse + self._size(self.activations.exchanged())
        buffers = self._size(self.activations.context_buffers())
        if not self.activations.by_formula:
            output = TapeTensor(size)
            saved = [*inputs, output]
            return operators.add(
                inputs, output, saved, backward_extra=buffers, keeps=lse, retains=saved_bytes
            )
        # By the formula: it holds all scores, and its result in two orders.
        drawn, pairs = (
            self._size(pair_size) / self.visits for pair_size in self.activations.pairs()
        )
        extra = pairs + 6 * size * WIDE / self.activations.itemsize + buffers
        output = TapeTensor(size, extra=drawn)
        saved = [*inputs, output]
        operators.add(inputs, output, saved, backward_extra=extra, keeps=lse, retains=saved_bytes)
        return operators.add([output], TapeTensor(size), passes=True, retains=0.0)
