"""Steps with prompts as piecewise graphs, beside the plain forward: on a CPU, with graphs that
record calls and make them again on the same tensors."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.core.layout import Layout
from fivefold.core.model import Tuning
from fivefold.core.model.presets import load, with_overrides
from fivefold.core.plan import DecodeSteps
from fivefold.generate import piecewise
from fivefold.generate.cache import LayerPages, attend_sequence
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.piecewise import PiecewiseSteps, sizes_up_to
from fivefold.generate.requests import BlockCopy, Request, Sampling, SequenceChunk, StepBatch
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.stage_ends import StageEnds
from fivefold.generate.step_tensors import decode_size
from fivefold.model import moe_layers
from fivefold.model.batch import AttentionInfo
from fivefold.model.decoder import Decoder, from_config
from fivefold.serve.rank import _capture_steps

BLOCKS, TOKENS, NEW = 64, 200, 12
# Without experts, whose matmuls on a CPU wait for the numbers of rows.
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "plain": ("tiny", {}),
    "learned positions": ("tiny", {"positions": "learned", "max_seq": "400"}),
    "windowed": ("tiny", {"window": "24", "global_every": "2"}),
    "window everywhere": ("tiny", {"window": "24"}),
    "sinks": ("tiny", {"sinks": "true", "window": "24", "global_every": "2"}),
    "latents": (
        "tiny",
        {
            **{"mla.kv_rank": "12", "mla.nope_dim": "10", "mla.rope_dim": "6"},
            **{"mla.value_dim": "8", "head_dim": "16", "kv_heads": "8"},
        },
    ),
    "longrope": (
        "tiny",
        {
            **{"rope.kind": "longrope", "rope.factor": "8", "rope.original_seq": "36"},
            **{"rope.short": "1,1.25,1.5,2", "rope.long": "4,5,6,7"},
        },
    ),
}


class Calls(TorchDispatchMode):
    """Keeps what is called, with what and with which result."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, found))
        return found


class RecordedGraph:
    """As `torch.cuda.CUDAGraph`: a replay reads and writes the memory of the capture."""

    captures = replays = 0

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.calls = Calls()
        self.calls.__enter__()

    def capture_end(self) -> None:
        self.calls.__exit__(None, None, None)
        RecordedGraph.captures += 1

    def replay(self) -> None:
        RecordedGraph.replays += 1
        for func, args, kwargs, before in self.calls.made:
            found = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class NoCuda:
    """What captures call beside graphs."""

    CUDAGraph = RecordedGraph

    @staticmethod
    def graph_pool_handle() -> None: ...
    @staticmethod
    def reset_peak_memory_stats(device: torch.device) -> None: ...
    @staticmethod
    def memory_allocated(device: torch.device) -> int:
        return 100

    @staticmethod
    def synchronize(device: torch.device) -> None: ...
    @staticmethod
    def empty_cache() -> None: ...

    needs: ClassVar[Iterator[int]] = iter(())

    @classmethod
    def max_memory_allocated(cls, device: torch.device) -> int:
        return 100 + next(cls.needs, 0)

    @staticmethod
    def mem_get_info(device: torch.device) -> tuple[int, int]:
        return 1000, 1000

    class Stream:
        def __init__(self, device: torch.device) -> None: ...
        def wait_stream(self, other: object) -> None: ...

    current_stream = Stream

    @staticmethod
    @contextmanager
    def stream(stream: object) -> Iterator[None]:
        yield


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "cuda", NoCuda)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)


class Piecewise(DecoderForward):
    """Every step, replayed."""

    def __init__(self, decoder: Decoder, blocks: int) -> None:
        super().__init__(decoder, blocks)
        self.steps = PiecewiseSteps(self, sizes_up_to(TOKENS))

    def __call__(self, step: StepBatch) -> Tensor:
        return self.steps(step) if self.steps.takes(step) else super().__call__(step)


