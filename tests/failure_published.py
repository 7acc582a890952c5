"""Published shares of useful time beside our simulations of them, and what each way to recover is
worth at which scale: `python -m tests.failure_published` writes docs/failures.md.

Each row has its inputs and where they come from. Nothing is fitted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import fivefold as ff
from fivefold.commands.simulate import SimulatedFailures
from fivefold.core.plan.failures import FailureRates
from fivefold.planner.failures import RECOVERIES, scale_points
from tests.failure_scales import designs_table, scale_svg

DOC = Path(__file__).parent.parent / "docs" / "failures.md"
PICTURE = DOC.parent / "pictures" / "failures.svg"
_LLAMA = 16_384 * 54 * 24 / 466  # hours of a GPU between interruptions, planned ones too
_META = 100_000 * 17 / 60  # one failure in 17 minutes at 100,000


class PublishedShare(NamedTuple):
    """A published share of useful time, the job, and the inputs of its simulation."""

    name: str
    share: float
    job: dict[str, Any]
    inputs: dict[str, Any]
    sources: str
    at_least: bool = False  # the source says "more than"


_BIG = {"model": "llama-3.1-405b", "machine": "h100", "seq": 8192}
ROWS = (
    PublishedShare(
        "Llama 3, 16,384 H100",
        0.90,
        {**_BIG, "layout": "dp=128 tp=8 pp=16", "microbatches": 16},
        {"days": 54, "mtbf_gpu": _LLAMA, "detect": 600, "restart": 300, "checkpoint": "disk"},
        "466 interruptions in 54 days and more than 90%: arXiv 2407.21783, section 3.3.4. 600 s is "
        "the usual timeout of NCCL in torch, 300 s our own assumption",
        at_least=True,
    ),
    PublishedShare(
        "synchronous, 98,304 H100",
        0.44,
        {**_BIG, "layout": "dp=768 tp=8 pp=16", "microbatches": 16},
        {"days": 10, "mtbf_gpu": _META, "detect": 30, "restart": 570, "checkpoint": "disk"},
        "10 minutes a failure, 44%: FT-HSDP, arXiv 2602.00277. One failure in 17 minutes at "
        "100,000 GPUs; RSC-1 had 6.5 in 1,000 node-days (arXiv 2410.21680), which are 17.7 minutes",
    ),
    PublishedShare(
        "FT-HSDP, 98,304 H100",
        0.80,
        {**_BIG, "layout": "dp=768 tp=8 pp=16", "microbatches": 16},
        {"days": 10, "mtbf_gpu": _META, "detect": 30, "restart": 150, "checkpoint": "memory"},
        "3 minutes a failure, 80%: FT-HSDP, arXiv 2602.00277. Other replicas keep the state, as "
        "partners' memory does; the same rate",
    ),
    PublishedShare(
        "ByteRobust, 9,600 H100",
        0.97,
        {"model": "llama-3.1-70b", "machine": "h100", "seq": 8192}
        | {"layout": "dp=150 tp=8 pp=8", "microbatches": 16},
        {"days": 90, "mtbf_gpu": _LLAMA, "checkpoint": "memory"},
        "97% in three months with checkpoints in memory: arXiv 2509.16293. Its rate is not known "
        "here: Llama 3's; 30 s and 300 s are our own",
    ),
)


def simulated(row: PublishedShare, runs: int = 200) -> SimulatedFailures:
    """Our simulation of a row."""
    job = dict(row.job)
    return ff.simulate(job.pop("model"), **job, **row.inputs, runs=runs)


def published_table() -> list[str]:
    """The rows with their inputs, and what the simulation says."""
    lines = [
        "| run | GPUs | a failure in | notice + start | checkpoint | published | simulated (90% of "
        "runs) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        found = simulated(row)
        answer, job = found.to_json(), found.forecast.job
        low, high = answer["goodput_band"]
        more = "> " if row.at_least else ""
        lines.append(
            f"| {row.name} | {answer['gpus']:,} | {answer['mtbf_s'] / 60:.0f} min | "
            f"{job.design.detect:.0f} + {job.design.restart:.0f} s | {answer['checkpoint']}, every "
            f"{answer['interval_s']:.0f} s | {more}{row.share:.0%} | "
            f"**{answer['goodput']:.1%}** ({low:.1%} to {high:.1%}) |"
        )
    sources = [f"- {row.name}: {row.sources}." for row in ROWS]
    return [*lines, "", "Inputs:", "", *sources]


SCALES = (1024, 4096, 16_384, 32_768, 65_536, 131_072)


def designs() -> list[str]:
    """Goodput of every way to recover at every scale; also writes the picture."""
    found = ff.plan(
        "llama-3.1-405b", machine="h100", layout="dp=8 tp=8 pp=16", seq=8192, microbatches=16
    )
    assert found.estimate is not None
    lines: list[str] = []
    for hours, who in ((50_700, "Llama 3's H100"), (29_500, "RSC-1's A100")):
        points = scale_points(found.estimate, FailureRates(hours), SCALES)
        head, *rows = designs_table(points)
        lines += [
            f"With {hours:,} hours between failures of a GPU ({who}):",
            "",
            *(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)),
            "",
        ]
        PICTURE.write_text(scale_svg(points) + "\n", encoding="utf-8")
    kinds = ", ".join(f"{one.name}: {one.detect:.0f} + {one.restart:.0f} s" for one in RECOVERIES)
    return [*lines, f"Seconds to notice and to start: {kinds}."]


def main() -> None:
    """Write the tables."""
    text = DOC.read_text("utf-8")
    for name, lines in (("published", published_table()), ("designs", designs())):
        before, _, rest = text.partition(f"<!-- {name}: begin -->\n")
        _, mark, after = rest.partition(f"<!-- {name}: end -->")
        assert mark, f"docs/failures.md has no marks of {name}"
        text = f"{before}<!-- {name}: begin -->\n" + "\n".join(lines) + f"\n{mark}{after}"
    DOC.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
