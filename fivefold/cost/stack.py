"""Software stacks as data: what each one keeps in memory, and which kernels and overlap it has.

`StackMemory` says which bytes a stack chooses beside those that every stack needs. It was read from
sources and papers, except the numbers of `AllocatorCache`, which were fitted to measured peaks and
out-of-memory failures.

`SoftwareStack` says how fast a stack runs. Kernels and overlap come from its papers and rows. Other
numbers (passes, host seconds, overlapped shares, and `factor` above all) were chosen so that the
step times of published runs come out; the reasons beside them are our best guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from fivefold.cost.grid import Flags, LayoutGrid

GIB = 2**30

# --- Memory

# What selective recomputation keeps. core: all but the scores of attention. remade: all but the
# outputs of norms and activations. alternate: results of every second matmul, and of attention.
Selective = Literal["core", "remade", "alternate"]

# How layers are assigned to stages. even: equal counts. balanced: the slowest stage, with the head,
# is as fast as possible. greedy: stage by stage until each has its share, with the head.
# short-ends: equal counts, but one layer less on the first and on the last rank.
Split = Literal["even", "balanced", "greedy", "short-ends"]


@dataclass(frozen=True)
class AllocatorCache:
    """What nanotron's allocator caches beside live tensors; fitted on half of the runs of a sweep.

    A tensor that a collective has read is free only after the GPU has passed it, and the host runs
    ahead of the GPU. So blocks of a microbatch's tokens are *pending*: at most `pending` of them,
    never more than `most` of the live bytes, and all of them only after some microbatches. In a
    pipeline of two ranks, the host runs ahead only if the work of a layer is well above `work`.
    """

    pending: float = 43.0
    most: float = 0.573
    microbatches: float = 2.37  # half of the pending blocks are there after so many
    work: float = 1.26e12  # FLOPs
    end_gradients: float = 2.25  # 16-bit copies of the gradient of embedding or head
    gathered: float = 0.75  # share of ZeRO-1's flat weights that finds no freed block


@dataclass(frozen=True)
class StackMemory:
    """Bytes and copies that a stack chooses.

    `gathered_inputs`: inputs of tensor-parallel matmuls are kept gathered over tp, not as this
    rank's shard. `gathered_head_input`: so is the input of the head, whatever the others are.
    `ends_stay_gathered`: under ZeRO-3, embedding and head stay gathered from their first use on,
    with their gradients.
    """

    split: Split = "even"
    weight_bytes: int | None = None  # of a weight between uses; None: as in the matmuls
    master_bytes: int = 4
    gradient_bytes: int = 4  # of an accumulated gradient, whatever type is reduced
    backward_bytes: int = 0  # of gradients beside the accumulated ones until a backward ends
    bucket_bytes: int = 0  # beside them if data ranks all-reduce full gradients
    gathered_inputs: bool = False
    gathered_head_input: bool = False
    packed: bool = False  # equal heads: packed queries, keys and values stay, with copies of two
    gated_copies: float = 4.0  # of the MLP's width: gate, up, activation, and their product
    statistics: float = 4.0  # bytes per token that a norm saves
    mask_bytes: float = 0.0  # of an element of dropout, after attention and MLP
    score_bytes: float = 5.0  # of a score of unfused attention: softmax, its mask, dropped scores
    selective: Selective = "core"
    wide_router: bool = True  # routers save their input in float32
    logits_bytes: float = 12.0  # per token and vocabulary entry, at the peak
    split_logits_bytes: float | None = None  # the same for a split vocabulary; None: no difference
    loss_bytes: float = 4.0  # of them, what is saved for the backward
    backward_copies: float = 3.0  # of the MLP's width: gradients inside one layer
    weighed_bytes: float = 0.0  # of an element of a slot when expert results are weighed
    gather_buffers: float = 1.0  # full-token buffers of tensor parallelism
    whole_layers: float = 2.0  # ZeRO-3: layers gathered at once
    passing_layers: float = 2.0  # ZeRO-2 and 3: layers with unreduced gradients at once
    passing_bytes: int = 2  # of such a gradient
    ends_stay_gathered: bool = False
    unit_by_unit: bool = False  # the first backward of a step allocates gradients unit by unit
    pool_bytes: float = 0.07 * GIB  # tables and workspaces in the allocator's pool
    context_bytes: float = 1.5 * GIB  # outside of the pool: CUDA, NCCL and libraries
    fragments: float = 0.05  # share of activations that the allocator loses to fragmentation
    cache: AllocatorCache | None = None


# `train` without a compiler, as counted by running the program on meta tensors. The loss holds
# logits, log-softmax and a gradient of each at once, in 4 bytes; with a split vocabulary, logits in
# 2 and in 4 bytes and what they become. A forward over tp ranks holds all tokens three times: the
# gathered input, the matmul's result, and that result in rank order. Expert results are weighed in
# float32: two gradients of 4 bytes, and one of 2.
EAGER_MEMORY = StackMemory(
    split="balanced",
    selective="remade",
    wide_router=False,
    gathered_head_input=True,
    gated_copies=3.0,
    statistics=0.0,
    split_logits_bytes=10.0,
    backward_copies=2.0,
    weighed_bytes=10.0,
    gather_buffers=3.0,
    unit_by_unit=True,
)
# Compiled regions save what eager ones do: their inputs. Only what a kernel holds while it runs
# differs: the loss needs 4 bytes per token and vocabulary entry, logits and their gradient.
FIVEFOLD_MEMORY = replace(
    EAGER_MEMORY,
    logits_bytes=4.0,
    split_logits_bytes=4.0,
    loss_bytes=2.0,
)
# Half precision with dropout: 34 bytes per token and width.
MEGATRON_2021_MEMORY = StackMemory(gradient_bytes=2, statistics=0.0, mask_bytes=1.0)
MEGATRON_MEMORY = StackMemory(gated_copies=3.0, logits_bytes=10.0)
# The stages of Llama 3 are published: the first and the last rank have one layer less. The rest is
# assumed to be like other stacks of its time with sequence parallelism.
META_MEMORY = replace(MEGATRON_MEMORY, split="short-ends")
NANOTRON_MEMORY = StackMemory(
    split="greedy",
    backward_bytes=2,
    bucket_bytes=2,
    packed=True,
    logits_bytes=10.0,
    backward_copies=0.0,
    gather_buffers=2.0,
    context_bytes=2.0 * GIB,
    fragments=0.23,
    cache=AllocatorCache(),
)
# The 32-bit shards are the master weights.
FSDP_MEMORY = StackMemory(
    weight_bytes=4, master_bytes=0, ends_stay_gathered=True, backward_copies=0.0
)
TITAN_MEMORY = replace(FSDP_MEMORY, selective="alternate", logits_bytes=14.0, fragments=0.0)

STACK_MEMORY: dict[str, StackMemory] = {
    "fivefold": FIVEFOLD_MEMORY,
    "fivefold-eager": EAGER_MEMORY,
    "megatron": MEGATRON_MEMORY,
    "meta": META_MEMORY,
    "nemo": MEGATRON_MEMORY,
    "megatron-2021": MEGATRON_2021_MEMORY,
    "megatron-deepspeed": MEGATRON_2021_MEMORY,
    "deepspeed-zero3-2021": MEGATRON_2021_MEMORY,
    "zero-bubble": MEGATRON_2021_MEMORY,
    "nanotron": NANOTRON_MEMORY,
    "llm-foundry": FSDP_MEMORY,
    "torchtitan": TITAN_MEMORY,
}


@cache
def memory_of_stack(name: str) -> StackMemory:
    """Look up a stack by the longest known prefix of its name; defaults if none is known."""
    known = [each for each in STACK_MEMORY if name == each or name.startswith(f"{each}-")]
    return STACK_MEMORY[max(known, key=len)] if known else StackMemory()


# --- Speed

Attention = Literal["unfused", "flash2", "fused"]  # fused: cuDNN and FlashAttention-3


@dataclass(frozen=True)
class SoftwareStack:
    """How one stack runs a job.

    `wide_passes` and `narrow_passes` count how often the elementwise kernels of a layer's forward
    read or write the activations of a token: wide ones have the model's width, which sequence
    parallelism shards; narrow ones are sharded by tensor parallelism (heads and the MLP's width).
    """

    name: str
    attention: Attention = "fused"
    wide_passes: float = 6.0
    narrow_passes: float = 4.0
    slot_passes: float = 4.0  # like wide_passes, for each copy of a token that goes to an expert
    rotary_passes: float = 0.0  # extra passes over queries and keys if rotary is not fused
    summed_passes: float = 0.0  # over full input gradients, if several matmuls read one input
    elementwise_backward: float = 2.0  # bytes of elementwise kernels in backward over forward
    wide_router: bool = False  # router scores are computed in 32 bits
    copies_tokens: bool = False  # around tensor-parallel collectives, into rank order
    loss_bytes: float = 14.0  # moved per token and vocabulary entry
    head_efficiency: float = 1.0  # of other matmuls' speed; an unpadded vocabulary is slow
    accumulated_bytes: float = 8.0  # moved per weight when a microbatch adds its gradient
    launch: float = 0.0  # host seconds of a layer's forward: the floor of small layers
    expert_launch: float = 0.0  # the same for a layer with experts; 0: like other layers
    dispatch_launch: float = 0.0  # added to it if experts are on several ranks
    straggler_share: float = 0.0  # of launch, added per further tp rank: the slowest host decides
    crowding: float = 0.0  # seconds per tp rank and layer if stages cross nodes
    expert_wait: float = 0.0  # seconds that the GPU idles in a layer with experts, in each pass,
    # because the host waits for the token counts first
    message_launch: float = 0.0  # host seconds of one pipeline message
    gathers_again: bool = False  # inputs of split matmuls are saved as shards, gathered in backward
    saves_gathered: bool = False  # they are saved gathered instead
    tp_hidden: float = 0.0  # share of tensor-parallel traffic that overlaps with matmuls
    gradients_hidden: bool = True  # gradient reduction overlaps with the last backward
    scatters_rounds: bool = False  # ZeRO-2 reduces once per round of p microbatches, not for each
    gathers_hidden: float = 1.0  # share of compute that can hide ZeRO-3's all-gathers
    gathers: int = 1  # all-gathers per layer under ZeRO-3
    flat_rings: bool = False  # rings ignore nodes: each rank has the bandwidth of its own card
    transfers_hidden: bool = True  # pipeline messages overlap with compute
    hop_forwards: int = (
        2  # interleaved: warm-up forwards per hop to the last rank; 2 hides messages
    )
    scatters_messages: bool = False  # tp ranks without sp send a share each
    late_norm_check: bool = False  # the optimizer steps before the norm is known, and may step back
    split_by_parameters: bool = False  # stages share layers and head by parameters
    recomputed: float = 1.0  # share of layers that full recomputation covers
    stops_early: bool = False  # full recomputation skips an MLP's last matmul: no backward reads it
    selective_repeats: float = 0.0  # share of matmuls that selective recomputation repeats
    experts_hidden: float = 0.0  # share of dispatch and combine that overlaps with compute
    crosses_once: bool = True  # a token crosses to a node once, for all of its experts there
    node_by_node: bool = False  # in two all-to-alls: to the nodes, and inside of each
    gradient_bytes: int = 4  # of a reduced gradient element
    summed_bytes: int | None = None  # of an accumulated one; None: as its memory says
    unit_bytes: int | None = None  # of weights that are gathered and reduced together; None: layers
    prefetch: int = 1  # units that ZeRO-3 gathers ahead
    gather: str = ""  # step or microbatch: how long ZeRO-3 keeps weights gathered
    grads_home: str = ""  # cpu or nvme: where gradients go after every microbatch
    optimizer_bytes: float = 28.0  # moved per element that the optimizer owns
    clip_bytes: float = 0.0  # moved beside: norm, scaling, and the weight from its master
    fixed: float = 0.0  # unexplained seconds of a step: data, logging, the host
    factor: float = 1.0

    def stays_gathered(self, grid: LayoutGrid) -> Flags:
        """Where ZeRO-3 keeps weights gathered over a step: as a plan says, or in a pipeline of
        fivefold, whose microbatches are far apart."""
        ours = memory_of_stack(self.name).split == "balanced"
        return (self.gather == "step") | ((grid.pp > 1) & (ours and not self.gather))


# Host seconds of a layer's forward, and about as many of its backward: layers of Llama-3.2-1B with
# 128 tokens on an H200's host, 2026-11-15, torch 2.11 (659 and 982 us eager; 914 and 1,083 us
# compiled, each block calling its own graph). A captured graph has none.
EAGER_LAUNCH, COMPILED_LAUNCH = 0.66e-3, 0.91e-3
# The same for layers with experts, whose host also routes: the mean of 2.05 ms forward and 2.24 ms
# backward, eager, on the same host. Compiled ones were not measured and are assumed to be as slow.
EXPERT_LAUNCH = 2.145e-3
# Added if tokens go to other ranks: fitted to one job, Qwen3-30B-A3B over 16 ranks, 4.1 ms a layer
# forward and 5.1 ms backward, eager, on the same kind of host.
DISPATCH_LAUNCH = 1.95e-3
# fivefold: blocks compiled one by one, fused attention and loss.
FIVEFOLD = SoftwareStack(
    "fivefold",
    wide_passes=5.0,
    narrow_passes=3.0,
    accumulated_bytes=12.0,
    clip_bytes=18.0,
    wide_router=True,
    gathers_again=True,
    stops_early=True,
    crosses_once=False,
    node_by_node=True,
    launch=COMPILED_LAUNCH,
    expert_launch=EXPERT_LAUNCH,
    dispatch_launch=DISPATCH_LAUNCH,
)
# The same without a compiler: one kernel per operator. Passes are counted from the operators of
# rehearsed layers. Two norms and two sums read or write the width 10 times; rotary takes 19 passes
# over queries and keys, most of them in 32 bits; a gated activation 5; taking, weighing and summing
# the slots of tokens 13. The bytes of the loss (widen, normalise, narrow) are estimated.
FIVEFOLD_EAGER = replace(
    FIVEFOLD,
    name="fivefold-eager",
    wide_passes=10.0,
    narrow_passes=10 / 3,
    rotary_passes=19 - 10 / 3,
    slot_passes=13.0,
    summed_passes=9.0,
    elementwise_backward=1.5,
    copies_tokens=True,
    loss_bytes=50.0,
    launch=EAGER_LAUNCH,
)
# Bytes per weight if gradients are summed in bf16: a microbatch reads and writes 2 of each. The
# norm reads 2, the update widens (6) and scales (8) them, and narrows the master (6).
NARROW_GRADIENTS = {
    "gradient_bytes": 2,
    "summed_bytes": 2,
    "accumulated_bytes": 8.0,
    "clip_bytes": 22.0,
}
BY_KERNELS = {
    "eager": FIVEFOLD_EAGER,
    "compiled": FIVEFOLD,
    "graphs": replace(FIVEFOLD, launch=0.0, expert_launch=0.0, dispatch_launch=0.0),
}
# Meta's stack of Llama 3. We assume that it reduces a chunk's gradients once per round of p
# microbatches: once per microbatch would not fit the published times, once per step not the memory.
META = replace(
    FIVEFOLD,
    name="meta-2024",
    accumulated_bytes=8.0,
    scatters_rounds=True,
    clip_bytes=0.0,
    wide_router=False,
    gathers_again=False,
    stops_early=False,
    crosses_once=True,
    node_by_node=False,
    launch=0.0,
    expert_launch=0.0,
    dispatch_launch=0.0,
)
# How far its ranks run ahead is not published. This is the least that keeps the pipeline full.
META_LEAN = replace(META, hop_forwards=1, transfers_hidden=False)
# Megatron-LM of 2021 and 2022: unfused attention, fp16 gradients reduced after the last backward,
# pipeline messages that are not hidden, of which each tensor rank sends a share.
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
# DeepSpeed's pipeline sends full activations from every tensor rank; bf16, so 32-bit gradients.
_WIDE = {"scatters_messages": False, "accumulated_bytes": 12.0, "gradient_bytes": 4}
DEEPSPEED_PIPELINE = replace(MEGATRON_2021, name="megatron-deepspeed-530b", **_WIDE)
# ZeRO-3 of 2021, inferred from its six rows in SC21, whose time hardly falls with more GPUs: as if
# it gathered matrix by matrix with little prefetch, and each rank had its own card's bandwidth.
DEEPSPEED_2021 = replace(
    MEGATRON_2021, name="deepspeed-zero3-2021", gathers_hidden=0.35, gathers=4, flat_rings=True
)
MEGATRON_DEEPSPEED = replace(MEGATRON_2021, name="megatron-deepspeed", factor=0.98)
# The same for small models on one node, where the host is the limit. All five numbers are fitted;
# why the head is so slow is not known (an unpadded vocabulary would explain it).
MEGATRON_DEEPSPEED_SMALL = replace(
    MEGATRON_2021,
    name="megatron-deepspeed-small",
    launch=1.47e-3,
    straggler_share=0.028,
    head_efficiency=0.31,
    fixed=7.7e-3,
    factor=0.774,
)
# Eager, with an unfused 32-bit loss. Its sweep shows a floor that grows with the tensor ranks if a
# pipeline crosses nodes; the cause is not known.
NANOTRON = SoftwareStack(
    "nanotron",
    attention="flash2",
    wide_passes=8.0,
    narrow_passes=4.0,
    loss_bytes=36.0,
    accumulated_bytes=12.0,
    launch=1.86e-3,
    crowding=1.86e-3,
    split_by_parameters=True,
    transfers_hidden=False,
    factor=1.21,
)
# Before its pipeline messages were repaired; their cost is fitted.
NANOTRON_OLD = replace(NANOTRON, name="nanotron-old", message_launch=0.23)
# NVIDIA's stacks overlap tensor-parallel traffic. Half of it is assumed to be hidden, and gradients
# to be reduced in 16 bits.
NEMO = SoftwareStack("nemo-25.02", tp_hidden=0.5, gradient_bytes=2)
# Routing without dropping: the host must know the token counts before it launches the experts. How
# long that takes, and which share of the all-to-alls is hidden, is fitted.
BRIDGE = SoftwareStack(
    "megatron-bridge",
    tp_hidden=0.5,
    gradient_bytes=2,
    expert_wait=2.6e-3,
    experts_hidden=0.5,
)
BRIDGE_GRAPHS = replace(BRIDGE, name="megatron-bridge-graphs", expert_wait=0.0)
MODELZOO = replace(BRIDGE, name="megatron-moe", factor=0.88)
# Composer's FSDP, eager, with gradients and states in 16 bits in most rows.
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
# Compiled blocks under FSDP2; its selective recomputation keeps every second matmul.
TITAN = SoftwareStack(
    "torchtitan", attention="flash2", wide_passes=8.0, accumulated_bytes=4.0, selective_repeats=0.5
)
TITAN_EAGER = replace(TITAN, name="torchtitan-eager", wide_passes=16.0, narrow_passes=6.0)
ZERO_BUBBLE = replace(MEGATRON_2021, name="zero-bubble", late_norm_check=True, factor=0.96)
INTERN = SoftwareStack("internevo", attention="flash2", wide_passes=14.0, factor=1.05)
