"""Published serving figures beside our plans of them: `python -m tests.serving_published` writes
docs/serving-plans.md.

A row is a throughput in tokens per second of all its GPUs. `mixed`: prompts and answers on the same
GPUs under the highest load that fits; `decode` and `prefill`: GPUs that do only that, with so many
sequences on each.
"""

from __future__ import annotations

import sys
from math import exp, log
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from fivefold.api.serving_plans import plan_serving
from fivefold.core import machine, models
from fivefold.core.layout import Layout
from fivefold.cost.serving import ServedModel
from fivefold.planner.serving import LayoutLoad
from fivefold.planner.serving_fit import KV_FORMATS, ServingFit, ServingRequest
from fivefold.report import duration

DOC = Path(__file__).parent.parent / "docs" / "serving-plans.md"

SOURCES = {
    "trtllm": "[TensorRT-LLM 1.0, performance overview](https://github.com/NVIDIA/TensorRT-LLM/blob"
    "/00f37686aa854010d68bcbd0f4ab000221541ca6/docs/source/performance/perf-overview.md) (2025): "
    "output tokens/s under maximum load",
    "deepseek": "[DeepSeek-V3/R1 inference system overview](https://github.com/deepseek-ai/"
    "open-infra-index) (2025-03-01): a node of 8 H800 has 73.7k tokens/s of prefill, 56.3% of them "
    "cache hits that nobody computes, and 14.8k of decode at 20 to 22 tokens/s an answer; the "
    "mean context of a token is 4,989",
    "sglang": "[SGLang, large-scale EP](https://lmsys.org/blog/2025-05-05-large-scale-ep/) "
    "(2025-05-05): 52.3k tokens/s of prefill and 22.3k of decode for a node of 8 H100, prompts of "
    "2,000",
    "gb200": "[SGLang on GB200, part II](https://lmsys.org/blog/2025-09-25-gb200-part-2/) "
    "(2025-09-25): 18,471 tokens/s of prefill and 9,087 of decode for a GPU in bf16 and fp8, "
    "prompts of 2,000; decode on 48 GPUs",
}


class Published(NamedTuple):
    """One figure."""

    model: str
    machine: str
    layout: str
    precision: str
    kv: str
    prompt: int
    output: int
    tokens_per_s: float  # of all GPUs of the layout
    source: str
    kind: str = "mixed"
    sequences: int = 0  # of a GPU, of decode


def _trt(
    model: str, where: str, layout: str, rows: dict[tuple[int, int], int], kv: str = "fp8"
) -> list[Published]:
    precision = "nvfp4" if where in ("b200", "gb200") else "fp8"
    return [
        Published(model, where, layout, precision, kv, *lengths, found, "trtllm")
        for lengths, found in rows.items()
    ]


_BIG, _LONG = "llama-3.1-405b", {(20000, 2000): 345}
ROWS = [
    *_trt(
        _BIG,
        "h100",
        "tp=8",
        {
            **{(128, 128): 3627, (128, 2048): 4340, (500, 2000): 3994, (1000, 1000): 2919},
            **{(1000, 2000): 2895, (2048, 128): 453, (2048, 2048): 2296, (5000, 500): 610},
            **_LONG,
        },
    ),
    *_trt(_BIG, "h200", "tp=8", {(1000, 1000): 3330, (2048, 128): 456, (2048, 2048): 2948}),
    *_trt("llama-3.1-70b", "h100", "tp=2", {(1000, 1000): 4205, (2048, 2048): 3082}),
    *_trt("llama-3.1-8b", "h100", "tp=1", {(1000, 1000): 15220, (2048, 128): 3450}),
    *_trt("llama-3.1-8b", "h200", "tp=1", {(1000, 1000): 17744, (2048, 2048): 12194}),
    *_trt("qwen3-30b-a3b", "b200", "tp=1", {(1000, 1000): 25828, (2048, 2048): 17554}),
    *_trt("qwen3-30b-a3b", "gb200", "tp=1", {(1000, 1000): 17481, (2048, 2048): 14719}),
    Published(
        *("deepseek-v3", "h800", "dp=32 ep=32", "fp8", "bf16", 4989, 1),
        *(4 * 73_700 * (1 - 0.563), "deepseek", "prefill"),
    ),
    Published(
        *("deepseek-v3", "h800", "dp=128 ep=128", "fp8", "bf16", 4989, 1),
        *(16 * 14_800, "deepseek", "decode", 88),
    ),
    Published(
        *("deepseek-v3", "h100", "dp=32 ep=32", "fp8", "bf16", 2000, 1),
        *(4 * 52_300, "sglang", "prefill"),
    ),
    Published(
        *("deepseek-v3", "h100", "dp=64 ep=64", "fp8", "bf16", 2000, 100),
        *(8 * 22_300, "sglang", "decode", 256),
    ),
    Published(
        *("deepseek-v3", "gb200", "dp=8 ep=8", "fp8", "bf16", 2000, 1),
        *(8 * 18_471, "gb200", "prefill"),
    ),
    Published(
        *("deepseek-v3", "gb200", "dp=64 ep=64", "fp8", "bf16", 2000, 100),
        *(64 * 9_087, "gb200", "decode", 768),
    ),
]


