"""The operators of layers, embedding and head as one rank runs them, in bytes of a microbatch.

`operator_tape` plays them. Inside of experts only sums are known (`cost/memory/activations.py`).

What matmuls in fp8 hold, in bytes of a microbatch: codes in place of what bf16 saves.

An input is rounded in two orders, one for the matmul that runs and one that waits for the weight
gradient; so is an output gradient. Rounded weights stay over a step, or are made at every use.
Routed experts have one order of rows, which travel as codes, and values again for weight gradients.

The operators that layers are made of, as one rank runs them, in bytes of a microbatch: norms,
activations, and linears, split over tp or not.

The operators of layers with an own mixer, in all layers or in those of a hybrid without
attention, for the tape of `layer_operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fivefold.core.layout import EXPERT_WEIGHT, SCALE_BYTES, Fp8, packed_row
from fivefold.core.model import LayerKind, Mla, Moe, Recompute, mixer_table
from fivefold.cost import Array, Flags
from fivefold.cost.layer.operator_tape import OperatorList, TapeTensor
from fivefold.cost.memory import WIDE, Activations
from fivefold.cost.traffic import max_nodes_per_token


@dataclass(frozen=True)
class RoundedOperators:
    """For one plan. `unit`: bytes of a column of all tokens. `caches_weights`: rounded ones
    stay."""

    fp8: Fp8
    caches_weights: bool
    itemsize: int
    unit: float

    @property
    def wgrad(self) -> bool:
        """Whether operands of weight gradients are rounded."""
        return self.fp8.wgrad == "fp8"

    def codes(self, size: float) -> float:
        """Bytes of the codes of so many bytes."""
        return size * self.fp8.code_bytes / self.itemsize

    def weights(self, inputs: float, outputs: float) -> float:
        """Bytes of the weights of a linear that are rounded for one use, in both orders, from the
        bytes of its inputs and outputs."""
        size = self.fp8.weight_bytes
        return 0.0 if self.caches_weights else size * inputs / self.unit * outputs / self.unit

    def project(
        self,
        operators: OperatorList,
        x: TapeTensor,
        sizes: dict[str, float],
        input_bytes: float,
        *,
        split: bool = False,
        gathers: bool = False,
        shards: bool = False,
        copied: float = 0.0,
        live_bytes: float = 0.0,
    ) -> list[TapeTensor]:
        """Linears of one input, which has `input_bytes` where it is gathered; `shards`: this rank's
        tokens are saved. Outputs are one tensor: some are `copied` from it, and others, which are
        saved, hold more of it."""
        coded, twice = gathers and self.fp8.gathers_codes, 1 + self.wgrad
        full, outs = self.codes(input_bytes), sum(sizes.values())
        weights, moved = self.weights(input_bytes, outs), input_bytes if gathers else 0.0
        if coded:
            moved = self.codes(x.bytes)
        saved, keeps = [x], 0.0
        if self.wgrad and not shards:
            saved, keeps = [], full
        elif gathers and not shards:
            saved, keeps = [], input_bytes
        first, *tail_sizes = sizes.values()
        code_bytes = moved + full + (full if self.wgrad and not shards else 0.0)
        outputs = [
            TapeTensor(first, extra=code_bytes + weights + copied),
            *map(TapeTensor, tail_sizes),
        ]
        waits = (full if self.wgrad else input_bytes) if shards else 0.0
        again = moved + full * twice - waits if shards else 0.0
        operators.add(
            [x],
            outputs[0],
            saved=saved,
            weights=list(sizes),
            backward_extra=self.codes(outs) * twice + again + (input_bytes if gathers else 0.0),
            keeps=keeps + live_bytes,
            defers=keeps,
            collective=split,
            extra_outputs=outputs[1:],
            gathered=waits,
            gathers="input" if shards else "",
            weights_last=True,
            codes=self.codes(outs) if self.wgrad else 0.0,
            rounded=weights,
        )
        return outputs

    def sum_of_rows(
        self, operators: OperatorList, x: TapeTensor, name: str, output: float, full_output: float
    ) -> TapeTensor:
        """A linear and the sum over ranks; the gradient of its output is gathered if a rank has
        less than the full one."""
        gathers, twice = output < full_output, 1 + self.wgrad
        inputs, full = self.codes(x.bytes), self.codes(full_output)
        weights = self.weights(x.bytes, full_output)
        output_extra = inputs * twice + weights + (full_output if gathers else 0.0)
        moved = 0.0
        if gathers:
            moved = self.codes(output) if self.fp8.gathers_codes else full_output
        waits = full_output if gathers and not self.wgrad else 0.0
        return operators.add(
            [x],
            TapeTensor(output, extra=output_extra),
            saved=[] if self.wgrad else [x],
            weights=name,
            backward_extra=moved - waits + full * twice + x.bytes,
            keeps=inputs if self.wgrad else 0.0,
            defers=inputs if self.wgrad else 0.0,
            collective=True,
            gathered=waits,
            gathers="gradient" if waits else "",
            weights_last=True,
            codes=full if self.wgrad else 0.0,
            rounded=weights,
        )


@dataclass(frozen=True)
class RoundedSlots:
    """Routed experts of one layer in fp8, in bytes of the slots of a rank: a column of them, rows
    of the model's width, and what is inside of experts. `numel`: of one stacked weight."""

    caches_weights: bool
    column: float
    rows: float
    inner: float
    numel: float
    model_width: int
    itemsize: int

    def packed(self, size: float) -> float:
        """Bytes of rows of the model's width as they travel to experts, from those of values."""
        return size * packed_row(self.model_width) / (self.model_width * self.itemsize)

    def codes(self, size: float) -> float:
        """Bytes of codes with a scale for each row."""
        return (size + self.column * SCALE_BYTES) / self.itemsize

    def project(
        self, operators: OperatorList, x: TapeTensor, names: Sequence[str]
    ) -> list[TapeTensor]:
        """Gate and up, as one matmul. Packed rows are saved; gradients are rounded here."""
        weights = self._weights(len(names), len(names) * self.inner)
        first, *tail = [TapeTensor(self.inner, extra=weights / len(names)) for _ in names]
        codes = self.codes(len(names) * self.inner)
        operators.add(
            [x],
            first,
            saved=[x],
            weights=names,
            backward_extra=codes,
            extra_outputs=tail,
            weights_last=True,
            codes=codes,
            dequantised=self.rows + self.inner,
            rounded=self._weights(len(names), self.rows),
        )
        return [first, *tail]

    def down(self, operators: OperatorList, x: TapeTensor, name: str) -> TapeTensor:
        """Rows are rounded here and saved as codes; the gradients of its results come packed."""
        codes, packed = self.codes(self.inner), self.packed(self.rows)
        return operators.add(
            [x],
            TapeTensor(self.rows, extra=codes + self._weights(1, self.rows), gradient=packed),
            weights=name,
            keeps=codes,
            defers=codes,
            weights_last=True,
            dequantised=self.rows + self.inner,
            rounded=self._weights(1, self.inner),
        )

    def _weights(self, stacks: int, result: float) -> float:
        """Bytes of rounded weights beside a result of this size: in both orders before it is made,
        in one while it is."""
        numel = 0.0 if self.caches_weights else stacks * self.numel
        return max(EXPERT_WEIGHT * numel - result, numel)


