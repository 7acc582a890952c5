"""The plain decoder: names, loss, slices, masks, local widths, compiling."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small import DEEPSEEK, GPT, LLAMA, MOE, batch_of, filled, gradients
from torch import nn

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.weight_table import buffers, by_name, weights
from fivefold.core.model import presets as models
from fivefold.core.model.shape import Rope, Shape
from fivefold.model.batch import AttentionInfo, TokenBatch
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.documents import Documents
from fivefold.model.layers import rotary_frequencies, rotate

F64 = torch.float64
QWEN3 = replace(LLAMA, qk_norm="head", head_dim=8)


def logits_of(decoder: Decoder, batch: TokenBatch) -> torch.Tensor:
    """Through a head that returns what it would take the loss of."""
    assert decoder.head is not None
    loss = decoder.head.cross_entropy
    decoder.head.cross_entropy = lambda logits, labels: logits
    logits = decoder(batch.tokens, batch)
    decoder.head.cross_entropy = loss
    return logits.unflatten(0, batch.tokens.shape)


BUILT = ["llama-3.1-405b", "gpt2-xl", "qwen2-7b", "qwen3-4b", "tiny-moe", "qwen2-57b-a14b"]
BUILT += ["olmoe-1b-7b", "deepseek-v2-lite", "deepseek-v3"]


@pytest.mark.parametrize("name", BUILT)
def test_parameters_are_those_of_the_table(name: str) -> None:
    shape = models.load(name)
    decoder = from_config(shape, device="meta", dtype=torch.bfloat16)
    ours = [(name, tuple(each.shape)) for name, each in decoder.named_parameters()]
    assert ours == [(one.name, one.shape) for one in weights(shape)]
    kept = [(name, tuple(each.shape)) for name, each in decoder.named_buffers()]
    assert kept == [(one.name, one.shape) for one in buffers(shape)]
    assert all(each.dtype == torch.float32 for each in decoder.buffers())
    assert all(each.is_meta and each.dtype == torch.bfloat16 for each in decoder.parameters())


def test_what_the_table_refuses_cannot_be_built() -> None:
    with pytest.raises(FivefoldError, match="alibi"):
        from_config(replace(LLAMA, positions="alibi"), device="meta")


@pytest.mark.parametrize("shape", [LLAMA, GPT, QWEN3], ids=lambda shape: shape.name)
def test_the_loss_is_the_sum_over_counted_tokens(shape: Shape) -> None:
    decoder, batch = filled(shape), batch_of(shape)
    log_odds = logits_of(decoder, batch).log_softmax(-1)
    by_hand = sum(
        -log_odds[row, i, label]
        for row in range(2)
        for i, label in enumerate(batch.labels[row].tolist())
        if label != -100
    )
    loss = decoder(batch.tokens, batch)
    assert loss.shape == () and loss.dtype == F64
    torch.testing.assert_close(loss, by_hand, rtol=1e-13, atol=0)


def test_a_batch_without_a_counted_token_has_no_loss_and_zero_gradients() -> None:
    batch = batch_of(LLAMA)
    empty = replace(batch, labels=torch.full_like(batch.labels, -100))
    found = gradients(filled(LLAMA), empty)
    assert len(found) == len(weights(LLAMA))
    assert all(grad.count_nonzero() == 0 for grad in found.values())


def test_the_loss_of_a_narrow_model_is_float32() -> None:
    batch = batch_of(LLAMA)
    assert filled(LLAMA, torch.bfloat16)(batch.tokens, batch).dtype == torch.float32


TIED_AHEAD = replace(DEEPSEEK, name="tied", tied=True, mtp=2)


@pytest.mark.parametrize(
    "shape", [LLAMA, GPT, MOE, DEEPSEEK, TIED_AHEAD], ids=lambda shape: shape.name
)
def test_slices_joined_are_the_whole_to_the_bit(shape: Shape) -> None:
    whole, batch = filled(shape), batch_of(shape)
    x = batch.tokens
    for layers in (range(1), range(1, shape.layers)):
        stage = from_config(shape, dtype=F64, layers=layers)
        own = whole.state_dict()
        own["mtp.embed.weight"] = own["embed.weight"]
        stage.load_state_dict({name: own[name] for name in stage.state_dict()})
        x = stage(x, batch)
    assert torch.equal(x, whole(batch.tokens, batch))


def test_a_slice_holds_the_ends_it_reaches_under_global_names() -> None:
    middle = from_config(LLAMA, layers=range(1, 3), device="meta")
    assert middle.embed is None and middle.norm is None and middle.head is None
    assert {name.split(".")[1] for name, _ in middle.named_parameters()} == {"1", "2"}
    last = from_config(replace(LLAMA, tied=True), layers=range(3, 4), device="meta")
    assert {"head.weight", "norm.weight"} <= {name for name, _ in last.named_parameters()}


def test_a_tied_head_is_the_embedding() -> None:
    decoder = from_config(GPT)
    assert decoder.head is not None and decoder.embed is not None
    assert decoder.head.weight is decoder.embed.weight


def test_no_token_sees_a_later_one() -> None:
    decoder, batch = filled(LLAMA), batch_of(LLAMA)
    changed = batch.tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % LLAMA.vocab
    same = logits_of(decoder, batch) == logits_of(decoder, replace(batch, tokens=changed))
    assert same[:, :9].all() and not same[:, 9:].any(dim=-1).all()


LONGROPE = Rope("longrope", 4.0, 8, short=(1.0, 1.5, 2.0), long=(3.0, 5.0, 7.0))


@pytest.mark.parametrize("rope", [None, LONGROPE])  # the second document has outgrown it
def test_packed_documents_are_as_if_alone(rope: Rope | None) -> None:
    """Two documents in a row, positions restarting, against each in a row of its own."""
    decoder, batch = filled(replace(LLAMA, rope=rope)), batch_of(LLAMA, rows=1, seq=16)
    documents = torch.tensor([[0] * 6 + [1] * 10])
    positions = torch.tensor([[*range(6), *range(10)]])
    both = replace(batch, documents=Documents.of(documents), positions=positions)
    packed = logits_of(decoder, both)
    for part in (slice(0, 6), slice(6, 16)):
        seq = part.stop - part.start
        tokens = batch.tokens[:, part]
        alone = TokenBatch(tokens, tokens, torch.arange(seq)[None])
        torch.testing.assert_close(packed[:, part], logits_of(decoder, alone), rtol=0, atol=1e-12)


def test_a_window_hides_older_keys() -> None:
    """With one layer, token 9 of a window of 4 depends on tokens 6 to 9 and on no other."""
    decoder = filled(replace(LLAMA, layers=1, window=4))
    batch = batch_of(LLAMA, rows=1)
    before = logits_of(decoder, batch)[0, 9]
    for i in range(16):
        changed = batch.tokens.clone()
        changed[:, i] = (changed[:, i] + 1) % LLAMA.vocab
        after = logits_of(decoder, replace(batch, tokens=changed))[0, 9]
        assert torch.equal(before, after) == (i not in (6, 7, 8, 9))


def test_a_window_as_long_as_the_sequence_is_plain_causal_attention() -> None:
    decoder = from_config(replace(LLAMA, window=16))
    assert decoder.context(batch_of(LLAMA, seq=16), F64).attention.documents is None
    limited = decoder.context(batch_of(LLAMA, seq=17), F64).attention.documents
    assert limited is not None and limited.starts == ((0,), (0,))


def test_one_document_a_row_is_plain_causal_attention() -> None:
    decoder = from_config(LLAMA)
    for numbers, plain in (([[3] * 8, [5] * 8], True), ([[3] * 8, [5] * 7 + [6]], False)):
        batch = batch_of(LLAMA, seq=8, documents=torch.tensor(numbers))
        assert (decoder.context(batch, F64).attention.documents is None) == plain


def test_rotation_turns_pairs_by_position_times_frequency() -> None:
    shape = replace(LLAMA, head_dim=4, rope_theta=100.0)  # frequencies 1 and 1/10
    decoder = from_config(shape, dtype=F64)
    context = decoder.context(batch_of(shape, seq=4), F64)
    assert context.rotary is not None
    x = torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=F64).expand(2, 4, 1, 4)
    at_3 = rotate(x, *context.rotary)[0, 3, 0]
    by_hand = [math.cos(3), 2 * math.cos(0.3), math.sin(3), 2 * math.sin(0.3)]
    torch.testing.assert_close(at_3, torch.tensor(by_hand, dtype=F64), rtol=1e-14, atol=0)


def test_llama3_stretching_by_hand() -> None:
    """Frequencies 1, 1/10, 1/100, 1/1000; 1000 tokens turn 159, 15.9, 1.59 and 0.159 times."""
    rope = Rope("llama3", factor=8.0, original_seq=1000, low_freq=1.0, high_freq=4.0)
    shape = replace(LLAMA, head_dim=8, rope_theta=1e4, rope=rope)
    got = rotary_frequencies(shape, F64, torch.device("cpu"))
    kept = (1000 / 100 / (2 * math.pi) - 1) / 3
    by_hand = [1.0, 0.1, (1 - kept) * 0.01 / 8 + kept * 0.01, 0.001 / 8]
    torch.testing.assert_close(got, torch.tensor(by_hand, dtype=F64), rtol=1e-13, atol=0)


def test_linear_stretching_is_slower_turning() -> None:
    stretched = replace(LLAMA, rope=Rope("linear", factor=4.0, original_seq=16))
    cpu = torch.device("cpu")
    plain = rotary_frequencies(LLAMA, F64, cpu)
    torch.testing.assert_close(rotary_frequencies(stretched, F64, cpu) * 4, plain)


@pytest.mark.parametrize(("seq", "factors"), [(8, LONGROPE.short), (9, LONGROPE.long)])
def test_longrope_by_hand(seq: int, factors: tuple[float, ...]) -> None:
    shape = replace(LLAMA, rope=LONGROPE, rope_theta=1000.0)  # frequencies 1, 1/10, 1/100
    decoder = from_config(shape, dtype=F64)
    rotary = decoder.context(batch_of(shape, seq=seq), F64).rotary
    assert rotary is not None
    scale = math.sqrt(1 + math.log(4) / math.log(8))
    by_hand = [scale * math.cos(5 * 0.1**i / each) for i, each in enumerate(factors)]
    expected = torch.tensor(by_hand, dtype=F64)
    torch.testing.assert_close(rotary[0][1, 5, 0], expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("shape", [LLAMA, QWEN3, replace(GPT, tied=False)])
def test_attention_runs_on_a_share_of_its_heads(shape: Shape) -> None:
    """Two halves of the heads, each with its own pieces, add up to the whole."""
    whole = filled(shape)
    batch = batch_of(shape)
    x = torch.randn(2, 16, shape.width, dtype=F64)
    context = whole.context(batch, F64)
    expected = whole.blocks["0"].attention(x, context)
    total = torch.zeros_like(expected)
    for half in range(2):
        attention = filled(shape).blocks["0"].attention
        for name in ("q", "k", "v"):
            part = getattr(attention, name)
            part.weight = nn.Parameter(part.weight.chunk(2, dim=0)[half])
            if part.bias is not None:
                part.bias = nn.Parameter(part.bias.chunk(2)[half])
        attention.out.weight = nn.Parameter(attention.out.weight.chunk(2, dim=1)[half])
        if half and attention.out.bias is not None:
            attention.out.bias = None
        total += attention(x, context)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-13)


def test_the_kernel_can_be_exchanged() -> None:
    """A kernel written out by hand gives what torch's own gives."""

    def by_hand(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, info: AttentionInfo
    ) -> torch.Tensor:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1) @ v

    decoder, batch = filled(LLAMA), batch_of(LLAMA)
    expected = decoder(batch.tokens, batch)
    for block in decoder.blocks.values():
        block.attention.kernel = by_hand
    torch.testing.assert_close(decoder(batch.tokens, batch), expected, rtol=1e-13, atol=0)


def test_every_name_has_a_weight() -> None:
    for shape in (replace(GPT, layers=3), DEEPSEEK, TIED_AHEAD):
        last = from_config(shape, layers=range(2, 3), device="meta")
        assert set(dict(last.named_parameters())) <= set(by_name(shape))
