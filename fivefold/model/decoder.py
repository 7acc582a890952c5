"""The two ends of the model: the embedding in front, the head with its loss behind.

`Embedding.lookup`, `Embedding.place`, `Head.product` and `Head.cross_entropy` are replaceable, so
that a split vocabulary, a split sequence or a split backward can bring its own arithmetic.

Legend: B rows, S tokens, N = B·S, D model width, V vocabulary, P learned positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.shape import Shape
from fivefold.core.weights import weights
from fivefold.model.attention import Attention, LatentAttention, visible_keys_mask
from fivefold.model.batch import NOT_COUNTED, AttentionInfo, Context, TokenBatch
from fivefold.model.layers import (
    Linear,
    Mlp,
    Norm,
    NormKind,
    Product,
    linear_product,
    rotary_tables,
)
from fivefold.model.moe import MoeMlp

Lookup = Callable[[Tensor, Tensor], Tensor]
Place = Callable[[Tensor, Tensor, Tensor], Tensor]
CrossEntropy = Callable[[Tensor, Tensor], Tensor]


def embedding_lookup(tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """The row of each token."""
    return F.embedding(tokens_BS, weight_VD)


def add_positions(x_BSD: Tensor, positions_BS: Tensor, weight_PD: Tensor) -> Tensor:
    """Add the row of each token's position."""
    return x_BSD + F.embedding(positions_BS, weight_PD)


