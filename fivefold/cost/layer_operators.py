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
from fivefold.cost.operator_list import OperatorList, TapeTensor
from fivefold.cost.rounded_operators import RoundedOperators, RoundedSlots

EXPERTS = "mlp"  # how the names of a layer's router and experts begin
SCALED = 7  # bytes of 2 that the weight gradient of a norm holds besides: widened, and multiplied


class LayerOperators:
    """For one plan. Keys come to a query in so many `visits`. `shards`: inputs of split GEMMs are
    saved as this rank's tokens. `queued`: weight gradients go past autograd. `reorders`: tokens
    are in another order between GEMMs that are split over tp."""

    def __init__(
        self,
        activations: Activations,
        tokens: float,
        visits: int,
        shards: bool,
        queued: bool,
        reorders: bool,
        rounded: RoundedOperators | None = None,
    ) -> None:
        self.activations, self.tokens, self.visits = activations, tokens, visits
        self.shards, self.queued, self.shape = shards, queued, activations.shape
        self.reorders, self.rounded = reorders, rounded
        self.key = (activations.key, tokens, visits, shards, queued, reorders, rounded)
        grid = activations.grid
        self.tp, self.sp = int(_number(grid.tp)), bool(_number(grid.sp))
        self.split = self.tp > 1
        self.residual, self.whole = self._size(activations.residual), self._size(activations.whole)
        self.unit = activations.itemsize * tokens

    def _size(self, per_token: Array | float) -> float:
        return _number(per_token) * self.tokens

    def blocks(
        self,
        routed: Sequence[bool],
        rule: Recompute,
        rounds: Sequence[bool] = (),
        joins: bool = False,
    ) -> OperatorList:
        """Some layers, one after another, with experts or without; `rounds`: with linears in fp8.
        `joins`: of multi-token prediction, after a GEMM that joins hidden states with later
        tokens."""
        x = TapeTensor(self.residual)
        found = OperatorList(x)
        if joins:
            normed = self._norm(found, x, "hidden_norm", Recompute())
            both = found.add([normed], TapeTensor(2 * self.residual))
            x = self._linear(found, both, self.residual, "join")
        for block, experts in enumerate(routed):
            found.begin("", block, bool(rounds) and rounds[block])
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
        return found, self._enter_head(found, normed)

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

    def _linear(
        self, found: OperatorList, x: TapeTensor, size: float, name: str, named: bool = False
    ) -> TapeTensor:
        return found.add([x], TapeTensor(size, named=named), saved=[x], weights=name)

    def _rounding(self, found: OperatorList) -> RoundedOperators | None:
        """How linears of this layer are rounded."""
        return self.rounded if found.rounds else None

    def _linear_alone(
        self, found: OperatorList, x: TapeTensor, size: float, name: str
    ) -> TapeTensor:
        """A linear that is not split over tp, and rounded where others of its layer are."""
        rounded = self._rounding(found)
        if rounded is None:
            return self._linear(found, x, size, name)
        return rounded.project(found, x, {name: size}, x.bytes)[0]

    def _project(
        self,
        found: OperatorList,
        x: TapeTensor,
        sizes: dict[str, float],
        kept: bool,
        copied: float = 0.0,
        held: float = 0.0,
    ) -> list[TapeTensor]:
        """Linears of one input, with the bytes of their outputs: it is gathered before, and its
        gradient, one for all of them, is reduced after. In fp8, so many bytes of outputs are
        `copied`, and saved outputs hold so many of others."""
        gathers, rounded = self.split and self.sp, self._rounding(found)
        if rounded is not None:
            how = {"split": self.split, "gathers": gathers, "shards": gathers and kept}
            whole = self.whole if self.split else x.bytes
            return rounded.project(found, x, sizes, whole, **how, copied=copied, held=held)
        whole = self.whole if gathers else 0.0
        first, *more = sizes.values()
        outputs = [TapeTensor(first, extra=whole), *map(TapeTensor, more)]
        found.add(
            [x],
            outputs[0],
            saved=[x] if kept or not whole else [],
            weights=list(sizes),
            backward_extra=whole,
            keeps=0.0 if kept else whole,
            defers=0.0 if kept else whole,
            collective=self.split,
            more=outputs[1:],
            gathered=whole if kept else 0.0,
            gathers="input" if kept and whole else "",
            weights_last=True,
        )
        return outputs

    def _row_linear(self, found: OperatorList, x: TapeTensor, name: str) -> TapeTensor:
        """A linear and the sum over ranks; the gradient of its output is gathered."""
        if not self.split:
            return self._linear_alone(found, x, self.whole, name)
        if (rounded := self._rounding(found)) is not None:
            output = self.residual if self.sp else self.whole
            return rounded.sum_of_rows(found, x, name, output, self.whole)
        whole = self.whole if self.sp else 0.0
        return found.add(
            [x],
            TapeTensor(self.residual if self.sp else self.whole, extra=whole),
            saved=[x],
            weights=name,
            collective=True,
            gathered=whole,
            gathers="gradient" if self.sp else "",
            weights_last=True,
        )

    @property
    def _copies(self) -> bool:
        return self.split and self.sp and self.reorders

    def _in_rows(self, found: OperatorList, x: TapeTensor) -> TapeTensor:
        """Heads between the order of gathers and that of rows: a copy, if these differ."""
        if not self._copies:
            return x
        return found.add([x], TapeTensor(x.bytes))

    def _saves_shards(self, found: OperatorList, rule: Recompute) -> bool:
        return self.shards and not (rule.full or found.module in rule.modules)

    def _mlp(self, found: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        kept, size = self._saves_shards(found, rule), self.shape.ffn / self.tp * self.unit
        inner = self._project(found, x, dict.fromkeys(self._inner("mlp"), size), kept)
        out = self._row_linear(found, self._activated(found, inner, rule), "mlp.down")
        return self._biased(found, out, self.shape.mlp_bias)

    def _inner(self, name: str) -> list[str]:
        return [f"{name}.{each}" for each in (("gate", "up") if self.shape.gated else ("up",))]

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
        apart, rounded = _number(self.activations.grid.ep) > 1, self._rounded_experts(found)
        moved = rows if apart else 0.0  # as sent, beside as received, and as received, as sorted
        made, there, back = TapeTensor(rows, extra=moved, adds=not apart), moved, 0.0
        if rounded is not None:  # to experts as codes, from them as values
            there, back = rounded.packed(rows if apart else self.residual), moved
            made = TapeTensor(rounded.packed(rows), extra=there, gradient=rows)
        arrived = found.add([x], made, [x], collective=apart, backward_extra=back)
        result = self._inside(found, arrived, (width, rows), rule)
        shared = self.unit * moe.shared_ffn / self.tp if moe.shared else 0.0
        returned = self.activations.memory.returned_slots  # saved, to weigh them at home
        besides = self._size(self.activations.beside_experts()) - (rows if returned else 0.0)
        y = found.add(
            [result],
            TapeTensor(self.residual, extra=moved),
            [result] if returned else [],
            backward_extra=there,
            keeps=max(besides, 0.0),
            collective=apart,
        )
        if not moe.shared:
            return y
        sizes = dict.fromkeys(self._inner(f"{EXPERTS}.shared"), shared)
        hidden = self._project(found, x, sizes, self._saves_shards(found, rule))
        out = self._row_linear(
            found, self._activated(found, hidden, rule), f"{EXPERTS}.shared.down"
        )
        return found.add([y, out], TapeTensor(self.residual), passes=True)

    def _rounded_experts(self, found: OperatorList) -> RoundedSlots | None:
        """How routed experts of this layer are rounded."""
        moe, linears = self.shape.moe, self._rounding(found)
        if moe is None or linears is None or not linears.fp8.experts:
            return None
        grid, width, size = self.activations.grid, self.shape.width, self.activations.itemsize
        column, ffn = self._size(self.activations.slots()) * size, moe.ffn / _number(grid.etp)
        numel = moe.experts / _number(grid.ep) * ffn * width
        sizes = (column, column * width, column * ffn, numel)
        return RoundedSlots(linears.kept, *sizes, width, size)

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

    def _activated(
        self, found: OperatorList, inner: list[TapeTensor], rule: Recompute
    ) -> TapeTensor:
        again = rule.remakes("act") and found.module not in rule.modules
        copies = self.activations.memory.gated_copies - 3 if self.shape.gated else 0.0
        made = TapeTensor(inner[0].bytes, remade=again)
        return found.add(inner, made, saved=inner, keeps=copies * inner[0].bytes)

    def _attention(self, found: OperatorList, x: TapeTensor, rule: Recompute) -> TapeTensor:
        heads = self._latent if self.shape.mla is not None else self._heads
        queries, keys, values = heads(found, x, rule)
        attended = self._in_rows(found, self._attend(found, queries, keys, values))
        out = self._row_linear(found, attended, "attention.out")
        return self._biased(found, out, self.shape.out_bias)

    def _heads(
        self, found: OperatorList, x: TapeTensor, rule: Recompute
    ) -> tuple[TapeTensor, TapeTensor, TapeTensor]:
        wide, narrow = (
            _number(each) * self.shape.head_dim * self.unit
            for each in (self.activations.heads, self.activations.kv_heads)
        )
        sizes = {"attention.q.": wide, "attention.k.": narrow, "attention.v.": narrow}
        # Biases make tensors of their own. Values are copied, since attention saves them; norms
        # save queries and keys as they are.
        copied = sum(sizes.values()) if self.shape.qkv_bias else narrow
        norms = self.shape.qk_norm != "none" and not self.shape.qkv_bias and not self._copies
        how = (self._saves_shards(found, rule), copied, narrow if norms else 0.0)
        projected = self._project(found, x, sizes, *how)
        made: list[TapeTensor] = []
        for name, one in zip(("q", "k"), projected, strict=False):
            one = self._in_rows(found, one)
            if self.shape.qk_norm != "none":
                one = self._norm(found, one, f"attention.{name}_norm", Recompute())
            made.append(self._rotated(found, one))
        return made[0], made[1], self._in_rows(found, projected[2])

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
        values = found.add([both], TapeTensor(heads * mla.value_dim, base=both))
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
        heads = _number(self.activations.heads)
        size = heads * self.shape.value_dim * self.unit
        lse, inputs = heads * WIDE * self.tokens, [queries, keys, values]
        kept = lse + self._size(self.activations.exchanged())
        buffers = self._size(self.activations.context_buffers())
        if not self.activations.drops_pairs:
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


def _number(one: Array | Flags | float) -> float:
    return float(np.asarray(one).reshape(-1)[0])