def decoder_of(name: str, dtype: torch.dtype = torch.float64, **more: str) -> Decoder:
    model, changes = MODELS[name]
    shape = with_overrides(load(model), {"layers": "3", "max_seq": "512", **changes, **more})
    decoder = from_config(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in decoder.parameters():
            each.normal_(0, 0.3 if each.ndim > 1 else 1.0, generator=generator)
    return decoder


@pytest.mark.parametrize("name", MODELS)
def test_piecewise_steps_draw_what_whole_steps_draw(name: str) -> None:
    """Prompts in chunks, beside sequences that draw; and samples, whose blocks others have
    written."""
    decoder, generator = decoder_of(name), torch.Generator().manual_seed(2)
    lengths = (3, 70, 150, 16, 1, 290)
    vocab = decoder.shape.vocab
    prompts = [torch.randint(vocab, (each,), generator=generator).tolist() for each in lengths]
    requests = [Request(str(i), tuple(each), NEW) for i, each in enumerate(prompts)]
    warm = Sampling(1.0, seed=3)
    requests += [Request(f"{i} sample", tuple(prompts[i]), NEW, warm) for i in (1, 2)]
    limits, before = ScheduleLimits(tokens=TOKENS, sequences=4), RecordedGraph.captures
    replays = RecordedGraph.replays
    whole, parts = (
        Engine(decoder.shape, forward(copy.deepcopy(decoder), BLOCKS), BLOCKS, limits).run(requests)
        for forward in (DecoderForward, Piecewise)
    )
    # Four sizes, of three layers and so of four segments each.
    assert RecordedGraph.captures == before + 4 * 4
    # All 530 tokens of prompts, at most 200 in a step, and 11 more of the last sequence.
    assert RecordedGraph.replays >= replays + 4 * (3 + NEW - 1)
    for id, expected in whole.items():
        assert parts[id].tokens == expected.tokens, id
        assert parts[id].logprobs == pytest.approx(expected.logprobs, abs=1e-9), id
    assert parts["1 sample"].reused == 69 and parts["2 sample"].reused == 149


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (4, [1, 2, 4]), (100, [1, 2, 4, 8, 16, 32, 64, 128])]
)
def test_a_server_warms_every_size_of_a_decode_step(most: int, sizes: list[int]) -> None:
    """100 sequences run in the graph of 128."""
    forward = Mock(padding=8)
    _capture_steps(forward, most, longest=64)
    assert [len(call.args[0].chunks) for call in forward.call_args_list] == sizes


def test_a_size_is_chosen() -> None:
    """The next larger one; larger steps are not taken."""
    assert sizes_up_to(1) == (64,) and sizes_up_to(65) == (64, 128) and sizes_up_to(64) == (64,)
    forward = Piecewise(decoder_of("plain"), BLOCKS)
    assert sorted(forward.steps.captured) == [64, 128, 192, 256]
    assert not forward.steps.takes(StepBatch(()))


def test_steps_that_need_much_of_the_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sizes from the largest one on, the first that takes a quarter of what is free."""
    monkeypatch.setattr(NoCuda, "needs", iter((600, 251, 250)))
    forward = Piecewise(decoder_of("plain"), BLOCKS)
    assert sorted(forward.steps.captured) == [64, 128]
    step = StepBatch((SequenceChunk("", (0,) * 129, 0, (0,) * 9, samples=True),))
    assert not forward.steps.takes(step)
    whole = DecoderForward(decoder_of("plain"), BLOCKS)(step)
    assert whole.equal(forward(step)), "steps that are not captured are as before"
    monkeypatch.setattr(NoCuda, "needs", iter((600,) * 4))
    assert not Piecewise(decoder_of("plain"), BLOCKS).steps.captured


def test_a_context_may_be_shorter_than_a_block() -> None:
    """Tokens that fill a step have positions that the model knows."""
    forward = Piecewise(decoder_of("learned positions", max_seq="8"), BLOCKS)
    assert forward(StepBatch((SequenceChunk("", (1,) * 8, 0, (0,), samples=True),))).shape[0] == 1


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """What runs on a GPU, but for kernels of Triton, which is there only with CUDA."""
    if find_spec("triton") is not None:
        yield import_module("fivefold.generate.cuda_graphs")
        return
    for name in ("triton", "triton.language", "triton.language.extra.cuda"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    before = set(sys.modules)
    yield import_module("fivefold.generate.cuda_graphs")
    for name in set(sys.modules) - before:
        if name.startswith("fivefold."):
            del sys.modules[name]


def test_blocks_are_copied_before_a_step_is_replayed(
    on_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step is one graph, which knows nothing of copies."""
    forward = on_gpu.GraphedForward(decoder_of("plain"), BLOCKS)
    tensors = [tensor for pages in forward.cache.pages.values() for tensor in pages.stored]
    for tensor in tensors:
        tensor[3] = 5.0
    seen: list[bool] = []
    graph = Mock(replay=lambda: seen.append(all(tensor[7].eq(5).all() for tensor in tensors)))
    capture = on_gpu._Captured(Mock(), None, graph, torch.zeros(1, 4), None)
    monkeypatch.setattr(forward, "_capture", lambda numbers, *size: capture)
    monkeypatch.setattr(forward, "most_captured", 256)
    chunk = SequenceChunk("a", (1,), 4, (7,), samples=True)
    forward(StepBatch((chunk,), (BlockCopy(3, 7),)))
    assert seen == [True]


