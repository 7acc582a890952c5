"""Published serving figures beside our plans of them: `python -m tests.serving_published` writes
docs/serving-plans.md.

A row is a throughput in tokens per second of all its GPUs. `mixed`: prompts and answers on the same
GPUs under the highest load that fits, or that the requests of the run make; `clients`: so many wait
for their answers; `decode` and `prefill`: GPUs that do only that, with so many sequences on each.
"""

from __future__ import annotations

import sys
from math import exp, log
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from fivefold.commands.plan import plan_serving
from fivefold.core import hardware as machine
from fivefold.core.errors import counted
from fivefold.core.layout.layout import Layout
from fivefold.core.model import KV_FORMATS
from fivefold.core.model import presets as models
from fivefold.cost.step.serving import ServedModel
from fivefold.planner.serving.fit import ServingFit, ServingRequest
from fivefold.planner.serving.plans import LayoutLoad, ServingPlan
from fivefold.render import duration

DOC = Path(__file__).parent.parent / "docs" / "serving-plans.md"

SOURCES = {
    "trtllm": "[TensorRT-LLM 1.0, performance overview](https://github.com/NVIDIA/TensorRT-LLM/blob"
    "/00f37686aa854010d68bcbd0f4ab000221541ca6/docs/source/performance/perf-overview.md) (2025): "
    "output tokens/s under maximum load",
    "trtllm12": "[TensorRT-LLM 1.2, performance overview](https://github.com/NVIDIA/TensorRT-LLM/"
    "blob/03e27c7d5ff0c6e89f8328838c0a8e64f1b34f9d/docs/source/developer-guide/perf-overview.md) "
    "(2025): the same for a GPU; DEP is data parallel attention with experts over all GPUs",
    "nim": "[NVIDIA NIM 1.8, performance](https://docs.nvidia.com/nim/benchmarking/llm/1.0.0/"
    "performance) (2025): clients that wait for their answers",
    "gpustack": "[GPUStack, performance lab](https://github.com/gpustack/gpustack/tree/"
    "47277d79f4a5bae12a2d25e9ecbed2a2177a5f2d/docs/performance-lab) (2025-11): 500 requests at "
    "once through HTTP; the faster of vLLM 0.11, SGLang 0.5.5 and TensorRT-LLM 1.2rc1 on one GPU, "
    "vLLM on several",
    "tenstorrent": "[tt-inference-server, issue 340](https://github.com/tenstorrent/"
    "tt-inference-server/issues/340) (2025-07-18): vLLM, one client, from the latency of an answer",
    "moeresearch": "[MOEresearch](https://github.com/gujialiang123/MOEresearch/blob/"
    "d43a836a35f5349ab33935ab6281ed66e0e5e539/docs/2026-06-25/autotuning_honest_results.md) "
    "(2026-06-25): SGLang 0.5.9 as it starts by itself, clients that wait, prompts of random words "
    "from a list of 35, as many tokens as words assumed",
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
    sequences: int = 0  # of a GPU, of decode; clients
    requests: int = 0  # of a run that is not many times as long as an answer; 0: no bound


Lengths = tuple[int, int]  # of prompts and answers
# Requests of a run of TensorRT-LLM. Without a number here they are many times what fits.
_RUN = {(1000, 1000): 3000, (1024, 8192): 1500, (1024, 32768): 1000, (8192, 1024): 1500}


def _trt(
    model: str,
    where: str,
    layout: str,
    rows: dict[Lengths, int],
    source: str = "trtllm",
) -> list[Published]:
    """TensorRT-LLM; from version 1.2 on it tells tokens of a GPU."""
    precision = "nvfp4" if where in ("b200", "gb200") else "fp8"
    gpus = Layout.parse(layout).world if source == "trtllm12" else 1
    return [
        Published(
            *(model, where, layout, precision, "fp8", *lengths),
            *(gpus * found, source, "mixed", 0, _RUN.get(lengths, 0)),
        )
        for lengths, found in rows.items()
    ]


def _by(lengths: tuple[Lengths, ...], *found: int) -> dict[Lengths, int]:
    return dict(zip(lengths, found, strict=True))


def _all_at_once(
    model: str, where: str, layout: str, precision: str, rows: dict[Lengths, float]
) -> list[Published]:
    """GPUStack: 500 requests; it tells tokens of prompts and answers together."""
    return [
        Published(
            *(model, where, layout, precision, "bf16", *lengths),
            *(both * lengths[1] / sum(lengths), "gpustack", "mixed", 0, 500),
        )
        for lengths, both in rows.items()
    ]


def _clients(
    job: tuple[str, str, str, str, str], lengths: Lengths, rows: dict[int, float], source: str
) -> list[Published]:
    """So many clients, each with one request at a time."""
    return [
        Published(*job, *lengths, found, source, "clients", clients)
        for clients, found in rows.items()
    ]


_BIG, _LONG = "llama-3.1-405b", {(20000, 2000): 345}
_LONG_70 = {(2048, 2048): 2003, (20000, 2000): 283}
_IN = ((1000, 1000), (1024, 8192), (8192, 1024))
_OUT = ((1000, 1000), (1024, 8192), (1024, 32768))
_TWO, _FOUR = (2000, 100), (4000, 200)
_SMALL, _WIDE = ("qwen3-30b-a3b",), ("tp=1", "bf16", "bf16")
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
    *_trt(_BIG, "b200", "tp=4", {(1000, 1000): 5209, (2048, 2048): 4212, (20000, 2000): 672}),
    *_trt(_BIG, "gb200", "tp=4", {(1000, 1000): 5389, (2048, 2048): 4407, (20000, 2000): 739}),
    *_trt("llama-3.1-70b", "h200", "tp=1", {(1000, 1000): 2909, (2048, 128): 442, **_LONG_70}),
    *_trt("deepseek-v3", "h200", "dp=8 ep=8", _by(_OUT, 1627, 1218, 438), "trtllm12"),
    *_trt("deepseek-v3", "b200", "dp=4 ep=4", _by(_IN, 6463, 3862, 1168), "trtllm12"),
    *_trt("deepseek-v3", "gb200", "dp=4 ep=4", _by(_IN, 6939, 4379, 1192), "trtllm12"),
    *_trt("qwen3-235b-a22b", "h200", "dp=4 ep=4", _by(_IN, 3288, 1417, 627), "trtllm12"),
    *_trt("qwen3-235b-a22b", "h100", "dp=8 ep=8", _by(_IN[:2], 1932, 873), "trtllm12"),
    *_trt("qwen3-235b-a22b", "gb200", "dp=4 ep=4", _by(_IN, 6172, 3423, 1464), "trtllm12"),
    *_trt("llama-3.1-70b", "h200", "tp=2", _by(_IN, 2587, 2009, 537), "trtllm12"),
    *_trt("llama-3.1-70b", "h100", "tp=2", {_IN[0]: 2209, _IN[2]: 398}, "trtllm12"),
    *_trt("llama-3.1-70b", "gb200", "tp=1", _by(_IN, 7769, 3805, 1491), "trtllm12"),
    *_trt("qwen3-30b-a3b", "b200", "tp=1", _by(_IN, 26971, 13497, 5735), "trtllm12"),
    *_trt("qwen3-30b-a3b", "gb200", "tp=1", _by(_IN, 22856, 14272, 6201), "trtllm12"),
    *_all_at_once("qwen3-14b", "a100", "tp=1", "bf16", {_TWO: 7474.0, _FOUR: 6418.65}),
    *_all_at_once("qwen3-32b", "a100", "tp=1", "bf16", {_TWO: 2715.9, _FOUR: 2037.67}),
    *_all_at_once("qwen3-14b", "h100", "tp=1", "fp8", {_TWO: 14764.26, _FOUR: 12257.62}),
    *_all_at_once("qwen3-32b", "h100", "tp=1", "fp8", {_TWO: 5901.95, _FOUR: 4929.16}),
    *_all_at_once("qwen3-235b-a22b", "h100", "tp=4 etp=4", "fp8", {_TWO: 18950, _FOUR: 16479}),
    *_all_at_once("deepseek-v3", "h200", "tp=8 etp=8", "fp8", {_TWO: 17691, _FOUR: 15809}),
    *_clients(
        ("llama-3.1-70b", "h100", "tp=2", "fp8", "fp8"),
        (5000, 500),
        {1: 51.67, 5: 218.48, 25: 623.4, 50: 814.37},
        "nim",
    ),
    *_clients((*_SMALL, "a100", *_WIDE), (128, 1024), {1: 1024 / 9.9235}, "tenstorrent"),
    *_clients((*_SMALL, "a100", *_WIDE), (2048, 128), {1: 128 / 1.3437}, "tenstorrent"),
    *_clients((*_SMALL, "h200", *_WIDE), (100, 256), {1: 0.888 * 256}, "moeresearch"),
    *_clients((*_SMALL, "h200", *_WIDE), (800, 256), {8: 4.629 * 256}, "moeresearch"),
    *_clients((*_SMALL, "h200", *_WIDE), (200, 256), {32: 14.712 * 256}, "moeresearch"),
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


def _load(row: Published, layout: Layout) -> ServingPlan:
    """The load of the figure: so many clients, or as much as fits and was asked for."""
    request = ServingRequest(
        models.load(row.model),
        machine.load(row.machine),
        layout.world,
        row.prompt,
        row.output,
        concurrency=row.sequences or None,
        precision=row.precision,
        kv=row.kv,
        external=True,  # as those engines of 2025 had
    )
    load = LayoutLoad(ServingFit(request, layout))
    most = row.requests // layout.dp
    bounded = 0 < most < load.slots
    found = load.loaded() if row.sequences else load.steady(most) if bounded else load.fullest()
    assert found is not None
    return found


def planned(row: Published) -> float:
    """Tokens per second of our plan."""
    shape, where = models.load(row.model), machine.load(row.machine)
    layout = Layout.parse(row.layout, zero=0, sp=shape.moe is not None and "tp=1" not in row.layout)
    if row.kind in ("mixed", "clients"):
        return _load(row, layout).tokens_per_s
    layout = Layout.parse(row.layout, zero=0, sp=False)
    model = (shape, where, layout, row.precision, KV_FORMATS[row.kv])
    served = ServedModel(*model, external=True)
    if row.kind == "prefill":
        return layout.dp * row.prompt / served.prompt(row.prompt)[1]
    step = served.decode(np.array([float(row.sequences)]), row.prompt + row.output / 2)
    return layout.dp * row.sequences / float(step.seconds[0])


def _words(row: Published) -> str:
    if row.kind == "mixed":
        return f"{row.prompt:,} / {row.output:,}"
    if row.kind == "clients":
        return f"{row.prompt:,} / {row.output:,}, {counted(row.sequences, 'client')}"
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


ALONE = (
    ("llama-3.1-405b", "h100", 16, "bf16"),
    ("qwen3-30b-a3b", "h200", 1, "bf16"),
    ("deepseek-v3", "h800", 32, "fp8"),
    ("deepseek-v3", "gb200", 72, "fp8"),
)


def plans() -> list[str]:
    """Plans of prompts of 2,048 and answers of 256 tokens."""
    lines = [
        "| model | GPUs | weights | for | layout | first token | each token | tokens/s | at a time "
        "| fit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, where, gpus, precision in ALONE:
        choice = plan_serving(name, machine=where, gpus=gpus, precision=precision).choice
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
