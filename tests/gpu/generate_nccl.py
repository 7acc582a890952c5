"""Generation over NCCL: ranks that share one GPU, against the plain forward on one device.

    python -m tests.gpu.generate_nccl

prints a table in markdown. `tests/gpu/nccl.py` says what sharing a GPU needs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date

from fivefold.commands.verify import runnable
from fivefold.core.errors import RankLost
from fivefold.launch.backend import NcclLibrary
from fivefold.launch.processes import Pool
from fivefold.verify.generated import GeneratedVerdict
from fivefold.verify.generated_ranks import GeneratedSettings, run_generated
from tests.ranks.generations import COLUMNS, MOST_RANKS, GenerationCase, is_good, line

HEAD = """# Verified generation over NCCL

Ranks that share one H200 generate, and train in another layout, as docs/verified-generation.md
says: {nccl}, {date}. In float64; the last ones in bfloat16, batch-invariant. Times mean nothing
here: ranks on one GPU take turns. Made by `python -m tests.gpu.generate_nccl`.
"""
PATIENCE = 90.0
ON_GPU = GeneratedSettings(device="cuda", backend="nccl")
NARROW = replace(ON_GPU, dtype="bfloat16", batch_invariant=True)
LAYOUTS = (
    *(("tiny", "tp=2"), ("tiny", "pp=2"), ("tiny", "tp=2 pp=2 dp=2"), ("tiny", "cp=2 tp=2")),
    *(("tiny-moe", "dp=2 ep=2"), ("tiny-moe", "tp=2 etp=2"), ("tiny-moe", "tp=2 pp=2 dp=2 ep=4")),
    *(("deepseek-v3", "dp=2 pp=2 ep=2"), ("mistral-7b", "pp=2 dp=2"), ("gpt2", "tp=2 pp=2")),
)
SAME_BITS = (("tiny", "tp=2"), ("tiny-moe", "dp=2 ep=2"))


@dataclass(frozen=True)
class NcclGeneration:
    """One layout to prove, and in which numbers."""

    case: GenerationCase
    settings: GeneratedSettings

    def prove(self) -> GeneratedVerdict:
        plan = runnable(self.case.options, trains=False)
        with Pool(plan.layout.world, PATIENCE) as pool:
            return run_generated(pool, plan, self.settings)

    def is_good(self, verdict: GeneratedVerdict) -> bool:
        return verdict.passed if self.settings.batch_invariant else is_good(verdict)


def cases() -> Iterator[NcclGeneration]:
    yield from (NcclGeneration(GenerationCase(*each), ON_GPU) for each in LAYOUTS)
    yield from (NcclGeneration(GenerationCase(*each), NARROW) for each in SAME_BITS)


def main() -> int:
    nccl = NcclLibrary.current()
    nccl.require(MOST_RANKS, 1)
    print(HEAD.format(nccl=nccl, date=date.today()))
    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS), flush=True)
    passed: list[bool] = []
    for each in cases():
        began = time.perf_counter()
        try:
            verdict = each.prove()
        except RankLost as lost:
            passed.append(False)
            print(f"| {each.case} | FAIL: {' '.join(str(lost).split())[:600]} |", flush=True)
            continue
        passed.append(each.is_good(verdict))
        print(line(each.case, verdict, time.perf_counter() - began, passed[-1]), flush=True)
    print(f"\n{sum(passed)} of {len(passed)} layouts pass")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