def test_a_stage_replays_what_came_and_sends_a_copy(
    on_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next replay writes over the output, which may still be on its way."""
    decoder, came = decoder_of("plain"), torch.full((1, 2, 3), 4.0)
    decoder.embed = decoder.norm = decoder.head = None
    ends = StageEnds()
    asked, sent = list[int](), list[Tensor]()
    monkeypatch.setattr(ends, "receive", lambda tokens: asked.append(tokens) or came)
    monkeypatch.setattr(ends, "send", sent.append)
    forward = on_gpu.GraphedForward(decoder, BLOCKS, ends)
    received, output = torch.zeros(1, 2, 3), torch.zeros(2, 3)
    graph = Mock(replay=lambda: output.copy_(2 * received[0]))
    capture = on_gpu._Captured(Mock(), received, graph, output, None)
    monkeypatch.setattr(forward, "_capture", lambda numbers, *size: capture)
    monkeypatch.setattr(forward, "most_captured", 256)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    chunks = tuple(SequenceChunk(id, (1,), 4, (7,), samples=True) for id in "ab")
    for _ in range(2):  # captured, and replayed
        assert not forward(StepBatch(chunks)).numel()
    assert asked == [2] and torch.equal(sent[1], 2 * came)
    assert all(tensor.data_ptr() != output.data_ptr() for tensor in sent)


SINGLE = Layout()
EP = Layout.parse("dp=2 ep=2")


@pytest.mark.parametrize(
    ("dtype", "keys", "tuning", "most"),
    [
        (torch.float32, {}, None, 256),
        (torch.bfloat16, {"layout": EP}, None, 256),
        (torch.float32, {"codes": True}, None, 0),
        (torch.bfloat16, {"codes": True}, None, 256),
        (torch.bfloat16, {"codes": True, "layout": EP}, None, 0),
        (torch.float32, {"fixed_tiles": True}, None, 0),
        (torch.float32, {}, Tuning(2, 1.0, "experts.*"), 0),
        (torch.float32, {}, Tuning(2, 1.0, "attention"), 256),
        (torch.float64, {}, None, 0),
    ],
)
def test_a_stage_without_experts_captures_what_others_do(
    dtype: torch.dtype,
    keys: dict[str, Any],
    tuning: Tuning | None,
    most: int,
    on_gpu: ModuleType,
) -> None:
    """Else one of them sends as many rows as sequences, and another receives a power of two."""
    shape = with_overrides(load("tiny-moe"), {"layers": "3", "moe.first_dense": "1"})
    shape = replace(shape, tuning=tuning)
    steps = DecodeSteps(shape, dtype=str(dtype).removeprefix("torch."), **{"layout": SINGLE} | keys)
    for stage in (("0",), ("1", "2")):
        decoder = from_config(shape, dtype=dtype)
        for number in set(decoder.blocks) - {*stage}:
            del decoder.blocks[number]
        forward = on_gpu.GraphedForward(decoder, BLOCKS, steps=steps)
        assert forward.most_captured == most
        kinds = {type(mlp.dispatch).__name__ for _, mlp in moe_layers(decoder)}
        assert ("FewTokenDispatch" in kinds) == (steps.few_token_experts and "1" in stage)


def test_captured_steps_with_experts_over_many_ranks_have_a_most() -> None:
    """All tokens of a group go to all of its ranks: beyond a number, more than it wins."""
    shape = load("tiny-moe")
    for layout, most in (("dp=8 ep=8", 256), ("dp=64 ep=64", 64), ("dp=16 tp=4 ep=64", 256)):
        steps = DecodeSteps(shape, Layout.parse(layout))
        assert steps.most_captured == most
    batch = StepBatch((SequenceChunk("", (0,), 4, (), True),) * 65)
    assert decode_size(batch, 1, 64) is None and decode_size(batch, 1, 65) is not None


@pytest.mark.parametrize(
    ("name", "more"), [("plain", {}), ("latents", {}), ("latents", {"mla.q_rank": "8"})]
)
def test_kernels_are_made_for_all_prompts_that_fit(
    name: str, more: dict[str, str], on_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the width that is cached, long enough for torch's kernels, and within the context."""
    decoder = decoder_of(name, torch.float16, max_seq="1300", **more)
    forward, attend = on_gpu.GraphedForward(decoder, BLOCKS), on_gpu.attend_prompt
    made: list[int] = []

    def watched(q_nHd: Tensor, pages: LayerPages, table: Tensor) -> Tensor:
        made.append(len(q_nHd))
        return attend(q_nHd, pages, table)

    monkeypatch.setattr(on_gpu, "attend_prompt", watched)
    monkeypatch.setattr(on_gpu, "sizes_up_to", lambda tokens: (64,))
    forward.capture_prompts(1500)
    assert made == [1024, 1152, 1280, 1408] and list(forward.with_prompts.captured) == [64]


def test_what_an_earlier_sequence_left_is_not_attended_to(on_gpu: ModuleType) -> None:
    """A prompt of 20 tokens in two blocks, at the length of 128."""
    generator = torch.Generator().manual_seed(3)
    keys, values, queries = (
        torch.randn(size, generator=generator).half()
        for size in ((4, 16, 2, 8), (4, 16, 2, 8), (20, 4, 8))
    )
    for left in (keys, values):
        left[2, 4:] = float("nan")
    pages, table = LayerPages(keys, values), torch.tensor([3] + [2] * 7)
    k_LKd, v_LKv = (each[:20] for each in pages.read(table[:2], queries.dtype))
    info = AttentionInfo(torch.arange(20)[None], None, None)
    expected = attend_sequence(queries, k_LKd, v_LKv, info, 0)
    found = on_gpu.attend_prompt(queries, pages, table)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    assert keys[2, 4:].isnan().all(), "pages stay as they are"
