"""Decode with weights in fp8 beside bfloat16, in one run; and how far both are apart. With
`--kv fp8` weights stay as they are, and keys and values are in fp8 instead.

    python benchmarks/fp8_serving.py decode [--model llama-3.1-8b] [--sequences 1 16 32 64 128 256]
    python benchmarks/fp8_serving.py decode --kv fp8 --sequences 64 256
    python benchmarks/fp8_serving.py kernels [--tokens 1 4 16 32 64 128 256 512]
    python benchmarks/fp8_serving.py agreement FOLDER --text FILE [--device cpu] [--tokens 8192]
                                               [--kv fp8]

decode     Milliseconds of a step after prompts of 1k tokens and of a prompt of 8k, through the
           engine, and the ratio. Random weights.
kernels    Microseconds of the matmuls of a layer of Llama 8B: torch's in bfloat16, codes by tiles
           of several sizes (the engine's are `token_tile` and the first of one token), and the
           values of codes written for torch. With the share of reading codes at the speed of
           memory.
agreement  Of a model and a text: the share of tokens whose most likely next token is the same, the
           mean distance of log-probabilities, and both perplexities.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from fivefold.commands.options import open_weights
from fivefold.core.layout import Weight
from fivefold.core.model import Shape, blocks_of, presets
from fivefold.core.plan import PlanOptions
from fivefold.generate import (
    LayoutEngine,
    ModelOptions,
    Request,
    ScheduleLimits,
    TextRequest,
    find_model,
    mesh_of,
    plan_of,
    run_ranks,
    set_up,
    stage_of,
)
from fivefold.model.fp8.rows import RowOperand, round_rows
from fivefold.model.kernels import compiled_for_steps

CONTEXT, NEW, LONG = 1024, 96, 8192
SIZES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate up": (28672, 4096), "down": (4096, 14336)}
ONE = ((4, 512), (4, 256), (8, 256), (8, 512), (2, 512), (4, 1024))  # rows, words at once
FEW = ((32, 256, 4), (16, 256, 4), (16, 512, 3), (32, 512, 3), (64, 256, 4))  # and stages
MORE = ((64, 256, 3), (64, 128, 4), (32, 256, 4), (128, 128, 4), (128, 128, 3))
Times = dict[str, float]


def engine_of(shape: Shape, codes: bool, sequences: int, kv_codes: bool) -> LayoutEngine:
    """An engine with random weights, and room for so many sequences."""
    device = torch.device("cuda")
    plan = replace(plan_of(shape, PlanOptions("tiny")), shape=replace(shape, mtp=0))
    mesh = mesh_of(plan, device, False)
    stage = stage_of(plan, mesh, torch.bfloat16, False, compiled_for_steps, codes)
    generator = torch.Generator(device).manual_seed(0)

    def read(weight: Weight, dtype: torch.dtype) -> Tensor:
        values = torch.empty(weight.shape, dtype=dtype, device=device)
        return values.normal_(0, 0.02, generator=generator)

    stage.fill(read)
    blocks = sequences * (blocks_of(CONTEXT + NEW) + 1) + blocks_of(LONG + 1)
    limits = ScheduleLimits(LONG, sequences)
    return LayoutEngine(plan, mesh, stage, blocks, limits, kv_codes=kv_codes)


def prompts(shape: Shape, sequences: int, length: int, new: int) -> list[Request]:
    dice = torch.Generator().manual_seed(1)
    rows = torch.randint(shape.vocab, (sequences, length), generator=dice).tolist()
    return [Request(f"{time.time_ns()}-{i}", tuple(row), new) for i, row in enumerate(rows)]


def step_ms(engine: LayoutEngine, shape: Shape, sequences: int) -> float:
    """The median step in which all sequences draw."""
    engine.renew()
    for request in prompts(shape, sequences, CONTEXT, NEW):
        engine.add(request)
    steps: list[float] = []
    while engine.busy:
        begin = time.perf_counter()
        if len(engine.step()) == sequences:
            steps.append(time.perf_counter() - begin)
    return 1e3 * median(steps[8:])  # the first ones compile and capture


def prompt_ms(engine: LayoutEngine, shape: Shape) -> float:
    times: list[float] = []
    for _ in range(3):
        engine.renew()
        (request,) = prompts(shape, 1, LONG, 1)
        begin = time.perf_counter()
        engine.run([request])
        times.append(time.perf_counter() - begin)
    return 1e3 * median(times)


def decode(shape: Shape, sequences: Sequence[int], of_keys: bool) -> None:
    times: dict[bool, Times] = {}
    for codes in (False, True):
        torch.cuda.reset_peak_memory_stats()
        engine = engine_of(shape, codes and not of_keys, max(sequences), codes and of_keys)
        stored = [tensor for pages in engine.pages.values() for tensor in pages.stored]
        weights = sum(weight.nbytes for weight in engine.stage.model.parameters())
        times[codes] = {f"{count}": step_ms(engine, shape, count) for count in sequences}
        times[codes]["prompt of 8k"] = prompt_ms(engine, shape)
        engine.close()
        name = "fp8" if codes else "bf16"
        table: dict[str, Any] = {name: times[codes], "weights_gb": weights / 1e9}
        table |= {"keys_gb": sum(tensor.nbytes for tensor in stored) / 1e9}
        print(json.dumps(table), flush=True)
        del engine, stored
        torch.cuda.empty_cache()
    ratios = {case: plain / times[True][case] for case, plain in times[False].items()}
    print(json.dumps({"bf16 / fp8": ratios}), flush=True)


def seconds_of(run: Callable[[], object], repeats: int = 20) -> float:
    """Of one call, replayed so that no host is waited for."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()
    best = math.inf
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / repeats)
    return best


