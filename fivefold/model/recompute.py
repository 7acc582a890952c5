"""Activations that are computed again in backward, as `core/model/recompute.py` names them.

Outputs of norms and activations are made again from inputs that are saved anyway. Of attention, an
MLP or experts the forward runs again from its input, and `full` runs segments of blocks again from
theirs; collectives inside are then issued again, unless attention itself is kept. Gradients are the
same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.core.model import Recompute
from fivefold.model.batch import Context
from fivefold.model.decoder import Decoder, run_blocks
from fivefold.model.kept_attention import kept_once
from fivefold.model.layers import Mlp, Norm
from fivefold.model.moe import Experts


def apply_recompute(decoder: Decoder, rule: Recompute) -> None:
    """Make the decoder compute activations again."""
    if rule.full:
        decoder.run_blocks = partial(_run_segments, rule)
        for block in decoder.all_blocks() if rule.keeps_attention else ():
            block.attention.kernel = kept_once(block.attention.kernel, block.attention.site)
        return
    for block in decoder.all_blocks():
        block.repeats = frozenset(rule.modules)
        inside = {"attention": block.attention, block.mlp_kind: block.mlp}
        for name, module in inside.items():
            if name not in block.repeats:
                _remake(module, rule)
        for norm in (block.attention_norm, block.mlp_norm):
            if norm is not None:
                norm.remakes = rule.remakes("norm")


def _remake(outer: nn.Module, rule: Recompute) -> None:
    """Norms and activations of a module whose forward does not run again as a whole."""
    for module in outer.modules():
        if isinstance(module, Norm):
            module.remakes = rule.remakes("norm")
        elif isinstance(module, Mlp | Experts):
            module.activate.remakes = rule.remakes("act")


def _run_segments(
    rule: Recompute, blocks: Iterable[nn.Module], x_BSD: Tensor, context: Context
) -> Tensor:
    all_blocks = list(blocks)
    for start in range(0, len(all_blocks), rule.blocks):
        x_BSD = checkpoint(
            run_blocks,
            all_blocks[start : start + rule.blocks],
            x_BSD,
            context.keeping() if rule.keeps_attention else context,
            use_reentrant=False,
            preserve_rng_state=False,
        )
    return x_BSD
