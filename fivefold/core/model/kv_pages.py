"""What the cache of keys and values holds of a token: the one rule of the engine and of plans.

A token has a key and a value of every KV head in every layer. Tensor parallelism splits the heads;
KV heads fewer than its ranks are replicated, so a rank has one at least. Latent attention keeps the
latent and the rotated key of all heads instead, and every rank of tp has all of it. Numbers of one
byte are codes of fp8 (e4m3): each head of a key and of a value has a float32 scale beside them.
"""

from __future__ import annotations

import math
from functools import cache

from fivefold.core.model.shape import Mla, Shape, forward_flops

KV_FORMATS = {"bf16": 2, "fp8": 1}  # of the cache, and the bytes of a number
_SCALE_BYTES = 4
BLOCK = 16  # tokens: a sequence takes whole blocks of the cache
STEP_TOKENS = 8192  # budget of a step on a GPU: decode and chunks of prompts
# Of the speed of matmuls, at chunks of prompts on an H200: 8 layers of 8B take 28 ms for 8,192
# tokens and 28 ms more for every 8,192 tokens before them.
_ATTENTION_SPEED = 0.6


def blocks_of(tokens: int) -> int:
    """The number of blocks that so many tokens need."""
    return -(-tokens // BLOCK)


def page_sizes(kv_heads: int, head_dim: int, mla: Mla | None) -> tuple[tuple[int, int], ...]:
    """Heads and width of a token's key and value in one layer. A latent is both."""
    if mla is None:
        return (kv_heads, head_dim), (kv_heads, head_dim)
    return ((1, mla.kv_rank + mla.rope_dim),)


def layer_bytes(sizes: tuple[tuple[int, int], ...], itemsize: int) -> int:
    """Bytes of the cache for a token in one layer that has pages of these sizes."""
    scale = _SCALE_BYTES if itemsize == 1 else 0
    return sum(heads * (width * itemsize + scale) for heads, width in sizes)


def rank_kv_heads(shape: Shape, tp: int) -> int:
    """KV heads of a rank of tp."""
    return max(1, shape.kv_heads // tp)


def token_bytes(shape: Shape, layers: int, tp: int, itemsize: int) -> int:
    """Bytes of the cache for one token in so many layers, on one rank of tp."""
    sizes = page_sizes(rank_kv_heads(shape, tp), shape.head_dim, shape.mla)
    return layers * layer_bytes(sizes, itemsize)


def kept_tokens(length: int, window: int | None, chunk: int) -> int:
    """Tokens of a sequence that the cache keeps: all, or where all layers have a window those of it
    and of a step's chunk, which may begin and end within a block."""
    return length if window is None else min(length, window + chunk + BLOCK)


@cache
def even_context(shape: Shape) -> float:
    """Earlier tokens whose attention takes a token of a prompt as long as all else in its layers.
    Infinite where windows hide them."""
    near, far = (forward_flops(shape, seq) for seq in (shape.max_seq, 2 * shape.max_seq))
    of_key = (far.scores - near.scores) / (shape.max_seq / 2)
    remaining = near.total - near.scores - near.head - near.mtp
    return _ATTENTION_SPEED * remaining / of_key if of_key > 0 else math.inf
