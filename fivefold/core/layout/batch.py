"""The batch identity that every verb prints: global batch = microbatch · accumulation · dp.

All three are counts of sequences or of microbatches; tokens are sequences times their length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fivefold.core import FivefoldError, counted
from fivefold.core.model import Shape, parameters

IDENTITY = "global batch = microbatch · accumulation · dp"
_USUAL_TOKENS = 4 << 20  # of a step, by default
_TOKENS_PER_GPU = 1 << 10
_ADAPTER_TOKENS = 1 << 16  # 128 sequences of 512 tokens, as Alpaca-LoRA
# Active parameters and tokens a step of published runs: arXiv 2005.14165 (table 2.1), 2302.13971,
# 2307.09288, 2412.19437, 2407.21783. Far is more than a few times either.
_RUNS = {
    "GPT-3 Small": (125e6, 500_000),
    "GPT-3 XL": (1.3e9, 1_000_000),
    "LLaMA 7B": (6.7e9, 4_000_000),
    "Llama 2 70B": (70e9, 4_000_000),
    "Llama 3.1 405B": (405e9, 16_777_216),
}
_EXPERT_RUNS = {"DeepSeek-V3": (37e9, 62_914_560)}
_FAR_BATCH, _FAR_SIZE = 8, 4


@dataclass(frozen=True)
class Batch:
    """What one optimizer step consumes.

    `microbatch_size` is the number of sequences that one data rank runs at once, `microbatches` how
    many of these it accumulates before the optimizer step. In the last round the last `idle` data
    ranks have none: they run one without loss, so that all ranks join the same collectives.
    """

    dp: int
    seq: int
    microbatch_size: int
    microbatches: int
    idle: int = 0

    def __post_init__(self) -> None:
        _require_counts(
            dp=self.dp,
            seq=self.seq,
            microbatch_size=self.microbatch_size,
            microbatches=self.microbatches,
        )
        assert 0 <= self.idle < self.dp, "no round is empty"

    @classmethod
    def over(cls, dp: int, batch: Batch) -> Batch:
        """The same sequences over so many data ranks: the first ones take the odd microbatches.

        >>> Batch.over(3, Batch(dp=4, seq=8, microbatch_size=2, microbatches=1))
        Batch(dp=3, seq=8, microbatch_size=2, microbatches=2, idle=2)
        """
        number = batch.dp * batch.microbatches - batch.idle
        rounds = -(-number // dp)
        return cls(dp, batch.seq, batch.microbatch_size, rounds, rounds * dp - number)

    @classmethod
    def resolve(
        cls,
        dp: int,
        seq: int,
        *,
        batch: int | None = None,
        microbatch_size: int | None = None,
        microbatches: int | None = None,
    ) -> Batch:
        """Complete the identity from the given values; refuse a remainder or a contradiction.

        The defaults, one sequence per microbatch and one microbatch per step, apply only if the
        other values leave them open.
        """
        counts = {"batch": batch, "microbatch_size": microbatch_size, "microbatches": microbatches}
        _require_counts(dp=dp, seq=seq, **{k: v for k, v in counts.items() if v is not None})
        problem = contradiction(
            batch, dp=dp, microbatch_size=microbatch_size, microbatches=microbatches
        )
        if problem:
            raise FivefoldError(problem)
        if batch is None:
            return cls(dp, seq, microbatch_size or 1, microbatches or 1)
        if microbatches is None:
            microbatch_size = microbatch_size or 1
            microbatches = batch // (microbatch_size * dp)
        return cls(dp, seq, batch // (microbatches * dp), microbatches)

    @property
    def sequences(self) -> int:
        """Sequences of one step, over all data ranks."""
        return self.microbatch_size * (self.microbatches * self.dp - self.idle)

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all data ranks."""
        return self.sequences * self.seq

    def rows_of(self, dp_coord: int) -> list[int]:
        """The rows of a step that one data rank has, by their place in the step, in rising order.

        A step's rows are those of its microbatches in turn, each with those of all data ranks.

        >>> Batch(dp=2, seq=8, microbatch_size=2, microbatches=2).rows_of(1)
        [2, 3, 6, 7]
        """
        size = self.microbatch_size
        firsts = [(number * self.dp + dp_coord) * size for number in range(self.microbatches)]
        rows = [first + row for first in firsts for row in range(size)]
        return [row for row in rows if row < self.sequences]

    def __str__(self) -> str:
        return (
            f"global batch {counted(self.sequences, 'sequence')} = {self.microbatch_size} · "
            f"{self.microbatches} · {self.dp} (microbatch · accumulation · dp) "
            f"{self._without_idle}= {counted(self.tokens, 'token')}"
        )

    @property
    def _without_idle(self) -> str:
        return f"- {self.idle * self.microbatch_size} " if self.idle else ""