def planned(row: Published) -> float:
    """Tokens per second of our plan."""
    shape, where = models.load(row.model), machine.load(row.machine)
    layout = Layout.parse(row.layout, zero=0, sp=shape.moe is not None and "tp=1" not in row.layout)
    if row.kind == "mixed":
        lengths = (row.prompt, row.output)
        request = ServingRequest(
            shape, where, layout.world, *lengths, precision=row.precision, kv=row.kv
        )
        found = LayoutLoad(ServingFit(request, layout)).fullest()
        assert found is not None
        return found.tokens_per_s
    layout = Layout.parse(row.layout, zero=0, sp=False)
    served = ServedModel(shape, where, layout, row.precision, KV_FORMATS[row.kv])
    if row.kind == "prefill":
        return layout.dp * row.prompt / served.prompt(row.prompt)[1]
    step = served.decode(np.array([float(row.sequences)]), row.prompt + row.output / 2)
    return layout.dp * row.sequences / float(step.seconds[0])


def _words(row: Published) -> str:
    if row.kind == "mixed":
        return f"{row.prompt:,} / {row.output:,}"
    if row.kind == "prefill":
        return f"prefill of {row.prompt:,}"
    return f"decode of {row.sequences} a GPU at {row.prompt:,}"


def told(row: Published) -> str:
    """A row of the table up to the published figure."""
    world = Layout.parse(row.layout).world
    return (
        f"| {row.model} | {world} {row.machine} | {row.layout} | {row.precision}, {row.kv} | "
        f"{_words(row)} | {row.tokens_per_s:,.0f} |"
    )


def table() -> list[str]:
    """The table, and how far plans are from it."""
    lines = [
        "| model | GPUs | layout | weights, cache | prompt / answer | published tokens/s | planned "
        "| planned / published | source |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ratios: list[float] = []
    for row in ROWS:
        found = planned(row)
        ratios.append(found / row.tokens_per_s)
        lines.append(f"{told(row)} {found:,.0f} | {ratios[-1]:.2f} | {row.source} |")
    errors = [abs(log(each)) for each in ratios]
    within = sum(each <= log(1.25) for each in errors)
    lines += [
        "",
        f"{len(ROWS)} figures: the median factor between plan and figure is "
        f"{exp(median(errors)):.2f}, the largest {exp(max(errors)):.2f}; {within} are within 1.25.",
        "",
        "Sources:",
        "",
        *(f"- {name}: {text}." for name, text in SOURCES.items()),
    ]
    return lines


ALONE = (("llama-3.1-405b", "h100", 16, "bf16"), ("qwen3-30b-a3b", "h200", 1, "bf16"))
ALONE += (("deepseek-v3", "h800", 32, "fp8"), ("deepseek-v3", "gb200", 72, "fp8"))


def plans() -> list[str]:
    """Plans of prompts of 2,048 and answers of 256 tokens."""
    lines = [
        "| model | GPUs | weights | for | layout | first token | each token | tokens/s | at a time "
        "| fit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, where, gpus, precision in ALONE:
        asked = {"machine": where, "gpus": gpus, "precision": precision}
        choice = plan_serving(name, **asked).choice
        for goal, plan in (("latency", choice.latency), ("throughput", choice.throughput)):
            lines.append(
                f"| {name} | {gpus} {where} | {precision} | {goal} | {plan.layout} | "
                f"{duration(plan.ttft)} | {duration(plan.tpot)} | {plan.tokens_per_s:,.0f} | "
                f"{plan.sequences:,.0f} | {plan.max_sequences:,} |"
            )
    return lines


BEGIN, END = "<!-- published: begin -->", "<!-- published: end -->"


def written() -> list[str]:
    """What stands between the marks."""
    return [*table(), "", "## Plans of the same machines", "", *plans()]


def main() -> int:
    """Write the table into its page."""
    before, _, rest = DOC.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOC.write_text("\n".join([before + BEGIN, *written(), END + after]), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
