"""Recomputation: the same gradients to the bit, fewer bytes kept, no product run twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import DEEPSEEK, GPT, LLAMA, MOE, batch_of, filled, gradients
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.core.shape import Shape
from fivefold.model.blocks import Recompute, apply_recompute
from fivefold.model.decoder import Decoder

KINDS: list[tuple[Recompute, int]] = [("selective", 1), ("full", 1), ("full", 2), ("full", 3)]

# Dynamo looks at .grad of every tensor it meets, and torch warns of that.
DYNAMO_LOOKS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def recomputing(shape: Shape, kind: Recompute, blocks: int = 1, dropout: float = 0.0) -> Decoder:
    decoder = filled(shape, dropout=dropout)
    apply_recompute(decoder, kind, blocks)
    return decoder


class Made(TorchDispatchMode):
    """Remembers the storage of every tensor an operator returns, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def alive(self) -> int:
        return sum(size for each, size in self.storages.items() if not each.expired())


def kept_bytes(decoder: Decoder, shape: Shape) -> int:
    """Bytes that live from forward to backward, whoever keeps them; views of weights left out."""
    batch = batch_of(shape, seq=32)
    weights = {StorageWeakRef(each.untyped_storage()) for each in decoder.parameters()}
    with Made() as made:
        loss = decoder(batch.tokens, batch)
    for each in weights:
        made.storages.pop(each, None)
    total = made.alive()
    loss.backward()
    return total


class Calls(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times[func.__name__] = self.times.get(func.__name__, 0) + 1
        return func(*args, **(kwargs or {}))


def calls(decoder: Decoder, shape: Shape) -> dict[str, int]:
    with Calls() as counted:
        gradients(decoder, batch_of(shape))
    return counted.times


@pytest.mark.parametrize(("kind", "blocks"), KINDS)
@pytest.mark.parametrize("shape", [LLAMA, GPT, replace(LLAMA, window=5), MOE, DEEPSEEK])
def test_same_gradients_to_the_bit(shape: Shape, kind: Recompute, blocks: int) -> None:
    batch = batch_of(shape)
    plain = gradients(filled(shape), batch)
    again = gradients(recomputing(shape, kind, blocks), batch)
    assert plain.keys() == again.keys()
    assert all(torch.equal(again[name], grad) for name, grad in plain.items())


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_dropout_drops_the_same_in_the_second_run(kind: Recompute) -> None:
    found = []
    for each in ("none", kind):
        decoder = recomputing(GPT, each, dropout=0.3)
        torch.manual_seed(7)
        found.append(gradients(decoder, batch_of(GPT)))
    assert all(torch.equal(found[1][name], grad) for name, grad in found[0].items())


def test_longer_segments_keep_fewer_bytes() -> None:
    deep = replace(LLAMA, layers=8)
    one, two, four = (kept_bytes(recomputing(deep, "full", k), deep) for k in (1, 2, 4))
    none = kept_bytes(filled(deep), deep)
    width_bytes = 2 * 32 * deep.width * 8  # one hidden state, (2, 32, width) in float64
    assert one - two == 4 * width_bytes  # 8 inputs of segments become 4,
    assert two - four == 2 * width_bytes  # and 4 become 2
    assert none > 5 * one


def test_selective_runs_no_product_and_no_attention_twice() -> None:
    plain, selective = calls(filled(LLAMA), LLAMA), calls(recomputing(LLAMA, "selective"), LLAMA)
    full = calls(recomputing(LLAMA, "full"), LLAMA)
    attention = "_scaled_dot_product_flash_attention_for_cpu.default"
    for product in ("mm.default", attention):
        assert selective[product] == plain[product] < full[product]
    assert full[attention] == 2 * LLAMA.layers
    assert selective["silu.default"] == 2 * plain["silu.default"] == 2 * LLAMA.layers


def test_selective_keeps_fewer_bytes_than_none_and_more_than_full() -> None:
    kinds: list[Recompute] = ["full", "selective", "none"]
    full, selective, none = (kept_bytes(recomputing(LLAMA, kind), LLAMA) for kind in kinds)
    assert full < selective < none
    # Between full and selective lie just the outputs of products and attention, and its
    # log-sum-exp: per token and block, in float64.
    products = 3 * LLAMA.width + 2 * LLAMA.width // 2 + 2 * LLAMA.ffn + LLAMA.width
    assert selective - full == LLAMA.layers * 64 * 8 * (products + LLAMA.heads)


@DYNAMO_LOOKS
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_a_recomputed_block_still_compiles_as_one_graph(kind: Recompute) -> None:
    torch._dynamo.reset()
    batch = batch_of(LLAMA)
    expected = gradients(filled(LLAMA), batch)
    decoder = recomputing(LLAMA, kind)
    for block in decoder.all_blocks():
        block.run = torch.compile(block.run, fullgraph=True, backend="aot_eager")
    for name, grad in gradients(decoder, batch).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)