def contradiction(
    batch: int | None, *, dp: int, microbatch_size: int | None, microbatches: int | None
) -> str | None:
    """Why these values contradict the identity; None if they do not."""
    if batch is None:
        return None
    if microbatches is None:
        return remainder(batch, microbatch=microbatch_size or 1, dp=dp)
    if microbatch_size is None:
        return remainder(batch, accumulation=microbatches, dp=dp)
    product = microbatch_size * microbatches * dp
    if batch == product:
        return None
    return (
        f"global batch {batch:,} is not {microbatch_size} · {microbatches} · {dp} = {product:,} "
        f"({IDENTITY}): leave one of the three out, or give batch={product}"
    )


def remainder(batch: int, **factors: int) -> str | None:
    """Why `batch` is no multiple of these factors, and the nearest multiples.

    >>> remainder(30, microbatch=1, dp=4)
    'global batch 30 is not a multiple of microbatch 1 · dp 4 = 4: use 28 or 32'
    """
    unit = 1
    for factor in factors.values():
        unit *= factor
    if batch % unit == 0:
        return None
    below = batch - batch % unit
    ways = [f"{legal:,}" for legal in (below, below + unit) if legal > 0]
    product = " · ".join(f"{name} {factor}" for name, factor in factors.items())
    return (
        f"global batch {batch:,} is not a multiple of {product} = {unit:,}: use {' or '.join(ways)}"
    )


def _require_counts(**counts: int) -> None:
    wrong = [f"{name}={count}" for name, count in counts.items() if count < 1]
    if wrong:
        raise FivefoldError(f"{', '.join(wrong)}: give whole numbers of at least 1 ({IDENTITY})")


# --- The batch of a search that was given none


def default_batch(gpus: int, seq: int, shape: Shape, *, adapters: bool = False) -> int:
    """Sequences per step: a multiple of the GPUs, or a divisor where that is enough.

    4 Mi tokens, or what suits a smaller model; 1 Ki per GPU if that is more; and a sequence for
    each GPU, unless these are more than 4 Mi tokens. Adapters take 64 Ki tokens.
    """
    tokens = min(_ADAPTER_TOKENS if adapters else _USUAL_TOKENS, _suitable_tokens(shape))
    tokens = tokens if adapters else max(tokens, _TOKENS_PER_GPU * gpus)
    sequences = max(1, tokens // seq, min(gpus, _USUAL_TOKENS // seq))
    if sequences >= gpus:
        return -(-sequences // gpus) * gpus
    return next(number for number in range(sequences, gpus + 1) if gpus % number == 0)


def batch_remark(tokens: int, shape: Shape, *, adapters: bool = False) -> str | None:
    """How far a step is from those of a published run of about this size; None if it is near."""
    size = float(parameters(shape).active)
    runs = _RUNS if shape.moe is None else {**_RUNS, **_EXPERT_RUNS}
    run, (active, usual) = min(runs.items(), key=lambda pair: abs(math.log(pair[1][0] / size)))
    if adapters:
        run, active, usual = "adapters in Alpaca-LoRA", size, _ADAPTER_TOKENS
    ratio = max(tokens / usual, usual / tokens)
    if ratio <= _FAR_BATCH or not 1 / _FAR_SIZE < active / size < _FAR_SIZE:
        return None
    comparison, verb = ("more", "lower") if tokens > usual else ("fewer", "raise")
    return (
        f"a step has {tokens:,} tokens, {ratio:.0f} times {comparison} than that of {run} "
        f"({usual:,}): {verb} --batch, or choose the learning rate for it"
    )


def _suitable_tokens(shape: Shape) -> int:
    """The best batch by the law of DeepSeek LLM (arXiv 2401.02954, section 3): 0.292 · C^0.3271
    tokens for C training FLOPs, here of 20 tokens a parameter; as a power of two."""
    flops = 6 * 20 * float(parameters(shape).active) ** 2
    return 2 ** round(math.log2(0.292 * flops**0.3271))