def rounded_slots(activations: Activations, column: float, keeps_weights: bool) -> RoundedSlots:
    """The experts of a rank, of one layout; `column`: bytes of one of all their slots."""
    shape, grid = activations.shape, activations.grid
    assert shape.moe is not None
    ffn = shape.moe.ffn / grid.etp.item()
    numel = shape.moe.experts / grid.ep.item() * ffn * shape.width
    sizes = (column, column * shape.width, column * ffn, numel)
    return RoundedSlots(keeps_weights, *sizes, shape.width, activations.itemsize)


SCALED = 7  # bytes of 2 that the weight gradient of a norm holds besides: widened, and multiplied


class LinearOperators:
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
        self.tp, self.sp = int(number(grid.tp)), bool(number(grid.sp))
        self.split = self.tp > 1
        self.residual = self._size(activations.residual)
        self.full_residual = self._size(activations.full_residual)
        self.unit = activations.itemsize * tokens

    def _size(self, per_token: Array | float) -> float:
        return number(per_token) * self.tokens

    def _norm(
        self, operators: OperatorList, x: TapeTensor, name: str, rule: Recompute
    ) -> TapeTensor:
        """Its output may be made again from its input, for the GEMMs that read it."""
        output = TapeTensor(x.bytes, remade=rule.remakes("norm"), source=x)
        if not self.queued:
            return operators.add([x], output, saved=[x], weights=name)
        plain = operators.add([x], TapeTensor(x.bytes), saved=[x])
        extra = SCALED * x.bytes
        return operators.add([plain], output, saved=[x], weights=name, settle_extra=extra)

    def _linear(
        self, operators: OperatorList, x: TapeTensor, size: float, name: str, named: bool = False
    ) -> TapeTensor:
        return operators.add([x], TapeTensor(size, named=named), saved=[x], weights=name)

    def _rounding(self, operators: OperatorList) -> RoundedOperators | None:
        """How linears of this layer are rounded."""
        return self.rounded if operators.rounds else None

    def _linear_alone(
        self, operators: OperatorList, x: TapeTensor, size: float, name: str
    ) -> TapeTensor:
        """A linear that is not split over tp, and rounded where others of its layer are."""
        rounded = self._rounding(operators)
        if rounded is None:
            return self._linear(operators, x, size, name)
        return rounded.project(operators, x, {name: size}, x.bytes)[0]

    def _project(
        self,
        operators: OperatorList,
        x: TapeTensor,
        sizes: dict[str, float],
        saves_shards: bool,
        copied: float = 0.0,
        live_bytes: float = 0.0,
    ) -> list[TapeTensor]:
        """Linears of one input, with the bytes of their outputs: it is gathered before, and its
        gradient, one for all of them, is reduced after. In fp8, so many bytes of outputs are
        `copied`, and saved outputs hold so many of others."""
        gathers, rounded = self.split and self.sp, self._rounding(operators)
        if rounded is not None:
            options = {"split": self.split, "gathers": gathers, "shards": gathers and saves_shards}
            full_bytes = self.full_residual if self.split else x.bytes
            return rounded.project(
                operators, x, sizes, full_bytes, **options, copied=copied, live_bytes=live_bytes
            )
        full_bytes = self.full_residual if gathers else 0.0
        first, *tail_sizes = sizes.values()
        outputs = [TapeTensor(first, extra=full_bytes), *map(TapeTensor, tail_sizes)]
        operators.add(
            [x],
            outputs[0],
            saved=[x] if saves_shards or not full_bytes else [],
            weights=list(sizes),
            backward_extra=full_bytes,
            keeps=0.0 if saves_shards else full_bytes,
            defers=0.0 if saves_shards else full_bytes,
            collective=self.split,
            extra_outputs=outputs[1:],
            gathered=full_bytes if saves_shards else 0.0,
            gathers="input" if saves_shards and full_bytes else "",
            weights_last=True,
        )
        return outputs

    def _row_linear(self, operators: OperatorList, x: TapeTensor, name: str) -> TapeTensor:
        """A linear and the sum over ranks; the gradient of its output is gathered."""
        if not self.split:
            return self._linear_alone(operators, x, self.full_residual, name)
        if (rounded := self._rounding(operators)) is not None:
            output = self.residual if self.sp else self.full_residual
            return rounded.sum_of_rows(operators, x, name, output, self.full_residual)
        full_bytes = self.full_residual if self.sp else 0.0
        return operators.add(
            [x],
            TapeTensor(self.residual if self.sp else self.full_residual, extra=full_bytes),
            saved=[x],
            weights=name,
            collective=True,
            gathered=full_bytes,
            gathers="gradient" if self.sp else "",
            weights_last=True,
        )

    @property
    def _copies(self) -> bool:
        return self.split and self.sp and self.reorders

    def _in_rows(self, operators: OperatorList, x: TapeTensor) -> TapeTensor:
        """Heads between the order of gathers and that of rows: a copy, if these differ."""
        if not self._copies:
            return x
        return operators.add([x], TapeTensor(x.bytes))

    def _saves_shards(self, operators: OperatorList, rule: Recompute) -> bool:
        return self.shards and not (rule.full or operators.module in rule.modules)

    def _inner(self, name: str) -> list[str]:
        return [
            f"{name}.{projection}"
            for projection in (("gate", "up") if self.shape.gated else ("up",))
        ]

    def _biased(self, operators: OperatorList, x: TapeTensor, bias: bool) -> TapeTensor:
        """A bias after the sum over ranks; that of one rank is part of the GEMM."""
        if not bias or not self.split:
            return x
        return operators.add([x], TapeTensor(x.bytes), passes=True)

    def _activated(
        self, operators: OperatorList, inner: list[TapeTensor], rule: Recompute
    ) -> TapeTensor:
        again = rule.remakes("act") and operators.module not in rule.modules
        copies = self.activations.memory.gated_copies - 3 if self.shape.gated else 0.0
        output = TapeTensor(inner[0].bytes, remade=again)
        return operators.add(inner, output, saved=inner, keeps=copies * inner[0].bytes)


def number(value: Array | Flags | float) -> float:
    return float(np.asarray(value).reshape(-1)[0])


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


class MixerOperators(LayerOperators):
    """The operators of layers with an own mixer."""

    def _mixed(
        self, operators: OperatorList, x: TapeTensor, kind: LayerKind, rule: Recompute
    ) -> TapeTensor:
        activations = self.activations.of_mixer if kind.recurrent else self.activations
        mixer = activations.mixer
        if mixer is None:
            return self._attention(operators, x, rule)
        sizes = {
            f"attention.{name}.": float(size[0]) * self.unit
            for name, size in mixer.projections.items()
        }
        projections = self._project(operators, x, sizes, self._saves_shards(operators, rule))
        projections = [self._in_rows(operators, projection) for projection in projections]
        rows = mixer_table(activations.shape)
        weights = [f"attention.{row.name}" for row in rows if row.reads == "nothing"]
        result = TapeTensor(float(mixer.back[0]) * self.unit)
        saved_bytes = float(mixer.saved[0]) * self.unit
        mixed = operators.add(
            projections, result, [*projections, result], weights, keeps=saved_bytes
        )
        out = self._row_linear(operators, self._in_rows(operators, mixed), "attention.out")
        return self._biased(operators, out, rows[-1].bias)
