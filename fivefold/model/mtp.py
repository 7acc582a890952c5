"""Multi-token prediction: layers behind the last one that each look one token further ahead.

As DeepSeek-V3 (arXiv:2412.19437, section 2.2): depth j joins what the head saw at the depth before
with the embedding of the token j places ahead, and predicts the one behind that. Embedding and head
are the model's own. The order of the join, token first, and the norm in front of the head are those
of the published weights (`eh_proj`, `shared_head.norm`).

Legend: B rows, S tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fivefold.core.shape import Shape
from fivefold.model.batch import Context
from fivefold.model.layers import Kind, Linear, Norm

Walk = Callable[[Iterable[nn.Module], Tensor, Context], Tensor]

# Of the mean of all depths' losses beside the main one: DeepSeek-V3's, section 4.2, for its first
# 10T tokens (0.1 after that).
LOSS_WEIGHT = 0.3


class AheadLayer(nn.Module):
    """One depth: the join of state and token, a block, and the norm in front of the head."""

    def __init__(self, shape: Shape, block: nn.Module, kind: Kind) -> None:
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