def kernels(tokens: Sequence[int], speed: float) -> None:
    """All tiles for the matmuls of a layer; several weights in turn, so that no cache has them."""
    from fivefold.generate import code_kernel

    for name, (outputs, inputs) in SIZES.items():
        copies = max(2, int(4e8) // (outputs * inputs))
        weights = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(copies)]
        rows = [round_rows([weight], None) for weight in weights]
        scales = [operand.scale[:, None].contiguous() for operand in rows]
        for count in tokens:
            x = torch.randn(count, inputs, device="cuda").bfloat16()

            def plain(x: Tensor = x, weights: list[Tensor] = weights) -> None:
                for weight in weights:
                    torch.nn.functional.linear(x, weight)

            def written(x: Tensor = x, rows: list[RowOperand] = rows) -> None:
                for operand in rows:
                    torch.nn.functional.linear(x, operand.values(x.dtype))

            def codes(
                x: Tensor = x, rows: list[RowOperand] = rows, scales: list[Tensor] = scales
            ) -> None:
                for operand, scale in zip(rows, scales, strict=True):
                    code_kernel.coded_linear(x, operand.codes, None, scale)

            found = {"torch bf16": seconds_of(plain), "values": seconds_of(written)}
            for label, change in tiles(code_kernel, count).items():
                change()
                try:
                    found[label] = seconds_of(codes)
                except Exception as error:  # a tile that does not fit
                    print(name, count, label, type(error).__name__)
            least = outputs * inputs / speed
            shown = {
                label: [round(1e6 * s / copies, 2), round(least * copies / s, 3)]
                for label, s in found.items()
            }
            print(json.dumps({"matmul": name, "tokens": count, "us, share": shown}), flush=True)


def tiles(module: Any, count: int) -> dict[str, Callable[[], None]]:
    """What sets each tile."""

    def one(rows: int, block: int) -> None:
        module._ROWS, module._WORDS, module._WORDS_OF_FEW = rows, block, block

    def few(*tile: int) -> None:
        module._TILES = module._NARROW_TILES = (module.TokenTile(*tile),)

    if count == 1:
        return {f"codes {rows} x {block}": partial(one, rows, block) for rows, block in ONE}
    width = 16 if count <= 16 else 32 if count <= 32 else 64
    choices = FEW if width == 16 else MORE
    labelled = {f"codes {width}: {tile}": partial(few, width, *tile) for tile in choices}
    if count > 64:
        labelled |= {f"codes 128: {tile}": partial(few, 128, *tile) for tile in choices}
    return labelled


def agreement(
    folder: Path, text: Path, device: str, tokens: int, layout: str, of_keys: bool
) -> None:
    model = find_model(folder)
    scored: dict[str, tuple[list[int], list[float]]] = {}
    for precision in ("bf16", "fp8"):
        numbers_of: Any = {"kv" if of_keys else "precision": precision}
        options = ModelOptions(layout, None, device, **numbers_of)
        setup = set_up(model, options, partial(open_weights, model, None))
        numbers = setup.codec.encode(text.read_text("utf-8"), special=True)[: tokens + 1]
        window = min(1024, model.shape.max_seq)
        requests: list[TextRequest] = []
        for start in range(0, len(numbers) - 1, window):
            part = numbers[start : start + window + 1]
            request = Request(f"{start:09}", part[:-1], 0, targets=part[1:])
            requests.append(TextRequest(request, ""))
        greedy, logprobs = dict[str, Any](), dict[str, Any]()

        def on_piece(piece: Any, greedy: Any = greedy, logprobs: Any = logprobs) -> None:
            if piece.written is not None:
                greedy[piece.id], logprobs[piece.id] = piece.written.tokens, piece.written.logprobs

        run_ranks(setup.task(requests), on_piece, print)
        ids = sorted(greedy)
        scored[precision] = (
            [token for id in ids for token in greedy[id]],
            [logprob for id in ids for logprob in logprobs[id]],
        )
    (tokens_bf16, plain), (tokens_fp8, coded) = scored["bf16"], scored["fp8"]
    pairs = list(zip(plain, coded, strict=True))
    same = sum(a == b for a, b in zip(tokens_bf16, tokens_fp8, strict=True))
    table = {
        "tokens": len(pairs),
        "top1_agreement": same / len(pairs),
        "mean_abs_logprob_difference": sum(abs(a - b) for a, b in pairs) / len(pairs),
        "perplexity": math.exp(-sum(plain) / len(plain)),
        "perplexity_fp8": math.exp(-sum(coded) / len(coded)),
    }
    print(json.dumps(table), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=["decode", "kernels", "agreement"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 16, 32, 64, 128, 256])
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layout", default="dp=1")
    parser.add_argument("--kv", choices=["fp8"], help="keys and values in fp8, not weights")
    options = parser.parse_args()
    if options.case == "agreement":
        if options.folder is None or options.text is None:
            parser.error("agreement FOLDER --text FILE")
        count = (options.tokens or [8192])[0]
        about = (options.device, count, options.layout, options.kv is not None)
        agreement(options.folder, options.text, *about)
        return 0
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
        return 0
    if options.case == "kernels":
        from decode import bandwidth

        kernels(options.tokens or [1, 4, 16, 32, 64, 128, 256, 512], bandwidth())
    else:
        decode(presets.load(options.model), options.sequences, options.kv is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
