"""Recomputation: the same gradients to the bit, fewer bytes kept, no product run twice."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import DEEPSEEK, GPT, LLAMA, MOE, batch_of, filled, gradients
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.core.model.recompute import MODULES, Recompute
from fivefold.core.model.shape import Shape
from fivefold.model.decoder import Decoder
from fivefold.model.dropout import token_keys
from fivefold.model.kept_attention import KeptCalls, kept_once
from fivefold.model.recompute import apply_recompute

RULES = (*MODULES, "selective", "norm+act+attention", "attention+mlp+experts", "full", "full:2")
KEPT = ("full-but-attention", "full:2-but-attention")
SHAPES = [LLAMA, GPT, replace(LLAMA, window=5), MOE, DEEPSEEK]


def recomputing(shape: Shape, rule: str) -> Decoder:
    decoder = filled(shape)
    apply_recompute(decoder, Recompute.parse(rule))
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


@pytest.mark.sample(16)
@pytest.mark.parametrize("rule", (*RULES, *KEPT))
@pytest.mark.parametrize("shape", SHAPES)
def test_same_gradients_to_the_bit(shape: Shape, rule: str) -> None:
    batch = batch_of(shape)
    plain = gradients(filled(shape), batch)
    again = gradients(recomputing(shape, rule), batch)
    assert plain.keys() == again.keys()
    assert all(torch.equal(again[name], grad) for name, grad in plain.items())


@pytest.mark.parametrize("kind", ["selective", "attention+mlp", "full", "full-but-attention"])
def test_dropout_drops_the_same_in_the_second_run(kind: str) -> None:
    shape = replace(GPT, dropout=0.3, attention_dropout=0.2)
    batch = batch_of(shape)
    batch = replace(batch, keys=token_keys(7, torch.arange(2), batch.tokens.shape[1]))
    found = [gradients(recomputing(shape, each), batch) for each in ("none", kind)]
    assert all(torch.equal(found[1][name], grad) for name, grad in found[0].items())


def test_longer_segments_keep_fewer_bytes() -> None:
    deep = replace(LLAMA, layers=8)
    one, two, four = (kept_bytes(recomputing(deep, f"full:{k}"), deep) for k in (1, 2, 4))
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
    # Once in forward, once in the kernel of its backward; and once more where it is made again.
    assert plain["silu.default"] == 2 * LLAMA.layers
    assert selective["silu.default"] == 3 * LLAMA.layers


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_attention_that_is_kept_runs_once(shape: Shape) -> None:
    """Its result and log-sum-exp are kept, and nothing else beside what `full` keeps. (On CPUs a
    kernel may save repeated keys and values.)"""
    shape = replace(shape, kv_heads=shape.heads)
    kernel = "_scaled_dot_product_flash_attention_for_cpu.default"
    plain, kept_once = (calls(recomputing(shape, each), shape) for each in ("none", KEPT[0]))
    assert kept_once[kernel] == plain[kernel]
    assert kept_once["mm.default"] == calls(recomputing(shape, "full"), shape)["mm.default"]
    more = kept(shape, "full") - kept(shape, "full-but-attention")
    assert more == shape.heads * shape.head_dim + shape.heads


def kept(shape: Shape, rule: str) -> float:
    """What a rule saves less than none, in numbers of one token of one block."""
    saved = kept_bytes(filled(shape), shape) - kept_bytes(recomputing(shape, rule), shape)
    return saved / (shape.layers * 64 * 8)


def test_each_module_saves_its_own() -> None:
    """Tokens are 64, numbers 8 bytes; attention also keeps its log-sum-exp."""
    width, ffn = LLAMA.width, LLAMA.ffn
    inside = 4 * width + LLAMA.heads  # queries, keys and values of every head, and the result
    assert kept(LLAMA, "norm") == 2 * width
    assert kept(LLAMA, "act") == ffn
    assert kept(LLAMA, "attention") == inside
    assert kept(LLAMA, "mlp") == 3 * ffn
    assert kept(LLAMA, "selective") == 2 * width + ffn
    assert kept(LLAMA, "norm+attention+mlp") == 2 * width + inside + 3 * ffn
    # What is left is the residual between attention and MLP.
    assert kept(LLAMA, "full") == 3 * width + inside + 3 * ffn


@pytest.mark.parametrize("shape", SHAPES)
def test_rules_are_ordered_as_they_should_be(shape: Shape) -> None:
    found = {rule: kept_bytes(recomputing(shape, rule), shape) for rule in ("none", *RULES)}
    modules = [found[rule] for rule in ("norm", "act", "attention")]
    assert all(found["selective"] < one < found["none"] for one in modules[:2])
    assert found["full"] < min(modules) and max(modules) < found["none"]
    assert found["full:2"] < found["full"] < found["attention+mlp+experts"] < found["none"]
    assert found["norm+act+attention"] < found["selective"]


def test_inputs_of_a_kept_call_go_after_its_backward() -> None:
    """What the second run has made is freed then, though the segment still knows its calls."""
    calls: KeptCalls = {}
    info = SimpleNamespace(kept_calls=calls)
    kernel = kept_once(lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v), 0)
    first = tuple(torch.randn(1, 2, 8, 16).requires_grad_() for _ in range(3))
    out = kernel(*first, info)
    second = tuple(tensor.detach().clone() for tensor in first)
    assert torch.equal(kernel(*second, info), out)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in second]
    del second
    assert not any(storage.expired() for storage in storages)
    out.sum().backward()
    assert calls and all(storage.expired() for storage in storages)
