"""How the blocks of a decoder run: compiled, and with activations recomputed in backward.

Compilation makes one graph for each block and one for the loss. On an H200, one graph of the full
model is 3 to 7% slower, because its elementwise kernels double. A block that needs a graph break
is an error.

Recomputation: `full` saves the input of each segment of blocks and runs the segment again in
backward. `selective` saves the outputs of matmuls, attention and collectives and runs only the
cheap rest again: no collective is issued twice. Gradients are the same to the bit.

`selective` wraps each block, so that it is compiled with the block. `full` wraps the loop over the
blocks, around compiled ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
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
from fivefold.model.decoder import Block, Decoder, RunBlock, run_blocks

Recompute = Literal["none", "selective", "full"]

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
}
SAVED_OPS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.linear.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
} | ATTENTION


def compile_blocks(decoder: Decoder, backend: str = "inductor") -> None:
    """Compile every block and the loss; weights keep their names."""
    compiled = partial(torch.compile, fullgraph=True, backend=backend)
    for block in decoder.all_blocks():
        block.run = compiled(block.run)
    if decoder.head is not None:
        decoder.head.cross_entropy = compiled(decoder.head.cross_entropy)


def apply_recompute(
    decoder: Decoder, kind: Recompute, blocks: int = 1, keeps_attention: bool = True
) -> None:
    """Make the decoder recompute activations; `full` in segments of so many blocks.

    Without `keeps_attention`, the attention kernel saves its own output.
    """
    if kind == "full":
        decoder.run_blocks = partial(_run_segments, blocks)
    elif kind == "selective":
        saved = SAVED_OPS if keeps_attention else SAVED_OPS - ATTENTION
        for block in decoder.all_blocks():
            block.run = partial(_run_selectively, saved, block.run)


def _run_segments(
    size: int, blocks: Iterable[nn.Module], x_BSD: Tensor, context: Context
) -> Tensor:
    all_blocks = list(blocks)
    for start in range(0, len(all_blocks), size):
        x_BSD = checkpoint(
            run_blocks,
            all_blocks[start : start + size],
            x_BSD,
            context,
            use_reentrant=False,
            preserve_rng_state=context.dropout > 0,
        )
    return x_BSD


def _run_selectively(
    saved: Set[Any], run: RunBlock, block: Block, x_BSD: Tensor, context: Context
) -> Tensor:
    return checkpoint(
        partial(run, block),
        x_BSD,
        context,
        use_reentrant=False,
        preserve_rng_state=context.dropout > 0,
        context_fn=partial(_selective_contexts, saved),
    )


def _selective_contexts(saved: Set[Any]) -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(partial(_policy, saved))


def _policy(
    saved: Set[Any], _: object, op: Any, *args: object, **kwargs: object
) -> CheckpointPolicy:
    # wait_tensor is in the same namespace as the collectives it waits for.
    if op in saved or op.namespace == "_c10d_functional":
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
