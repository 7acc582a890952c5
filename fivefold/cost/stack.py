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
class StackMemory:
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
EAGER = StackMemory(
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
MEGATRON_2021_MEMORY = StackMemory(gradient_bytes=2, statistics=0.0, mask_bytes=1.0)
MEGATRON_MEMORY = StackMemory(gated_copies=3.0, logits_bytes=10.0)
# Llama 3's stages are published: the first and the last rank have a layer less. The rest is assumed
# to be as the others of its time that split sequences over tp.
META_MEMORY = replace(MEGATRON_MEMORY, split="spared")
NANOTRON_MEMORY = StackMemory(
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
SHARDED = StackMemory(weight_bytes=4, master_bytes=0, root=True, backward_copies=0.0)
TITAN_MEMORY = StackMemory(
    weight_bytes=4,
    master_bytes=0,
    root=True,
    selective="alternate",
    logits_bytes=14.0,
    backward_copies=0.0,
    fragments=0.0,
)

KEEPS: dict[str, StackMemory] = {
    "fivefold": FIVEFOLD,
    "fivefold-eager": EAGER,
    "megatron": MEGATRON_MEMORY,
    "meta": META_MEMORY,
    "nemo": MEGATRON_MEMORY,
    "megatron-2021": MEGATRON_2021_MEMORY,
    "megatron-deepspeed": MEGATRON_2021_MEMORY,
    "deepspeed-zero3-2021": MEGATRON_2021_MEMORY,
    "zero-bubble": MEGATRON_2021_MEMORY,
    "nanotron": NANOTRON_MEMORY,
    "llm-foundry": SHARDED,
    "torchtitan": TITAN_MEMORY,
}


@cache
def keeps_of(stack: str) -> StackMemory:
    """What a stack keeps, by the longest known head of its name; the usual where none is known."""
    known = [name for name in KEEPS if stack == name or stack.startswith(f"{name}-")]
    return KEEPS[max(known, key=len)] if known else StackMemory()


# The software that runs a job, as far as its speed and memory depend on it.
#
# Which kernels a stack has and what it overlaps was taken from what its papers and rows say.
# Numbers that none of them gives (passes, host seconds, shares that hide, and `factor` above all)
# were chosen so that the step times of published runs come out; the reasons beside them are then
# our best guess.


Attention = Literal["unfused", "flash2", "fused"]  # fused: cuDNN's and FlashAttention-3


@dataclass(frozen=True)
class SoftwareStack:
    """One way to run a job.

    `wide_passes` and `narrow_passes` are how often the elementwise kernels of a layer's forward
    read or write a token's activations: those of the model's width, which sequence parallelism
    splits, and those that tensor parallelism splits (heads and the MLP's width).
    """

    name: str
    attention: Attention = "fused"
    wide_passes: float = 6.0
    narrow_passes: float = 4.0
    slot_passes: float = 4.0  # as wide_passes, for each copy of a token that goes to an expert
    rotary_passes: float = 0.0  # further ones over queries and keys that are rotated in many steps
    summed_passes: float = 0.0  # over whole gradients, where several products read one input
    elementwise_backward: float = 2.0  # bytes of elementwise kernels in backward over forward
    wide_router: bool = False  # experts are scored in 32 bits
    copies_tokens: bool = False  # around tensor-parallel collectives, into the order of ranks
    loss_bytes: float = 14.0  # moved for each token and word of the vocabulary
    head_reach: float = 1.0  # of other products' speed: a vocabulary that is not padded is slow
    accumulated_bytes: float = 8.0  # moved for each weight when a microbatch adds its gradient
    launch: float = 0.0  # host seconds of a layer's forward: the floor of small layers
    expert_launch: float = 0.0  # the same of a layer with experts; 0: as any other
    travel_launch: float = 0.0  # what it takes more where its experts are on several ranks
    lag: float = (
        0.0  # share of it that each further tensor rank adds: the slowest host is waited for
    )
    crowd: float = 0.0  # seconds that each tensor rank adds to a layer where stages cross nodes
    expert_wait: float = 0.0  # seconds that a GPU idles in a layer with experts for the host, which
    # waits for the counts of tokens first; forward, and as long backward
    message: float = 0.0  # host seconds of one pipeline message
    gathers_again: bool = False  # inputs of split products are kept as shards, and this shows
    tp_hidden: float = 0.0  # share of tensor-parallel traffic that hides behind products
    gradients_hidden: bool = True  # their sum runs behind the backward of the last microbatch
    scatters_rounds: bool = False  # ZeRO-2 scatters a chunk's gradients once for the microbatches
    # that pass it in a row, p in a pipeline, not once for each
    gathers_hidden: float = 1.0  # share of compute behind which the weights of ZeRO-3 come
    gathers: int = 1  # collectives of a layer's weights under ZeRO-3
    flat: bool = False  # rings do not keep to the node: each rank has the bandwidth of its own card
    transfers_hidden: bool = True  # pipeline messages travel behind compute
    hop_forwards: int = 2  # interleaved 1F1B: forwards ahead for each hop to the last rank; 1 is as
    # fast where messages take no time, and 2 hides them
    scatters_messages: bool = False  # tp ranks without sp send a share each
    late_check: bool = False  # the optimizer steps before the norm is known, and back if it must
    by_cost: bool = False  # stages share layers and head by parameters, not layers alone
    recomputed: float = 1.0  # share of the layers that full recomputation covers
    stops_early: bool = False  # full recomputation ends with what backward reads: an MLP's last
    # product is not repeated
    repeated: float = 0.0  # share of the products that selective recomputation repeats
    experts_hidden: float = 0.0  # share of dispatch and combine that hides
    crosses_once: bool = (
        True  # a token crosses to a node once, however many of its experts are there
    )
    gradient_bytes: int = 4  # of a summed gradient element
    optimizer_bytes: float = 28.0  # moved for each element that the optimizer owns
    clip_bytes: float = 0.0  # moved for it beside: norm, scaling, and the weight from its master
    fixed: float = 0.0  # seconds of a step that nothing explains: data, logging, the host
    factor: float = 1.0


# Host seconds of a layer's forward, and about as many of its backward: layers of Llama-3.2-1B with
# 128 tokens on an H200's host, 2026-11-15, torch 2.11 (659 and 982 us eager; 914 and 1,083 us
# compiled, each block calling its own graph). A captured graph has none.
EAGER_LAUNCH, COMPILED_LAUNCH = 0.66e-3, 0.91e-3
# The same for layers with experts, whose host also routes: the mean of 2.05 ms forward and 2.24 ms
# backward, eager, on the same host. Compiled ones were not measured, and are taken to be no faster.
EXPERT_LAUNCH = 2.145e-3
# What it takes more where tokens go to other ranks: fitted to one job, Qwen3-30B-A3B over 16 ranks,
# 4.1 ms a layer forward and 5.1 backward, eager, on the same kind of host.
TRAVEL_LAUNCH = 1.95e-3
# What fivefold does: blocks compiled one by one, fused attention and loss.
OURS = SoftwareStack(
    "fivefold",
    wide_passes=5.0,
    narrow_passes=3.0,
    accumulated_bytes=12.0,
    clip_bytes=18.0,
    wide_router=True,
    gathers_again=True,
    launch=COMPILED_LAUNCH,
    expert_launch=EXPERT_LAUNCH,
    travel_launch=TRAVEL_LAUNCH,
)
# The same without a compiler: a kernel for each operator. Passes are counted from the operators of
# rehearsed layers. Two norms and two sums read or write the width 10 times; rotating takes 19 over
# queries and keys, most of them in 32 bits; a gated activation 5; taking, weighing and summing the
# slots of tokens 13. The bytes of the loss, which widens, normalises and narrows, are estimated.
OURS_EAGER = replace(
    OURS,
    name="fivefold-eager",
    wide_passes=10.0,
    narrow_passes=10 / 3,
    rotary_passes=19 - 10 / 3,
    slot_passes=13.0,
    summed_passes=9.0,
    elementwise_backward=1.5,
    copies_tokens=True,
    loss_bytes=50.0,
    stops_early=True,
    launch=EAGER_LAUNCH,
)
BY_KERNELS = {
    "eager": OURS_EAGER,
    "compiled": OURS,
    "graphs": replace(OURS, launch=0.0, expert_launch=0.0, travel_launch=0.0),
}
# Meta's of Llama 3. That a chunk's gradients are summed over the microbatches that pass it in a row
# is assumed: a sum for each would not fit the published times, and one a step not the memory.
META = replace(
    OURS,
    name="meta-2024",
    accumulated_bytes=8.0,
    scatters_rounds=True,
    clip_bytes=0.0,
    wide_router=False,
    gathers_again=False,
    launch=0.0,
    expert_launch=0.0,
    travel_launch=0.0,
)
# Its schedule is its own, and how far a rank runs ahead is not published. This is the least that
# keeps the pipeline full: the least memory, with messages that show.
META_LEAN = replace(META, hop_forwards=1, transfers_hidden=False)
# Megatron-LM of 2021 and 2022: separate attention kernels, fp16 gradients summed after the last
# backward, pipeline messages that nothing hides but each tensor rank sends a share of.
MEGATRON_2021 = SoftwareStack(
    "megatron-2021",
    attention="unfused",
    wide_passes=11.0,
    narrow_passes=4.0,
    loss_bytes=20.0,
    gradients_hidden=False,
    transfers_hidden=False,
    scatters_messages=True,
    accumulated_bytes=6.0,
    gradient_bytes=2,
    optimizer_bytes=20.0,
)
# DeepSpeed's pipeline sends whole activations from every tensor rank; bf16, so sums in 32 bits.
DEEPSPEED_PIPELINE = replace(
    MEGATRON_2021,
    name="megatron-deepspeed-530b",
    scatters_messages=False,
    accumulated_bytes=12.0,
    gradient_bytes=4,
)
# ZeRO-3 of 2021. Inferred from its six rows in SC21, whose time hardly falls with more GPUs: as if
# it gathered matrix by matrix, fetched little ahead, and each rank had its own card's bandwidth.
DEEPSPEED_2021 = replace(
    MEGATRON_2021, name="deepspeed-zero3-2021", gathers_hidden=0.35, gathers=4, flat=True
)
MEGATRON_DEEPSPEED = replace(MEGATRON_2021, name="megatron-deepspeed", factor=0.98)
# The same for small models on one node, where the host is the limit. All five numbers are fitted;
# why the head is so slow there is not known (a vocabulary that is not padded would do it).
MEGATRON_DEEPSPEED_SMALL = replace(
    MEGATRON_2021,
    name="megatron-deepspeed-small",
    launch=1.47e-3,
    lag=0.028,
    head_reach=0.31,
    fixed=7.7e-3,
    factor=0.774,
)
# Eager, with an unfused loss in 32 bits. Its sweep shows a floor that grows with the tensor ranks
# where a pipeline crosses nodes; the cause is not known.
NANOTRON = SoftwareStack(
    "nanotron",
    attention="flash2",
    wide_passes=8.0,
    narrow_passes=4.0,
    loss_bytes=36.0,
    accumulated_bytes=12.0,
    launch=1.86e-3,
    crowd=1.86e-3,
    by_cost=True,
    transfers_hidden=False,
    factor=1.21,
)
# Before its pipeline messages were repaired; what one cost then is fitted.
NANOTRON_OLD = replace(NANOTRON, name="nanotron-old", message=0.23)
# NVIDIA's stacks overlap tensor-parallel traffic; that half of it hides, and that gradients are
# summed in 16 bits, is assumed.
NEMO = SoftwareStack("nemo-25.02", tp_hidden=0.5, gradient_bytes=2)
# Routed without dropping: the host must know the counts of tokens before it can launch the experts.
# How long that takes, and what of the exchange hides, is fitted.
BRIDGE = SoftwareStack(
    "megatron-bridge",
    tp_hidden=0.5,
    gradient_bytes=2,
    expert_wait=2.6e-3,
    experts_hidden=0.5,
)
BRIDGE_GRAPHS = replace(BRIDGE, name="megatron-bridge-graphs", expert_wait=0.0)
MODELZOO = replace(BRIDGE, name="megatron-moe", factor=0.88)
# FSDP of Composer, eager, with gradients and states in 16 bits in most rows.
FOUNDRY = SoftwareStack(
    "llm-foundry",
    attention="flash2",
    wide_passes=16.0,
    narrow_passes=5.8,
    accumulated_bytes=4.0,
    gradient_bytes=2,
    optimizer_bytes=16.0,
    factor=1.03,
)
# Compiled blocks under FSDP2; its selective recomputation keeps every second product.
TITAN = SoftwareStack(
    "torchtitan", attention="flash2", wide_passes=8.0, accumulated_bytes=4.0, repeated=0.5
)
TITAN_EAGER = replace(TITAN, name="torchtitan-eager", wide_passes=16.0, narrow_passes=6.0)
ZERO_BUBBLE = replace(MEGATRON_2021, name="zero-bubble", late_check=True, factor=0.96)
INTERN = SoftwareStack("internevo", attention="flash2", wide_passes=14.0, factor=1.05)
