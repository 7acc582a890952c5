"""Compilation, block by block.

One graph for each block and one for the loss: on an H200 a single graph of the whole model is 3 to
7% slower, because its elementwise kernels double. A block that cannot be one graph is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fivefold.model.batch import Context
from fivefold.model.decoder import Decoder, walk_blocks


def compile_blocks(decoder: Decoder, backend: str = "inductor") -> None:
    """Compile every block and the loss in place; weights keep their names."""
    compiled = partial(torch.compile, fullgraph=True, backend=backend)
    for block in decoder.all_blocks():
        block.forward = compiled(block.forward)
    if decoder.head is not None:
        decoder.head.cross_entropy = compiled(decoder.head.cross_entropy)


# Recomputation of activations in backward: the one place that decides what is kept.
#
# `full` keeps the input of each segment of blocks and runs the segment again. `selective` keeps
# the outputs of matrix products, of attention and of collectives, and runs only the cheap rest
# again: no collective is issued twice. Gradients are the same to the bit.
#
# `selective` wraps the forward of each block, so that compiling a block compiles the choice with
# it; `full` wraps the walk through the blocks, around whatever was compiled.


Recompute = Literal["none", "selective", "full"]

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
}
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.linear.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
} | ATTENTION


def apply(decoder: Decoder, kind: Recompute, blocks: int = 1, keeps_attention: bool = True) -> None:
    """Make the decoder recompute; `full` in segments of so many blocks.

    Without `keeps_attention`, the kernel of attention keeps what it needs by itself.
    """
    if kind == "full":
        decoder.walk = partial(_walk_segments, blocks)
    elif kind == "selective":
        for block in decoder.all_blocks():
            kept = KEPT if keeps_attention else KEPT - ATTENTION
            block.forward = partial(_run_selectively, kept, block.forward)


def _walk_segments(
    size: int, blocks: Iterable[nn.Module], x_BSD: Tensor, context: Context
) -> Tensor:
    all_blocks = list(blocks)
    for start in range(0, len(all_blocks), size):
        x_BSD = checkpoint(
            walk_blocks,
            all_blocks[start : start + size],
            x_BSD,
            context,
            use_reentrant=False,
            preserve_rng_state=context.dropout > 0,
        )
    return x_BSD


def _run_selectively(
    kept: Set[Any], forward: Callable[[Tensor, Context], Tensor], x_BSD: Tensor, context: Context
) -> Tensor:
    return checkpoint(
        forward,
        x_BSD,
        context,
        use_reentrant=False,
        preserve_rng_state=context.dropout > 0,
        context_fn=partial(_selective_contexts, kept),
    )


def _selective_contexts(kept: Set[Any]) -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(partial(_policy, kept))


def _policy(
    kept: Set[Any], _: object, op: Any, *args: object, **kwargs: object
) -> CheckpointPolicy:
    # wait_tensor lives in the same namespace as the collectives it waits for.
    if op in kept or op.namespace == "_c10d_functional":
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
