"""A second planner: the closed forms of textbooks, from published configurations alone.

It shares no code with fivefold and no number: sizes of models and chips are typed from their
configs and datasheets. Sources: Rajbhandari et al. 2020 (ZeRO), Narayanan et al. 2021 (pipelines),
Korthikanti et al. 2022 (sequence parallelism), Liu et al. 2023 (ring attention), Jacobs et al. 2023
(Ulysses), Fedus et al. 2021 (experts), Young 1974 and Daly 2006 (checkpoints), and docs of fivefold
for what a convention is: bf16 weights and activations, float32 gradients, masters and moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

WEIGHT, GRADIENT, MASTER, MOMENTS = 2, 4, 4, 8  # bytes of a parameter


@dataclass(frozen=True)
class Model:
    """A decoder as its config.json gives it."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    gated: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    biases: bool = False  # GPT: in every linear and norm, and learned positions
    positions: int = 0
    experts: int = 0
    top_k: int = 0

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    def attention(self, tp: int = 1) -> int:
        """Parameters of the attention of a layer on a tensor rank."""
        matrices = 2 * self.width * self.queries + 2 * self.width * self.keys
        split = matrices + (self.queries + 2 * self.keys) * (self.biases or self.qkv_bias)
        whole = self.width * self.biases + 2 * self.head_dim * self.qk_norm
        return split // tp + whole

    def mlp(self, tp: int = 1) -> int:
        """Parameters of a dense MLP on a tensor rank."""
        split = (3 if self.gated else 2) * self.width * self.ffn + self.ffn * self.biases
        return split // tp + self.width * self.biases

    @property
    def norm(self) -> int:
        return self.width * (2 if self.biases else 1)

    @property
    def expert(self) -> int:
        return 3 * self.width * self.ffn

    def layer(self, tp: int = 1) -> int:
        """Parameters of a layer that are not in experts, on a tensor rank."""
        inner = self.width * self.experts if self.experts else self.mlp(tp)
        return self.attention(tp) + inner + 2 * self.norm

    def embedding(self, tp: int = 1) -> int:
        """A vocabulary that tp does not divide is padded; learned positions are not split."""
        return math.ceil(self.vocab / tp) * self.width + self.positions * self.width

    def head(self, tp: int = 1) -> int:
        return math.ceil(self.vocab / tp) * self.width

    @property
    def total(self) -> int:
        layers = self.layers * (self.layer() + self.experts * self.expert)
        return layers + self.embedding() + self.norm + (0 if self.tied else self.head())

    @property
    def active(self) -> int:
        """With only the experts that a token uses."""
        return self.total - self.layers * (self.experts - self.top_k) * self.expert

    def training_flops(self, seq: int) -> int:
        """Of a token: 6 for each active parameter, without the table of the input embedding, with
        the head; and 12 · queries · seq for the scores of a layer, of which a causal half is seen.
        """
        matrices = self.active - self.embedding() + (self.head() if self.tied else 0)
        return 6 * matrices + 6 * self.layers * self.queries * seq

    def kv_bytes(self, tp: int = 1) -> int:
        """Keys and values of a token in all layers, in bf16."""
        return self.layers * 2 * self.keys * 2 // min(tp, self.kv_heads)

    def saved_bytes(self) -> int:
        """What a dense layer with a gate saves of a token in bf16: the inputs of two norms, what
        they give to the linears, queries and the output of attention; keys and values; gate, up
        and their product; and a float32 log-sum-exp of each head."""
        return (
            2 * (4 * self.width + 2 * self.queries + 2 * self.keys + 3 * self.ffn) + 4 * self.heads
        )


