"""The decoder: embedding, blocks, final norm and head, or a contiguous slice of them.

Parameter names are those of `core/weights.py` and global: a slice of blocks 4 to 7 has
`blocks.4.attention.q.weight`. A new decoder has no values; `model/init.py` fills it.

The seams, attributes that may be exchanged for callables of the same signature: `Linear.product`,
`Norm.normalise`, `Attention.kernel`, `Embedding.lookup`, `Embedding.place`, `Head.product`,
`Head.cross_entropy`, `Decoder.mask`, `Decoder.walk`.

Legend: B rows, S tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.shape import Shape
from fivefold.core.weights import weights
from fivefold.model.attention import Attention, visible_keys_mask
from fivefold.model.batch import AttentionInfo, Context, TokenBatch
from fivefold.model.ends import Embedding, Head
from fivefold.model.layers import Kind, Mlp, Norm, rotary_tables


class Block(nn.Module):
    """One layer: attention, then the MLP, each behind its norm and beside the residual."""

    def __init__(self, shape: Shape, kind: Kind) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.width, shape.norm_bias, shape, kind)
        self.attention = Attention(shape, kind)
        self.mlp_norm = Norm(shape.width, shape.norm_bias, shape, kind)
        self.mlp = Mlp(shape, kind)

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

    def __init__(self, shape: Shape, kind: Kind, layers: range) -> None:
        super().__init__()
        first, last = layers.start == 0, layers.stop == shape.layers
        self.shape, self.layers = shape, layers
        self.dropout = 0.0  # of embedding, attention and residual; training sets the shape's
        self.embed = Embedding(shape, kind) if first else None
        self.blocks = nn.ModuleDict({str(i): Block(shape, kind) for i in layers})
        self.norm = Norm(shape.width, shape.norm_bias, shape, kind) if last else None
        self.head = Head(self._head_weight(kind)) if last else None
        self.mask: Callable[[TokenBatch, int | None], Tensor | None] = visible_keys_mask
        self.walk: Callable[[Iterable[nn.Module], Tensor, Context], Tensor] = walk_blocks

    def forward(self, inputs: Tensor, batch: TokenBatch) -> Tensor:
        """Token ids (B, S), or hidden states of the slice before, to hidden states, or to the
        sum of the token losses where this slice has the head."""
        x_BSD = inputs if self.embed is None else self.embed(inputs, batch)
        context = self.context(batch, x_BSD.dtype)
        if self.embed is not None:
            x_BSD = _drop(x_BSD, context.dropout)
        x_BSD = self.walk(self.blocks.values(), x_BSD, context)
        if self.norm is None or self.head is None:
            return x_BSD
        return self.head(self.norm(x_BSD), batch.labels)

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

    def _head_weight(self, kind: Kind) -> nn.Parameter:
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
    return Decoder(shape, Kind(dtype, torch.device(device)), layers)


def _drop(x: Tensor, dropout: float) -> Tensor:
    return F.dropout(x, dropout) if dropout else x
