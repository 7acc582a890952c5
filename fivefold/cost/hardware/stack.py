"""Software stacks: what each one keeps in memory, and which kernels and overlap it has.

`StackMemory` says which bytes a stack chooses beside those that every stack needs; `SoftwareStack`
says how fast it runs. Other people's stacks are data (`stack_presets`). Our own is here, apart from
them: its numbers are counted from the program and measured on H200s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from fivefold.core.layout import Fp8
from fivefold.core.model import Balance

if TYPE_CHECKING:
    from fivefold.cost import Flags, LayoutGrid

GIB = 2**30

# --- Memory

# What selective recomputation keeps. core: all but the scores of attention. remade: all but the
# outputs of norms and activations. alternate: results of every second matmul, and of attention.
Selective = Literal["core", "remade", "alternate"]

# How layers are assigned to stages. even: equal counts. balanced: the slowest stage, with the head,
# is as fast as possible. greedy: stage by stage until each has its share, with the head.
# short-ends: equal counts, but one layer less on the first and on the last rank.
Split = Literal["even", "balanced", "greedy", "short-ends"]


# Kernels that wait on one connection to a GPU before a launch blocks the host: measured on an H200
# with CUDA_DEVICE_MAX_CONNECTIONS=1. Events do not count, and streams share it.
LAUNCH_QUEUE = 1022


@dataclass(frozen=True)
class AllocatorCache:
    """What the allocator caches beside live tensors.

    A tensor that a collective has read is free only after the GPU has passed it, and the host runs
    ahead of the GPU, by `LAUNCH_QUEUE` kernels at most. So blocks of a microbatch's tokens are
    *pending*: as many as the layers of so many kernels have read, never more than `most` of the
    live bytes.
    """

    forward_launches: float  # kernels of a layer's forward on one tensor rank
    backward_launches: float  # of its backward, with the sums of its gradients
    most: float | None = None


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
    narrow_inputs: bool = False  # matmuls in fewer than 16 bits save their inputs so
    narrow_activations: bool = False  # and what activations read
    input_bytes: float | None = None  # of such an input; set by the precision of an estimate
    value_views: bool = False  # MLA's values are views that keep the projection of keys and values
    remakes_heads: bool = False  # selective recomputation makes MLA's heads again from latents
    returned_slots: bool = True  # results of experts are saved for the gradient of their weights
    moment_bytes: int = 8  # of AdamW's two moments
    offloaded: float = 0.0  # share of saved activations that wait on the host
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
    chunks_loss: bool = False  # many logits are computed in chunks of tokens, with their gradients
    chunk_bytes: float = 0.0  # per logit of a chunk, beside the logits themselves
    backward_copies: float = 3.0  # of the MLP's width: gradients inside one layer
    result_bytes: float = 0.0  # of an element of a slot: gradients of results, beside all saved
    gather_buffers: float = 1.0  # full-token buffers of tensor parallelism
    whole_layers: float = 2.0  # ZeRO-3: layers gathered at once
    passing_layers: float = 2.0  # ZeRO-2 and 3: layers with unreduced gradients at once
    passing_bytes: int = 2  # of such a gradient
    ends_stay_gathered: bool = False
    unit_by_unit: bool = False  # the first backward of a step allocates gradients unit by unit
    pool_bytes: float = 0.07 * GIB  # tables and workspaces in the allocator's pool
    context_bytes: float = 1.5 * GIB  # outside of the pool: CUDA and libraries; of other
    # people's stacks NCCL's communicators too, since it was fitted to published runs
    fragments: float = 0.05  # share of activations that the allocator loses to fragmentation
    cache: AllocatorCache | None = None


# `train` without a compiler, as counted by running the program on meta tensors. The backward of the
# loss holds logits in 2 bytes, what it computes again of them, and their gradients, 14 in all; with
# a split vocabulary 19. Logits in chunks become their gradients: 2 bytes, and 8 that are wide. A
# forward over tp ranks holds all tokens three times: the gathered input, the matmul's result, and
# that result in rank order. Slots are weighed inside of experts, so that no result of theirs is
# saved; its gradient, of 2 bytes, is beside all that is.
EAGER_MEMORY = StackMemory(
    split="balanced",
    narrow_inputs=True,
    selective="remade",
    wide_router=False,
    gathered_head_input=True,
    gated_copies=3.0,
    statistics=0.0,
    logits_bytes=14.0,
    split_logits_bytes=19.0,
    loss_bytes=2.0,
    chunks_loss=True,
    chunk_bytes=8.0,
    backward_copies=2.0,
    returned_slots=False,
    result_bytes=2.0,
    gather_buffers=3.0,
    unit_by_unit=True,
)
# Compiled regions save what eager ones do: their inputs. Only what a kernel holds while it runs
# differs: the loss needs 4 bytes per token and vocabulary entry, logits and their gradient.
FIVEFOLD_MEMORY = replace(
    EAGER_MEMORY,
    logits_bytes=4.0,
    split_logits_bytes=4.0,
    chunk_bytes=0.0,
)

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
    runs_plans: bool = False  # fivefold's own: the keys of a plan change how it runs
    attention: Attention = "fused"
    grouped_share: float = 1.0  # of other matmuls' speed, for the grouped ones of experts
    wide_passes: float = 6.0
    narrow_passes: float = 4.0
    slot_passes: float = 4.0  # like wide_passes, for each copy of a token that goes to an expert
    reorder_passes: float = 0.0  # beside them, if experts are on several ranks
    rotary_passes: float = 0.0  # extra passes over queries and keys if rotary is not fused
    summed_passes: float = 0.0  # over full input gradients, if several matmuls read one input
    merge_bytes: float = 24.0  # per element of attention's output if a context rank merges two
    # results: fitted to ring-flash-attention on 8 H800; a fused kernel moves 10
    elementwise_backward: float = 2.0  # bytes of elementwise kernels in backward over forward
    wide_router: bool = False  # router scores are computed in 32 bits
    copies_heads: bool = False  # between the order of gathers over tp and that of rows
    loss_bytes: float = 14.0  # moved per token and vocabulary entry
    chunk_loss_bytes: float = 6.0  # the same if the loss is computed in chunks
    head_efficiency: float = 1.0  # of other matmuls' speed; an unpadded vocabulary is slow
    accumulated_bytes: float = 8.0  # moved per weight when a microbatch adds its gradient
    launch: float = 0.0  # host seconds of a layer's forward: the floor of small layers
    expert_launch: float = 0.0  # the same for a layer with experts; 0: like other layers
    dispatch_launch: float = 0.0  # added to it if experts are on several ranks
    straggler_share: float = 0.0  # of launch, added per further tp rank: the slowest host decides
    crowding: float = 0.0  # seconds per tp rank and layer if stages cross nodes
    node_wait: float = 0.0  # seconds of a tp collective for each further node that it spans
    expert_wait: float = 0.0  # seconds that the GPU idles in a layer with experts, in each pass,
    # because the host waits for the token counts first
    message_launch: float = 0.0  # host seconds of one pipeline message
    gathers_again: bool = False  # inputs of split matmuls are saved as shards, gathered in backward
    saves_gathered: bool = False  # they are saved gathered instead
    joins_blocks: bool = False  # parallel attention and MLP share one pair of tp collectives (PaLM)
    tp_hidden: float = 0.0  # share of tensor-parallel traffic that overlaps with matmuls
    tp_overlap: int = 0  # 1: it overlaps with matmuls of backward; more: in so many chunks
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
    compute_share: float = (
        1.0  # of the SMs, if communication kernels have the others for themselves
    )
    weight_gradient_share: float = 1.0  # of other matmuls' speed in fewer than 16 bits
    narrow_dispatch: bool = False  # tokens go to experts in the bits of matmuls; results are wide
    narrow_gathers: bool = False  # so do weights that ZeRO gathers
    narrow_tp: bool = False  # and inputs that sequence parallelism gathers
    shared_overlap: bool = False  # shared experts run beside the dispatch
    paired_layers: bool = False  # two microbatches overlap in every layer, whatever the schedule
    experts_hidden: float = 0.0  # share of dispatch and combine that overlaps with compute
    crosses_once: bool = True  # a token crosses to a node once, for all of its experts there
    node_by_node: bool = False  # in two all-to-alls: to the nodes, and inside of each
    frozen: bool = False  # the model's own weights do not learn, only adapters beside them
    lora_rank: int = 0  # of these adapters; 0: none
    gradient_bytes: int = 4  # of a reduced gradient element
    summed_bytes: int | None = None  # of an accumulated one; None: as its memory says
    unit_bytes: int | None = None  # of weights that are gathered and reduced together; None: layers
    owner_wait: float = 0.0  # seconds of an owner's broadcast, if ZeRO-1 publishes owner by owner
    bucket_bytes: float | None = None  # of weights whose gradients are reduced together, if
    # matrices are not larger; below ZeRO-3; None: all together
    prefetch: int = 1  # blocks that ZeRO-3 gathers ahead
    gather: str = ""  # step or microbatch: how long ZeRO-3 keeps weights gathered
    grads_home: str = ""  # cpu or nvme: where gradients go after every microbatch
    optimizer_bytes: float = 28.0  # moved per element that the optimizer owns
    orthogonalizes: bool = False  # Muon: one moment for matrices, which it makes orthogonal
    balance: tuple[Balance, ...] = ()  # how a plan balances the load of experts
    fp8: Fp8 | None = None  # how it rounds linears
    clip_bytes: float = 0.0  # moved beside: norm, scaling, and the weight from its master
    fixed: float = 0.0  # unexplained seconds of a step: data, logging, the host
    factor: float = 1.0
    memory: StackMemory = StackMemory()

    def stays(self, grid: LayoutGrid) -> Flags:
        """Where ZeRO-3 keeps weights gathered over a step: as a plan says, or in a pipeline, whose
        microbatches are far apart."""
        return (self.gather == "step") | ((grid.pp > 1) & (not self.gather))


# Host seconds of a layer's forward, and about as many of its backward, on an H200's host with torch
# 2.11. Eager: Llama-3.2-1B with 128 tokens, forward (backward 982 us), 2026-11-15. Compiled, region
# by region: 8 layers of Llama-3.1-8B took 11 ms forward and 16 backward, 2026-11-16. A captured
# graph has none.
EAGER_LAUNCH, COMPILED_LAUNCH = 0.66e-3, 1.69e-3
# The host seconds of one kernel of an own mixer, which is never compiled: those of that eager layer
# over its 38 operators.
KERNEL_LAUNCH = EAGER_LAUNCH / 38
# The same for layers with experts, whose host also routes. Eager: the mean of 2.05 ms forward and
# 2.24 ms backward, measured. Compiled: what DISPATCH_LAUNCH leaves of Qwen3-30B-A3B over 16 ranks,
# 5.7 ms a layer forward and 7.1 ms backward.
EXPERT_LAUNCH, COMPILED_EXPERT_LAUNCH = 2.145e-3, 4.1e-3
# Added if tokens go to other ranks: fitted to one job, Qwen3-30B-A3B over 16 ranks, 4.0 ms a layer
# forward and 4.9 ms backward, eager, on the same kind of host.
DISPATCH_LAUNCH = 2.3e-3
# Grouped matmuls of experts are slower than others: fitted to half of the jobs of
# docs/h200-jobs.md.
GROUPED_SHARE = 0.87
# The norm reads 4 bytes per weight; the update, which clips, moves 28 and writes 2 of a narrow
# weight. On an H200 they take as long as 39 bytes at the speed of other kernels.
CLIP_BYTES = 11.0
# fivefold: regions between matmuls and collectives compiled one by one, fused attention and loss.
# Passes are counted: two norms and two sums read or write the width 10 times; rotary takes 2 passes
# over queries and keys, a gated activation 3 over the MLP's width. Tokens are taken and
# summed in 3 passes, and sorted on the rank of their experts and back in 4. Input gradients of
# matmuls that read one input are summed inside of these. Backward takes 12 passes over the
# width, 2 over queries and keys, and 5 over the MLP's width: 1.4 times the forward. A gradient is
# written in 2 bytes, read, and added to 4 that are read and written; the first one of a step is
# only written, which is not counted. A chunk of
# logits is read twice and written once.
FIVEFOLD = SoftwareStack(
    "fivefold",
    memory=FIVEFOLD_MEMORY,
    runs_plans=True,
    grouped_share=GROUPED_SHARE,
    wide_passes=10.0,
    narrow_passes=2.0,
    slot_passes=3.0,
    reorder_passes=4.0,
    copies_heads=True,
    tp_overlap=1,
    elementwise_backward=1.4,
    merge_bytes=10.0,
    accumulated_bytes=12.0,
    clip_bytes=CLIP_BYTES,
    wide_router=True,
    gathers_again=True,
    stops_early=True,
    crosses_once=False,
    node_by_node=True,
    shared_overlap=True,
    launch=COMPILED_LAUNCH,
    expert_launch=COMPILED_EXPERT_LAUNCH,
    dispatch_launch=DISPATCH_LAUNCH,
)
# The same without a compiler: one kernel per operator. Passes are counted from the operators of
# rehearsed layers. Rotary takes 19 passes over queries and keys, most of them in 32 bits; a gated
# activation 5. Backward repeats the forward of a region: 42 passes for rotary, 14 for an
# activation, 16 over the width, 2.3 times the forward of 1B and of 8B. Taking, weighing and summing
# the slots of tokens takes 9.9 passes forward and 13.5 backward: 7.1 and 2.3 times that. The bytes
# of the loss (widen, normalise, narrow) are estimated.
FIVEFOLD_EAGER = replace(
    FIVEFOLD,
    name="fivefold-eager",
    memory=EAGER_MEMORY,
    narrow_passes=10 / 3,
    rotary_passes=19 - 10 / 3,
    slot_passes=7.1,
    elementwise_backward=2.3,
    loss_bytes=50.0,
    chunk_loss_bytes=38.0,
    launch=EAGER_LAUNCH,
    expert_launch=EXPERT_LAUNCH,
)
# Bytes per weight if gradients are summed in bf16: a microbatch reads and writes 2 of each. The
# norm reads 2, the update widens them first (6) and narrows the master after it (6): 8 more than of
# gradients in 4 bytes.
NARROW_GRADIENTS = {
    "gradient_bytes": 2,
    "summed_bytes": 2,
    "accumulated_bytes": 8.0,
    "clip_bytes": CLIP_BYTES + 8,
}
BY_KERNELS = {
    "eager": FIVEFOLD_EAGER,
    "compiled": FIVEFOLD,
    "graphs": replace(FIVEFOLD, launch=0.0, expert_launch=0.0, dispatch_launch=0.0),
}