MODELS = {
    "llama-3.1-8b": Model(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.1-70b": Model(80, 8192, 64, 8, 128, 28672, 128256),
    "llama-3.1-405b": Model(126, 16384, 128, 8, 128, 53248, 128256),
    "llama-3.2-1b": Model(16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "llama-2-13b": Model(40, 5120, 40, 40, 128, 13824, 32000),
    "qwen2.5-7b": Model(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
    "qwen3-8b": Model(36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True),
    "gpt3-175b": Model(
        *(96, 12288, 96, 96, 128, 49152, 50257),
        tied=True,
        gated=False,
        biases=True,
        positions=2048,
    ),
    "mixtral-8x7b": Model(32, 4096, 32, 8, 128, 14336, 32000, experts=8, top_k=2),
    "mixtral-8x22b": Model(56, 6144, 48, 8, 128, 16384, 32000, experts=8, top_k=2),
    "qwen3-30b-a3b": Model(48, 2048, 32, 4, 128, 768, 151936, qk_norm=True, experts=128, top_k=8),
}


@dataclass(frozen=True)
class Chip:
    """Of its datasheet: dense bf16 FLOP/s and bytes/s of its memory."""

    peak: float
    bandwidth: float
    gpu_mtbf_hours: float = math.inf


CHIPS = {
    "h100": Chip(989.4e12, 3.35e12, 50_700),
    "a100": Chip(312e12, 2.039e12),
    "b200": Chip(2250e12, 8.0e12),
}


@dataclass(frozen=True)
class Job:
    """A model in a layout; `stages` are layers of each stage, chunk after chunk of all ranks."""

    model: Model
    seq: int
    microbatches: int
    microbatch_size: int = 1
    replicas: int = 1
    shards: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    sp: bool = True
    context: str = "zigzag"
    stages: tuple[int, ...] = ()

    @property
    def dp(self) -> int:
        return self.replicas * self.shards

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def batch_tokens(self) -> int:
        return self.dp * self.microbatches * self.microbatch_size * self.seq

    @property
    def data_shards(self) -> int:
        """Ranks over which ZeRO shards what is not in experts: context ranks are data ranks."""
        return self.shards * self.cp

    @property
    def expert_copies(self) -> int:
        """Ranks with the same experts, over all of which ZeRO shards them."""
        return self.dp * self.cp * self.tp // self.ep

    def dense(self, rank: int) -> int:
        """Parameters of a pipeline rank, on a tensor rank, that are not in experts."""
        last = self.pp * len(self.rank_stages(0)) - 1
        count = 0
        for stage in self.rank_stages(rank):
            count += self.stages[stage] * self.model.layer(self.tp)
            count += self.model.embedding(self.tp) * (stage == 0)
            count += self.model.norm * (stage == last)
            apart = not self.model.tied or last > 0
            count += self.model.head(self.tp) * (stage == last and apart)
        return count

    def routed(self, rank: int) -> int:
        """Parameters of a pipeline rank in experts, on a rank of their group."""
        layers = sum(self.stages[stage] for stage in self.rank_stages(rank))
        return layers * self.model.experts * self.model.expert // self.ep

    def rank_stages(self, rank: int) -> range:
        return range(rank, len(self.stages), self.pp)

    @property
    def units(self) -> int:
        """Flat units of a rank, each padded to a multiple of its shards: one of each layer, one of
        its experts, and the two ends."""
        return 2 * max(self.layers_of(rank) for rank in range(self.pp)) + 3

    def layers_of(self, rank: int) -> int:
        return sum(self.stages[stage] for stage in self.rank_stages(rank))

    def state_bytes(self, rank: int, kind: str) -> tuple[Fraction, int]:
        """Bytes of weights, gradients, master or moments of a rank, and how many more padding may
        add: less than one element for each unit that is sharded."""
        size, stage = {
            "weights": (WEIGHT, 3),
            "gradients": (GRADIENT, 2),
            "master": (MASTER, 1),
            "optimizer": (MOMENTS, 1),
        }[kind]
        sharded = self.zero >= stage
        dense = Fraction(self.dense(rank), self.data_shards if sharded else 1)
        routed = Fraction(self.routed(rank), self.expert_copies if sharded else 1)
        return size * (dense + routed), size * self.units if sharded else 0

    def largest_units(self) -> int:
        """Parameters of the two largest flat units of a rank, or more: the head, with the last
        norm, and a layer."""
        return self.model.head(self.tp) + self.model.norm + self.model.layer(self.tp)

    # Bytes of the input buffers of a step on rank 0, by axis.

    @property
    def tokens(self) -> int:
        """Of a microbatch on a context rank."""
        return self.microbatch_size * self.seq // self.cp

    @property
    def activation(self) -> int:
        """Bytes of all tokens of a context rank."""
        return self.tokens * self.model.width * 2

    @property
    def passes(self) -> int:
        """Of a microbatch through a layer of rank 0."""
        return self.microbatches * self.layers_of(0)

    @property
    def is_only_stage(self) -> bool:
        return len(self.stages) == 1

    def gradient_sums(self) -> tuple[Fraction, int]:
        """Bytes of gradients that rank 0 brings to reduce-scatters, or without ZeRO to all-reduces,
        and the most that padding adds: once a step, and from stage 2 on after each microbatch."""
        times = self.microbatches if self.zero >= 2 and self.data_shards > 1 else 1
        padding = GRADIENT * self.units * self.data_shards if self.zero else 0
        return Fraction(GRADIENT * self.dense(0) * times), padding * times

    def replicated_gradients(self) -> tuple[Fraction, int]:
        """Bytes of its shard of gradients that rank 0 sums with other replicas, once a step."""
        return Fraction(GRADIENT * self.dense(0), self.data_shards), GRADIENT * self.units

    def expert_gradients(self) -> tuple[Fraction, int]:
        """As `gradient_sums`, over ranks with the same experts."""
        times = self.microbatches if self.zero >= 2 else 1
        padding = GRADIENT * self.units * self.expert_copies if self.zero else 0
        return Fraction(GRADIENT * self.routed(0) * times), padding * times

    def gathered_experts(self) -> tuple[Fraction, int]:
        """As `gathered_weights`: no end of the model has experts."""
        times = 2 * self.microbatches if self.zero == 3 and self.pp == 1 else 1
        count = WEIGHT * self.routed(0) * times
        return Fraction(count, self.expert_copies), WEIGHT * self.units * times

    def gathered_weights(self) -> tuple[Fraction, int]:
        """Bytes of its own shard that rank 0 brings to all-gathers. Stage 3 without a pipeline
        gathers for forward and for backward; the embedding's backward reads no weight, and the
        head's follows its forward at once."""
        count, times = self.dense(0), 1
        if self.zero == 3 and self.pp == 1:
            ends = self.model.embedding(self.tp) + self.model.norm
            ends += 0 if self.model.tied else self.model.head(self.tp)
            count, times = 2 * count - ends, self.microbatches
        padding = WEIGHT * 2 * self.units
        return Fraction(WEIGHT * count * times, self.data_shards), padding * times

    def sequence_gathers(self) -> int:
        """All-gathers of tp with sequence parallelism. Attention and a dense MLP have one each in
        forward, one in backward of the scatter, and one of the input again for weight gradients;
        the ends of the model have one each."""
        ends = 1 + self.is_only_stage
        return 3 * self.split_blocks * self.passes + ends * self.microbatches

    @property
    def split_blocks(self) -> int:
        """Of a layer, over tp: experts here are whole."""
        return 1 if self.model.experts else 2

    def sequence_scatters(self) -> int:
        """Reduce-scatters: one each way of attention and of a dense MLP, one for each end."""
        ends = 1 + self.is_only_stage
        return 2 * self.split_blocks * self.passes + ends * self.microbatches

    def ring_hops(self) -> dict[int, int]:
        """Bytes of a message to how many: keys and values n−1 times each way in bf16, and their
        gradients in float32 n times, until they are home."""
        block = 2 * self.tokens * self.model.keys // self.tp
        return {2 * block: 2 * (self.cp - 1) * self.passes, 4 * block: self.cp * self.passes}

    def context_gathers(self) -> tuple[dict[int, int], dict[int, int]]:
        """Keys and values are gathered in bf16, forward and backward, and their gradients of all
        context ranks are scattered in float32."""
        block = 2 * self.tokens * self.model.keys // self.tp
        return {2 * block: 2 * self.passes}, {4 * block * self.cp: self.passes}

    def ulysses_exchanges(self) -> dict[int, int]:
        """Queries and outputs, keys and values; each forward and backward. Each rank gets at least
        one head of keys, which several may share."""
        exchanges: dict[int, int] = {}
        heads = (self.model.heads // self.tp, max(self.model.kv_heads // self.tp, self.cp))
        for num_heads in heads:
            size = 2 * self.tokens * num_heads * self.model.head_dim
            exchanges[size] = exchanges.get(size, 0) + 4 * self.passes
        return exchanges

    def expert_exchanges(self) -> dict[int, int]:
        """The counts of slots; their routing weights, there and back; dispatch and combine, and
        their gradients."""
        tokens = self.tokens // (self.tp if self.sp else 1)
        slots = tokens * self.model.top_k
        return {
            8 * self.model.experts: self.passes,
            4 * slots: 2 * self.passes,
            2 * slots * self.model.width: 4 * self.passes,
        }

    def stage_messages(self) -> tuple[int, int]:
        """How many messages rank 0 sends, and the bytes of one: activations of all its chunks, and
        gradients of all but the first."""
        chunks, split = len(self.rank_stages(0)), self.tp if self.sp else 1
        return self.microbatches * (2 * chunks - 1), self.activation // split


def young_daly(cost: float, mtbf: float) -> float:
    """Seconds between checkpoints."""
    return math.sqrt(2 * cost * mtbf)
