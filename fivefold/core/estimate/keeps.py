"""What a software stack keeps in memory, beside what every one must.

Read from sources and papers, but for the numbers of `Cache`, which were fitted to peaks and
failures that were measured: they say how much more an allocator holds than is alive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

GIB = 2**30
# What selective recomputation leaves in place. core: all but attention's scores. products: results
# of products, of attention and of collectives. alternate: of every second product, and attention.
Selective = Literal["core", "products", "alternate"]

# Who has which layers. even: as many in each stage. balanced: the largest stage is smallest, with
# the head. walk: stage by stage until each has its share, with the head. spared: even, but for one
# layer fewer at either end.
Split = Literal["even", "balanced", "walk", "spared"]


@dataclass(frozen=True)
class Cache:
    """What nanotron's allocator holds beside what is alive; fitted on half of the runs of a sweep.

    A tensor that a collective has read is free only when the GPU has passed it, and the host runs
    ahead of the GPU. So blocks of a microbatch's tokens are *pending*: `pending` of them at most,
    never more than `most` of what is alive, and fully only after some microbatches. In a pipeline
    of two, the host runs ahead where a layer's work is well above `work`.
    """

    pending: float = 43.0
    most: float = 0.573
    microbatches: float = 2.37  # after so many, half of it is there
    work: float = 1.26e12  # FLOPs
    end_gradients: float = 2.25  # copies of the gradient of an end's matrix, in 16 bits
    gathered: float = 0.75  # share of ZeRO-1's flattened weights that finds no freed block


@dataclass(frozen=True)
class Keeps:
    """Bytes and copies that a stack chooses.

    `gathered`: inputs of split products are kept as all tokens of a tp group, not as this rank's.
    `whole_at_head`: so is the head's, whatever the others are.
    `root`: under ZeRO-3 embedding and head stay whole, with their gradients, from their first use.
    """

    split: Split = "even"
    weight_bytes: int | None = None  # of a weight between its uses; None: as it is computed with
    master_bytes: int = 4
    gradient_bytes: int = 4  # of a summed gradient, whatever the sum travels in
    backward_bytes: int = 0  # of gradients that live beside the sums until a backward ends
    bucket_bytes: int = 0  # beside them where data ranks sum whole gradients
    gathered: bool = False
    whole_at_head: bool = False
    packed: bool = False  # equal heads: queries, keys and values stay packed beside copies of two
    gated_copies: float = 4.0  # of the MLP's width: gate, up, the activation, and the product
    statistics: float = 4.0  # bytes of a token that a norm keeps
    mask_bytes: float = 0.0  # of an element that is dropped or not, behind attention and the MLP
    score_bytes: float = 5.0  # of a score of unfused attention: softmax, its mask, and the product
    selective: Selective = "core"
    unread: bool = True  # products: with the result of the last one, which no backward reads
    logits_bytes: float = 12.0  # for each token and word, at the most
    split_logits_bytes: float | None = None  # the same of a split vocabulary; None: as of a whole
    loss_bytes: float = 4.0  # of them, what waits for the backward
    backward_copies: float = 3.0  # of the MLP's width: gradients inside one layer
    weighed_bytes: float = 0.0  # of an element of a slot, where results of experts are weighed
    gather_buffers: float = 1.0  # whole tokens that tensor parallelism gathers into
    whole_layers: float = 2.0  # ZeRO-3: layers that are whole at once
    passing_layers: float = 2.0  # ZeRO-2 and 3: layers with whole gradients at once
    passing_bytes: int = 2  # of such a gradient
    root: bool = False
    in_turn: bool = False  # gradients are made unit by unit in the first backward of a step
    pool_bytes: float = 0.07 * GIB  # tables and workspaces in the allocator's pool
    context_bytes: float = 1.5 * GIB  # outside of it: CUDA, NCCL and libraries
    fragments: float = 0.05  # of activations: what the allocator cannot use
    caches: Cache | None = None
    band: float = 0.08  # how far predictions are off: the mean error of measured peaks


# What `train` does where nobody asks it to compile, as the program runs on tensors without values.
# The loss has its logits, their log-softmax and a gradient of each kind at once, in 4 bytes; one
# over a split vocabulary the logits in 2 and in 4 bytes, and what they are made into. A forward
# over tp ranks has three times all tokens: what was gathered, the product, and its parts by rank.
# Results of experts are weighed in float32: two gradients of 4 bytes, and one of them in 2.
EAGER = Keeps(
    split="balanced",
    selective="products",
    whole_at_head=True,
    split_logits_bytes=10.0,
    backward_copies=2.0,
    weighed_bytes=10.0,
    gather_buffers=3.0,
    in_turn=True,
)
# Compiled blocks and loss, measured on one H200 (torch 2.11, 2026-11-15). A compiled backward
# computes SiLU again from the gate: one copy of the MLP's width less than the four of eager blocks.
# Of what selective recomputation names, it keeps what backward reads: not the result of the MLP's
# last product, which is only added to the residual. The loss has 4 bytes for each token and word
# at once instead of 12; over a split vocabulary, which was not measured, it keeps shares in 4.
FIVEFOLD = replace(
    EAGER,
    unread=False,
    gated_copies=3.0,
    logits_bytes=4.0,
    split_logits_bytes=6.0,
    loss_bytes=2.0,
)
# Half precision with dropout, as in the papers of the time: 34 bytes a token and width.
MEGATRON_2021 = Keeps(gradient_bytes=2, statistics=0.0, mask_bytes=1.0)
MEGATRON = Keeps(gated_copies=3.0, logits_bytes=10.0)
# Llama 3's stages are published: the first and the last rank have a layer less. The rest is assumed
# to be as the others of its time that split sequences over tp.
META = replace(MEGATRON, split="spared")
NANOTRON = Keeps(
    split="walk",
    backward_bytes=2,
    bucket_bytes=2,
    packed=True,
    logits_bytes=10.0,
    backward_copies=0.0,
    gather_buffers=2.0,
    context_bytes=2.0 * GIB,
    fragments=0.23,
    caches=Cache(),
)
# Shards in 32 bits are the master weights themselves.
SHARDED = Keeps(weight_bytes=4, master_bytes=0, root=True, backward_copies=0.0)
TITAN = Keeps(
    weight_bytes=4,
    master_bytes=0,
    root=True,
    selective="alternate",
    logits_bytes=14.0,
    backward_copies=0.0,
    fragments=0.0,
)

KEEPS: dict[str, Keeps] = {
    "fivefold": FIVEFOLD,
    "fivefold-eager": EAGER,
    "megatron": MEGATRON,
    "meta": META,
    "nemo": MEGATRON,
    "megatron-2021": MEGATRON_2021,
    "megatron-deepspeed": MEGATRON_2021,
    "deepspeed-zero3-2021": MEGATRON_2021,
    "zero-bubble": MEGATRON_2021,
    "nanotron": NANOTRON,
    "llm-foundry": SHARDED,
    "torchtitan": TITAN,
}


@cache
def keeps_of(stack: str) -> Keeps:
    """What a stack keeps, by the longest known head of its name; the usual where none is known."""
    known = [name for name in KEEPS if stack == name or stack.startswith(f"{name}-")]
    return KEEPS[max(known, key=len)] if known else Keeps()