def summed_cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """The sum (never a mean) of the token losses, in float32 or wider."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    return F.cross_entropy(logits_NV.to(wide), labels_N, reduction="sum", ignore_index=NOT_COUNTED)


class Embedding(nn.Module):
    """Tokens to vectors, with learned positions where there are any."""

    def __init__(self, weight_VD: nn.Parameter, positions_PD: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.positions = weight_VD, positions_PD
        self.lookup: Lookup = embedding_lookup
        self.place: Place = add_positions

    def forward(self, tokens_BS: Tensor, batch: TokenBatch) -> Tensor:
        x_BSD = self.lookup(tokens_BS, self.weight)
        if self.positions is None:
            return x_BSD
        return self.place(x_BSD, batch.positions, self.positions)


class Head(nn.Module):
    """Vectors and labels to the summed loss. A tied head is given the embedding's own weight."""

    def __init__(self, weight_VD: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VD
        self.product: Product = linear_product
        self.cross_entropy: CrossEntropy = summed_cross_entropy

    def forward(self, x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        logits_NV = self.product(x_BSD.flatten(0, 1), self.weight, None)
        return self.cross_entropy(logits_NV, labels_BS.flatten())


# Multi-token prediction: layers behind the last one that each look one token further ahead.
#
# As DeepSeek-V3 (arXiv:2412.19437, section 2.2): depth j joins what the head saw at the depth
# before with the embedding of the token j places ahead, and predicts the one behind that.
# Embedding and head are the model's own. The order of the join, token first, and the norm in
# front of the head are those of the published weights (`eh_proj`, `shared_head.norm`).
#
# Legend: B rows, S tokens, D model width.


Walk = Callable[[Iterable[nn.Module], Tensor, Context], Tensor]

# Of the mean of all depths' losses beside the main one: DeepSeek-V3's, section 4.2, for its first
# 10T tokens (0.1 after that).
LOSS_WEIGHT = 0.3


class AheadLayer(nn.Module):
    """One depth: the join of state and token, a block, and the norm in front of the head."""

    def __init__(self, shape: Shape, block: nn.Module, kind: NormKind) -> None:
        super().__init__()
        self.token_norm = Norm(shape.width, shape.norm_bias, shape, kind)
        self.hidden_norm = Norm(shape.width, shape.norm_bias, shape, kind)
        self.join = Linear(shape.width, 2 * shape.width, False, kind)
        self.block = block
        self.norm = Norm(shape.width, shape.norm_bias, shape, kind)

    def forward(
        self, hidden_BSD: Tensor, token_BSD: Tensor, context: Context, walk: Walk
    ) -> Tensor:
        """What the head sees at this depth; `walk` goes through the block."""
        both = torch.cat([self.token_norm(token_BSD), self.hidden_norm(hidden_BSD)], dim=-1)
        return self.norm(walk([self.block], self.join(both), context))


# The decoder: embedding, blocks, final norm and head, or a contiguous slice of them.
#
# Parameter names are those of `core/weights.py` and global: a slice of blocks 4 to 7 has
# `blocks.4.attention.q.weight`. A new decoder has no values; `model/init.py` fills it.
#
# The seams, attributes that may be exchanged for callables of the same signature:
# `Linear.product`, `Norm.normalise`, `Attention.kernel`, `Embedding.lookup`, `Embedding.place`,
# `Head.product`, `Head.cross_entropy`, `Decoder.mask`, `Decoder.walk`, and those of experts in
# `model/moe.py`.
#
# Legend: B rows, S tokens, D model width.


class Block(nn.Module):
    """One layer: attention, then the MLP, each behind its norm and beside the residual."""

    def __init__(self, shape: Shape, i: int, kind: NormKind) -> None:
        super().__init__()
        latent, experts = shape.mla, shape.moe if shape.is_moe_layer(i) else None
        self.attention_norm = Norm(shape.width, shape.norm_bias, shape, kind)
        self.attention = LatentAttention(shape, latent, kind) if latent else Attention(shape, kind)
        self.mlp_norm = Norm(shape.width, shape.norm_bias, shape, kind)
        self.mlp = (
            MoeMlp(shape, experts, kind) if experts else Mlp(shape, shape.ffn, shape.mlp_bias, kind)
        )

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        attended_BSD = self.attention(self.attention_norm(x_BSD), context)
        x_BSD = x_BSD + _drop(attended_BSD, context.dropout)
        return x_BSD + _drop(self.mlp(self.mlp_norm(x_BSD)), context.dropout)


def walk_blocks(blocks: Iterable[nn.Module], x_BSD: Tensor, context: Context) -> Tensor:
    """Through the blocks, one after another."""
    for block in blocks:
        x_BSD = block(x_BSD, context)
    return x_BSD


class Decoder(nn.Module):
    """The model, or the slice of it that holds `layers`."""

    def __init__(self, shape: Shape, kind: NormKind, layers: range) -> None:
        super().__init__()
        first, last = layers.start == 0, layers.stop == shape.layers
        self.shape, self.layers = shape, layers
        self.dropout = 0.0  # of embedding, attention and residual; training sets the shape's
        self.embed = Embedding(*self._embedding_weights(kind)) if first else None
        self.blocks = nn.ModuleDict({str(i): Block(shape, i, kind) for i in layers})
        self.norm = Norm(shape.width, shape.norm_bias, shape, kind) if last else None
        self.head = Head(self._head_weight(kind)) if last else None
        self.mtp = nn.ModuleDict(self._ahead(kind) if last else {})
        self.mask: Callable[[TokenBatch, int | None], Tensor | None] = visible_keys_mask
        self.walk: Walk = walk_blocks

    def forward(self, inputs: Tensor, batch: TokenBatch) -> Tensor:
        """Token ids (B, S), or hidden states of the slice before, to hidden states, or to the
        sum of the token losses where this slice has the head.

        In training, a model with multi-token prediction adds its weighted losses to that sum.
        """
        x_BSD = inputs if self.embed is None else self.embed(inputs, batch)
        context = self.context(batch, x_BSD.dtype)
        if self.embed is not None:
            x_BSD = _drop(x_BSD, context.dropout)
        x_BSD = self.walk(self.blocks.values(), x_BSD, context)
        if self.norm is None or self.head is None:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        loss = self.head(x_BSD, batch.labels)
        if not self.training or not self.shape.mtp:
            return loss
        return loss + self._loss_ahead(x_BSD, batch, context)

    def _loss_ahead(self, x_BSD: Tensor, batch: TokenBatch, context: Context) -> Tensor:
        """The mean over the depths of their summed losses, weighted."""
        assert len(batch.ahead) == self.shape.mtp, "give the batch of look_ahead"
        assert self.head is not None
        embed = self.mtp["embed"] if self.embed is None else self.embed
        losses: list[Tensor] = []
        for j, (tokens_BS, labels_BS) in enumerate(batch.ahead):
            token_BSD = embed(tokens_BS, batch)
            x_BSD = self.mtp[str(j)](x_BSD, token_BSD, context, self.walk)
            losses.append(self.head(x_BSD, labels_BS))
        return torch.stack(losses).mean() * LOSS_WEIGHT

    def all_blocks(self) -> list[Block]:
        """Every block in forward order, those of multi-token prediction too."""
        return [each for each in self.modules() if isinstance(each, Block)]

    def context(self, batch: TokenBatch, dtype: torch.dtype) -> Context:
        """What the blocks share, for hidden states of `dtype`."""
        dropout = self.dropout if self.training else 0.0
        window = self.shape.window
        mask = self.mask(batch, window)
        info = AttentionInfo(batch.positions, batch.documents, window, mask, dropout, batch.row)
        if self.shape.positions != "rotary":
            return Context(info, rotary=None)
        wide = torch.promote_types(dtype, torch.float32)
        return Context(info, rotary_tables(self.shape, batch.positions, wide))

    def _embedding_weights(self, kind: NormKind) -> tuple[nn.Parameter, nn.Parameter | None]:
        shape = self.shape
        learned = shape.positions == "learned"
        positions = kind.empty(shape.max_seq, shape.width) if learned else None
        return kind.empty(shape.vocab, shape.width), positions

    def _ahead(self, kind: NormKind) -> dict[str, nn.Module]:
        """The layers of multi-token prediction, and the embedding where this slice has no other."""
        shape, layers = self.shape, dict[str, nn.Module]()
        for j in range(shape.mtp):
            layers[str(j)] = AheadLayer(shape, Block(shape, shape.layers, kind), kind)
        if shape.mtp and self.embed is None:
            assert self.head is not None
            weight = self.head.weight if shape.tied else kind.empty(shape.vocab, shape.width)
            layers["embed"] = Embedding(weight)
        return layers

    def _head_weight(self, kind: NormKind) -> nn.Parameter:
        if self.shape.tied and self.embed is not None:
            return self.embed.weight
        return kind.empty(self.shape.vocab, self.shape.width)


def from_config(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layers: range | None = None,
) -> Decoder:
    """A decoder without values, or the slice of it with these blocks (and the ends they reach)."""
    weights(shape)  # refuses what cannot be built
    layers = range(shape.layers) if layers is None else layers
    assert layers.step == 1 and 0 <= layers.start <= layers.stop <= shape.layers, layers
    return Decoder(shape, NormKind(dtype, torch.device(device)), layers)


def _drop(x: Tensor, dropout: float) -> Tensor:
    return F.dropout(x, dropout) if dropout else x
