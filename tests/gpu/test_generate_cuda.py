"""Generation on a GPU beside the plain forward on the CPU: kernels, graphs, completions."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fivefold.core.model.presets import load, with_overrides
from fivefold.core.plan.plan import PlanOptions
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.engine import Engine, Watch
from fivefold.generate.forward import DecoderForward
from fivefold.generate.layout import LayoutEngine, mesh_of, plan_of, stage_of
from fivefold.generate.mtp_drafts import MtpDrafter
from fivefold.generate.requests import DrawnToken, Request, Sampling, SequenceState
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.launch.backend import num_gpus
from fivefold.model.decoder import Decoder, from_config
from fivefold.verify.generated import GeneratedTrial, batch_difference

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)
BLOCKS, NEW = 64, 40
# Heads of 64 in groups of 4, experts, a window; and what no kernel has.
MODELS = {
    "tiny": {"heads": "8", "kv_heads": "2", "head_dim": "64"},
    "tiny-moe": {},
    "windowed": {"window": "24"},
    "longrope": {
        **{"rope.kind": "longrope", "rope.factor": "8", "rope.original_seq": "36"},
        **{"rope.short": "1,1.25,1.5,2", "rope.long": "4,5,6,7"},
    },
    "capped": {"score_cap": "0.5"},
    "chunked": {"window": "24", "window_kind": "chunked", "global_every": "2"},
    "sinks": {"sinks": "true", "window": "24", "global_every": "2", "global_rotary": "true"},
}


def decoder_of(name: str, dtype: torch.dtype, mtp: int = 0) -> Decoder:
    """With random weights, on the CPU."""
    model = name if name.startswith("tiny") else "tiny"
    sizes = {"layers": "3", "max_seq": "512", "mtp": str(mtp)}
    shape = with_overrides(load(model), {**sizes, **MODELS[name]})
    decoder = from_config(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in decoder.parameters():
            each.normal_(0, 0.3 if each.ndim > 1 else 1.0, generator=generator)
    return decoder


def requests(vocab: int) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randint(vocab, (n,), generator=generator).tolist() for n in (3, 70, 150, 16, 1)]
    prompts = [*drawn, drawn[1]]  # two samples of one, whose end is copied
    return [Request(str(i), tuple(each), NEW, Sampling()) for i, each in enumerate(prompts)]


def same_tokens(name: str, piecewise: bool = False) -> None:
    """Greedy tokens in float32, prompts in chunks beside decodes, are those of the CPU."""
    from fivefold.generate.cuda_graphs import GraphedForward  # Triton is there only with CUDA

    torch.backends.cuda.matmul.allow_tf32 = False
    decoder = decoder_of(name, torch.float32)
    limits = ScheduleLimits(tokens=160 if piecewise else 64, sequences=4)
    drawn = DrawnTokens(limits.sequences, torch.device("cuda"))
    there, replayed = GraphedForward(copy.deepcopy(decoder).cuda(), BLOCKS, drawn=drawn), Mock()
    if piecewise:
        there.capture_prompts(limits.tokens)
        assert there.with_prompts is not None and len(there.with_prompts.captured) == 3
        there.with_prompts = replayed = Mock(wraps=there.with_prompts)
    engines = [
        Engine(decoder.shape, DecoderForward(decoder, BLOCKS), BLOCKS, limits),
        Engine(decoder.shape, there, BLOCKS, limits, drawn=drawn),
    ]
    found = [each.run(requests(decoder.shape.vocab)) for each in engines]
    for id, expected in found[0].items():
        assert found[1][id].tokens == expected.tokens, id
        pairs = zip(found[1][id].logprobs, expected.logprobs, strict=True)
        assert max(abs(a - b) for a, b in pairs) < 1e-3, id
    assert bool(there.captured) == bool(there.most_captured)
    assert not piecewise or replayed.call_count >= 2  # a prompt of one token is a decode step


class HalfRight:
    """Proposes what comes, with something else after two tokens of every other step."""

    def __init__(self, texts: dict[str, tuple[int, ...]]) -> None:
        self.texts = texts

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        start = len(sequence.drawn)
        following = [*self.texts[sequence.request.id][start : start + min(most, 5)]]
        return [*following[:2], *[0] * len(following[2:])] if start % 2 else following


def same_drafts(name: str, piecewise: bool = False) -> None:
    """With drafts, most of which are right, greedy tokens in float32 are those of the CPU."""
    from fivefold.generate.cuda_graphs import GraphedForward  # Triton is there only with CUDA

    torch.backends.cuda.matmul.allow_tf32 = False
    decoder, limits = decoder_of(name, torch.float32), ScheduleLimits(tokens=64, sequences=4)
    plain = Engine(decoder.shape, DecoderForward(decoder, BLOCKS), BLOCKS, limits)
    expected = plain.run(requests(decoder.shape.vocab))
    graphed = GraphedForward(copy.deepcopy(decoder).cuda(), BLOCKS)
    if piecewise:
        graphed.capture_prompts(limits.tokens)
    drafter = HalfRight({id: each.tokens for id, each in expected.items()})
    engine = Engine(decoder.shape, graphed, BLOCKS, limits, drafter=drafter)
    found = engine.run(requests(decoder.shape.vocab))
    for id, each in expected.items():
        assert found[id].tokens == each.tokens, id
        pairs = zip(found[id].logprobs, each.logprobs, strict=True)
        assert max(abs(a - b) for a, b in pairs) < 1e-3, id
    assert engine.num_accepted > NEW and engine.schedulers[0].pool.num_free == BLOCKS
    assert bool(graphed.captured) == bool(graphed.most_captured)


def same_ahead(name: str, count: int, piecewise: bool = False) -> None:
    """With drafts by layers of multi-token prediction, greedy tokens in float32 are those of the
    CPU without drafts, and nearly all proposals those of the CPU."""
    from fivefold.generate.cuda_graphs import GraphedForward  # Triton is there only with CUDA

    torch.backends.cuda.matmul.allow_tf32 = False
    limits = ScheduleLimits(tokens=64, sequences=4)
    ahead, plain = decoder_of(name, torch.float32, count), decoder_of(name, torch.float32)
    state = ahead.state_dict()
    plain.load_state_dict({key: state[key] for key in plain.state_dict()})
    engine = Engine(plain.shape, DecoderForward(plain, BLOCKS), BLOCKS, limits)
    expected = engine.run(requests(plain.shape.vocab))
    proposed: list[dict[tuple[int, ...], list[int]]] = []
    graphed = GraphedForward(copy.deepcopy(ahead).cuda(), BLOCKS)
    if piecewise:
        graphed.capture_prompts(limits.tokens)
    for forward in (DecoderForward(ahead, BLOCKS), graphed):
        drafter, seen = MtpDrafter(forward, count), dict[tuple[int, ...], list[int]]()
        put = drafter.put

        def record(
            sequence: SequenceState, tokens: list[int], put: Any = put, seen: Any = seen
        ) -> None:
            put(sequence, tokens)
            seen[tuple(sequence.tokens)] = tokens

        drafter.put = record
        engine = Engine(ahead.shape, forward, BLOCKS, limits, drafter=drafter)
        found = engine.run(requests(ahead.shape.vocab))
        assert engine.num_drafted > NEW and engine.schedulers[0].pool.num_free == BLOCKS
        for id, each in expected.items():
            assert found[id].tokens == each.tokens, id
        proposed.append(seen)
    both = proposed[0].keys() & proposed[1].keys()
    equal = sum(proposed[0][text] == proposed[1][text] for text in both)
    assert len(both) > 3 * NEW and equal >= 0.98 * len(both), (equal, len(both))
    assert bool(graphed.captured) == bool(graphed.most_captured)


def same_keys(piecewise: bool = False) -> None:
    """Scores of prompts, masks and min-p, in float32 and ahead of draws, are those of the CPU."""
    from fivefold.generate.cuda_graphs import GraphedForward  # Triton is there only with CUDA

    torch.backends.cuda.matmul.allow_tf32 = False
    decoder = decoder_of("tiny", torch.float32)
    limits = ScheduleLimits(tokens=160 if piecewise else 64, sequences=4)
    drawn = DrawnTokens(limits.tokens, torch.device("cuda"))
    graphed = GraphedForward(copy.deepcopy(decoder).cuda(), BLOCKS, drawn=drawn)
    if piecewise:
        graphed.capture_prompts(limits.tokens)
    engines = [
        Engine(decoder.shape, DecoderForward(decoder, BLOCKS), BLOCKS, limits),
        Engine(decoder.shape, graphed, BLOCKS, limits, drawn=drawn),
    ]
    plain = requests(decoder.shape.vocab)
    ends = frozenset(engines[0].run(plain[:1])["0"].tokens) | {10**6}
    warm = Sampling(1.5, min_p=1.0)  # the likeliest
    keyed = [
        replace(plain[0], stop_tokens=ends, min_tokens=20),
        replace(plain[1], prompt_logprobs=3, alternatives=2),
        replace(plain[2], prompt_logprobs=0, sampling=warm),
        plain[3],
        replace(plain[4], prompt_logprobs=1, sampling=warm, stop_tokens=ends, min_tokens=4),
    ]
    rows: list[dict[tuple[str, int], DrawnToken]] = []
    for engine in engines:
        for request in keyed:
            engine.add(request)
        rows.append({})
        while engine.busy:
            rows[-1].update({(row.id, row.index): row for row in engine.step()})
    assert rows[0].keys() == rows[1].keys() and len(rows[0]) > 69 + 149
    for key, row in rows[0].items():
        other = rows[1][key]
        assert (other.token, other.reason) == (row.token, row.reason), key
        pairs = [*row.alternatives, (row.token, row.logprob)]
        others = [*other.alternatives, (other.token, other.logprob)]
        assert [token for token, _ in pairs] == [token for token, _ in others], key
        assert max(abs(a[1] - b[1]) for a, b in zip(pairs, others, strict=True)) < 1e-3, key
        assert abs(row.rank - other.rank) <= 1, key  # of nearly equal ones
    early = [row.token for (id, index), row in rows[1].items() if id == "0" and 0 <= index < 20]
    assert len(early) == 20 and not ends.intersection(early)


def close_logits(name: str) -> None:
    """In bfloat16, logits of all ways are equally far from float64."""
    from fivefold.generate.cuda_graphs import GraphedForward  # Triton is there only with CUDA

    exact = decoder_of(name, torch.float64)
    (request,) = requests(exact.shape.vocab)[1:2]
    tokens = torch.tensor(request.prompt)
    found: dict[str, list[torch.Tensor]] = {}
    for way, decoder in (
        ("exact", copy.deepcopy(exact)),
        ("plain", copy.deepcopy(exact).bfloat16().cuda()),
        ("kernels", copy.deepcopy(exact).bfloat16().cuda()),
        ("piecewise", copy.deepcopy(exact).bfloat16().cuda()),
    ):
        forward = DecoderForward(decoder, BLOCKS)
        if way in ("kernels", "piecewise"):
            forward = GraphedForward(decoder, BLOCKS)
            if way == "piecewise":
                forward.capture_prompts(32)
        seen = found.setdefault(way, [])

        def watch(_: str, __: int, logits: torch.Tensor, seen: list[torch.Tensor] = seen) -> None:
            seen.append(logits.double().cpu())

        Engine(exact.shape, forward, BLOCKS, ScheduleLimits(tokens=32), watch).run([request])
    assert len(tokens) > 32, "the prompt is cut"
    steps = list(zip(*found.values(), strict=True))
    chosen = [{int(each.argmax()) for each in step} for step in steps]
    same = next((i for i, each in enumerate(chosen) if len(each) > 1), len(steps) - 1) + 1
    wrong = [
        max(float((step[way] - step[0]).norm() / step[0].norm()) for step in steps[:same])
        for way in (1, 2, 3)
    ]
    assert max(wrong[1:]) <= 1.5 * wrong[0] + 1e-3, wrong


def same_bits(name: str, dtype: str) -> None:
    """With fixed steps and tiles, no batch changes a bit."""
    shape = decoder_of(name, torch.float32).shape
    plan = replace(plan_of(shape, PlanOptions("tiny")), shape=shape)
    mesh, trial = mesh_of(plan, torch.device("cuda"), True), GeneratedTrial(shape, dtype, 0)

    def make(blocks: int, limits: ScheduleLimits, watch: Watch) -> LayoutEngine:
        stage = stage_of(plan, mesh, getattr(torch, dtype), True)
        stage.fill(lambda weight, _: weight_of(trial, weight.name))
        return LayoutEngine(plan, mesh, stage, blocks, limits, watch, batch_invariant=True)

    seen = trial.observe(make)
    assert batch_difference([seen]) == 0.0
    alone = seen.completions["alone"]
    for found in seen.completions.values():
        assert all(found[id].tokens == each.tokens for id, each in alone.items())


def weight_of(trial: GeneratedTrial, name: str) -> torch.Tensor:
    found = trial.full_weight(name)
    assert found is not None, name
    return found


CHECKS = {f"tokens of {name}": partial(same_tokens, name) for name in MODELS}
CHECKS |= {
    f"tokens of {name} piecewise": partial(same_tokens, name, True)
    for name in MODELS
    if name != "tiny-moe"  # its matmuls wait for the numbers of rows in float32
}
CHECKS |= {f"drafts of {name}": partial(same_drafts, name) for name in MODELS}
CHECKS |= {"drafts of tiny piecewise": partial(same_drafts, "tiny", True)}
CHECKS |= {f"layers ahead of {name}": partial(same_ahead, name, 1) for name in MODELS}
CHECKS |= {"2 layers ahead of tiny": partial(same_ahead, "tiny", 2)}
CHECKS |= {"layers ahead of tiny piecewise": partial(same_ahead, "tiny", 1, True)}
CHECKS |= {"keys": same_keys, "keys piecewise": partial(same_keys, True)}
CHECKS |= {
    f"logits of {name}": partial(close_logits, name) for name in ("tiny", "tiny-moe", "windowed")
}
CHECKS |= {
    f"bits of {name} in {dtype}": partial(same_bits, name, dtype)
    for name in MODELS
    for dtype in ("float32", "bfloat16")
}


@pytest.mark.parametrize("name", CHECKS)
def test_generation_on_a_gpu(name: str) -> None:
    """In a process of its own: later tests fork, which no CUDA survives."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    for check in sys.argv[1:] or CHECKS:
        CHECKS[check]()
        print("passed ", check, flush=True)
