"""Generation in layouts of up to 8 ranks over several families of models.

    python -m tests.ranks.generations

runs all of them and prints a table in markdown; the tests run a few.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

from fivefold.commands.verify import runnable
from fivefold.core.plan.plan import PlanOptions
from fivefold.launch.processes import Pool
from fivefold.verify.generated import GeneratedVerdict
from fivefold.verify.generated_ranks import GeneratedSettings, run_generated

HEAD = """# Verified generation

Layouts that generate, in float64, with models scaled down to a few layers. Requests run alone, in
chunks, batched with strangers, preempted, and over shared blocks. Logits: the largest error against
one plain forward of the whole text on one device. Log-probabilities: against the same forward, and
against the training forward in another layout. Tokens: drawn by seed, request and index, the same
every way. Made by `make verify-all` on {date}.
"""
COLUMNS = (
    *("model", "layout", "logits", "log-probabilities", "trained in", "trained", "tokens"),
    *("seconds", ""),
)
MOST_RANKS = 8
MOST_ERROR = 1e-10
PATIENCE = 120.0  # seconds: eight ranks on two cores


@dataclass(frozen=True)
class GenerationCase:
    """One layout to prove."""

    model: str
    layout: str
    sp: bool = True
    like: str = ""  # whose attention it has

    def __str__(self) -> str:
        return f"{self.named} {self.layout}" + ("" if self.sp else " no-sp")

    @property
    def named(self) -> str:
        return f"{self.model} like {self.like}" if self.like else self.model

    @property
    def options(self) -> PlanOptions:
        layers = {"layers": "4" if "pp=4" in self.layout else "2"}  # large models are scaled down
        changes = layers if self.model.startswith("tiny") else {}
        changes = changes | ATTENTION.get(self.like, {})
        return PlanOptions(self.model, layout=self.layout, sp=self.sp, set=changes)


# What layers of these families do with scores, and with texts that grow.
_LOCAL = {"window": "9", "global_every": "2", "max_seq": "160"}
ATTENTION = {
    "gemma-2": _LOCAL | {"global_rotary": "true", "score_cap": "0.3", "logit_cap": "0.2"},
    "gpt-oss": _LOCAL | {"global_rotary": "true", "sinks": "true"},
    "phi-3": {
        **{
            "max_seq": "160",
            "rope.kind": "longrope",
            "rope.factor": "8",
            "rope.original_seq": "36",
        },
        **{"rope.short": "1,1.25,1.5,2", "rope.long": "4,5,6,7"},
    },
    "llama-4": _LOCAL | {"window_kind": "chunked", "nope_floor": "5", "qk_norm": "l2"},
}


DENSE = (
    *(("dp=1", True), ("tp=2", True), ("tp=2", False), ("pp=2", True), ("dp=2", True)),
    *(("tp=4", False), ("pp=4", True), ("tp=2 pp=2", False), ("dp=2 pp=2", True)),
    *(("tp=8", True), ("tp=2 pp=2 dp=2", True), ("tp=2 pp=4", False)),
)
EXPERTS = (
    *("dp=1", "tp=2", "dp=2 ep=2", "tp=2 ep=2", "tp=2 etp=2", "dp=4 ep=4", "dp=2 tp=2 ep=2"),
    *("dp=2 tp=2 ep=4", "dp=2 pp=2 ep=2", "tp=2 pp=2 dp=2 ep=2", "tp=2 pp=2 dp=2 ep=4"),
    *("dp=2 tp=2 etp=2 ep=2", "dp=4 ep=2 pp=2"),
)
# Families that cut their heads, positions or experts in another way.
OTHERS = (
    *(("qwen3-8b", "tp=2 pp=2"), ("qwen3-8b", "dp=2 tp=4"), ("gpt2", "tp=2 pp=2")),
    *(("gpt2", "dp=2 tp=2"), ("mistral-7b", "tp=4"), ("mistral-7b", "pp=2 dp=2")),
    *(("deepseek-v3", "tp=2 ep=2"), ("deepseek-v3", "dp=2 pp=2 ep=2"), ("deepseek-v3", "tp=4")),
    *(("qwen3-30b-a3b", "dp=2 tp=2 ep=4"), ("llama-3.1-8b", "tp=8"), ("olmoe-1b-7b", "dp=4 ep=4")),
)
# Tokens and blocks over context ranks.
CONTEXTS = (
    *(("tiny", "cp=2"), ("tiny", "cp=2 tp=2"), ("tiny", "cp=4"), ("tiny", "dp=2 cp=2 pp=2")),
    *(("tiny-moe", "cp=2 ep=2"), ("tiny-moe", "cp=2 etp=2"), ("tiny-moe", "dp=2 cp=2 ep=4")),
    *(("tiny-moe", "tp=2 cp=2 pp=2 ep=4"), ("tiny-moe", "tp=2 cp=2 etp=2 ep=2")),
    *(("mistral-7b", "tp=2 cp=2"), ("gpt2", "cp=3"), ("qwen3-8b", "tp=2 cp=4")),
    *(("deepseek-v3", "tp=2 cp=2 ep=2"), ("deepseek-v3", "dp=2 cp=2 pp=2 ep=4")),
    *(("qwen3-30b-a3b", "dp=2 cp=4 ep=8"),),
)

LIKE = (
    *(("tiny", "tp=2", "gemma-2"), ("tiny", "cp=2 pp=2", "gemma-2")),
    *(("tiny-moe", "tp=2 ep=2", "gpt-oss"), ("tiny-moe", "tp=2 cp=2 ep=2", "gpt-oss")),
    *(("tiny-moe", "dp=2 tp=2 ep=4", "llama-4"), ("tiny", "cp=3", "llama-4")),
    *(("tiny", "tp=2 cp=2", "phi-3"), ("tiny", "dp=2 pp=2", "phi-3")),
)


def cases() -> Iterator[GenerationCase]:
    """All of them."""
    yield from (GenerationCase("tiny", layout, sp) for layout, sp in DENSE)
    yield from (GenerationCase("tiny-moe", layout) for layout in EXPERTS)
    yield from (GenerationCase(*each) for each in OTHERS)
    yield from context_cases()
    yield from like_cases()


def context_cases() -> Iterator[GenerationCase]:
    """Those with cp."""
    yield from (GenerationCase(*each) for each in CONTEXTS)


def like_cases() -> Iterator[GenerationCase]:
    """Those with attention of other families."""
    yield from (GenerationCase(model, layout, like=like) for model, layout, like in LIKE)


def prove(pool: Pool, case: GenerationCase) -> GeneratedVerdict:
    """Run one case on a pool of at least as many processes as it has ranks."""
    return run_generated(pool, runnable(case.options, trains=False), GeneratedSettings())


def is_good(verdict: GeneratedVerdict) -> bool:
    largest = max(verdict.logit_err, verdict.logprob_err, verdict.trained_err)
    return verdict.passed and largest <= MOST_ERROR


def line(case: GenerationCase, verdict: GeneratedVerdict, seconds: float, good: bool) -> str:
    """What the table says about a case."""
    layout = case.layout + ("" if case.sp else " no-sp")
    errors = [f"{each:.0e}" for each in (verdict.logit_err, verdict.logprob_err)]
    trained = [verdict.trained_layout, f"{verdict.trained_err:.0e}"]
    tokens = f"{verdict.tokens} {'equal' if verdict.tokens_equal else 'DIFFERENT'}"
    result = "pass" if good else "FAIL"
    cells = [case.named, layout, *errors, *trained, tokens, f"{seconds:.1f}", result]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    print(HEAD.format(date=date.today()))
    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS))
    passed: list[bool] = []
    with Pool(MOST_RANKS, PATIENCE) as pool:
        for case in cases():
            began = time.perf_counter()
            verdict = prove(pool, case)
            passed.append(is_good(verdict))
            print(line(case, verdict, time.perf_counter() - began, passed[-1]), flush=True)
    print(f"\n{sum(passed)} of {len(passed)} layouts pass")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
