"""Multi-token prediction: what lies ahead of a token, and the loss of predicting it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import DEEPSEEK, LLAMA, batch_of, filled, gradients
from torch import Tensor

from fivefold.core.layout.weight_table import weights
from fivefold.core.model.recompute import Recompute
from fivefold.core.model.shape import Shape
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.data.batches import samples
from fivefold.model.batch import NOT_COUNTED, TokenBatch, look_ahead
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.documents import Documents
from fivefold.model.recompute import apply_recompute
from fivefold.parallel.composition import compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import evaluate

N = -100
TWO = replace(LLAMA, name="two-ahead", mtp=2)
TIED = replace(TWO, name="tied", tied=True)


def batch(documents: list[int] | None = None) -> TokenBatch:
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]])
    labels = torch.tensor([[11, 12, N, 14, 15, 16]])
    told = None if documents is None else Documents.of(torch.tensor([documents]))
    return TokenBatch(tokens, labels, torch.arange(6)[None], told)


def test_what_lies_ahead_by_hand() -> None:
    (tokens, labels), (further, later) = look_ahead(batch(), 2).ahead
    assert tokens.tolist() == [[11, 12, 13, 14, 15, 0]]
    assert labels.tolist() == [[12, N, 14, 15, 16, N]]
    assert further.tolist() == [[12, 13, 14, 15, 0, 0]]
    assert later.tolist() == [[N, 14, 15, 16, N, N]]


def test_nothing_lies_ahead_in_another_document() -> None:
    (tokens, labels), (further, later) = look_ahead(batch([0, 0, 0, 1, 1, 1]), 2).ahead
    assert tokens.tolist() == [[11, 12, 0, 14, 15, 0]]
    assert labels.tolist() == [[12, N, N, 15, 16, N]]
    assert further.tolist() == [[12, 0, 0, 15, 0, 0]]
    assert later.tolist() == [[N, N, N, 16, N, N]]


def test_nothing_lies_ahead_of_a_row_that_is_too_short() -> None:
    for tokens, labels in look_ahead(batch(), 8).ahead[5:]:
        assert tokens.eq(0).all() and labels.eq(N).all()


@pytest.mark.parametrize("shape", [TWO, TIED], ids=["two", "tied"])
def test_a_decoder_has_a_layer_for_each_token_ahead(shape: Shape) -> None:
    names = {name for name, _ in from_config(shape, device="meta").named_parameters()}
    assert names == {weight.name for weight in weights(shape)}
    depths = {name.split(".")[1] for name in names if name.startswith("mtp.")}
    assert depths == {"0", "1"}


def hidden_states(decoder: Decoder, inputs: TokenBatch) -> Tensor:
    """What the head sees."""
    seen: list[Tensor] = []
    handle = decoder.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    decoder(inputs.tokens, inputs)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("shape", [TWO, TIED, DEEPSEEK], ids=lambda shape: shape.name)
def test_the_loss_by_hand(shape: Shape) -> None:
    decoder, inputs = filled(shape), batch_of(shape)
    total = decoder(inputs.tokens, inputs)
    decoder.eval()
    main = decoder(inputs.tokens, inputs)
    decoder.train()
    x = hidden_states(decoder, inputs)
    context = decoder.context(inputs, torch.float64)
    losses = []
    for j in range(shape.mtp):
        layer, rows, seq = decoder.mtp[str(j)], *inputs.tokens.shape
        joined = torch.zeros_like(x)
        for row in range(rows):
            for i in range(seq):
                ahead = inputs.tokens[row, i + j + 1] if i + j + 1 < seq else 0
                token = layer.token_norm(decoder.embed.weight[ahead])
                state = layer.hidden_norm(x[row, i])
                joined[row, i] = layer.join.weight @ torch.cat([token, state])
        x = layer.norm(layer.block(joined, context))
        log_odds = (x @ decoder.head.weight.T).log_softmax(-1)
        counted = [
            log_odds[row, i, label]
            for row in range(rows)
            for i in range(seq - j - 1)
            if (label := inputs.labels[row, i + j + 1].item()) != N
        ]
        losses.append(-sum(counted))
    expected = main + 0.3 * sum(losses) / shape.mtp
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_every_weight_has_a_gradient_also_when_recomputed(kind: str) -> None:
    inputs = batch_of(DEEPSEEK)
    found = gradients(filled(DEEPSEEK), inputs)
    assert found.keys() == {one.name for one in weights(DEEPSEEK)}
    assert all(grad.count_nonzero() for name, grad in found.items() if name.startswith("mtp."))
    decoder = filled(DEEPSEEK)
    apply_recompute(decoder, Recompute.parse(kind))
    again = gradients(decoder, inputs)
    assert all(torch.equal(again[name], grad) for name, grad in found.items())


def test_no_prediction_uses_what_it_predicts() -> None:
    """One token further ahead, the first place that sees token 9 is 8, which predicts token 10."""
    decoder, inputs = filled(replace(TWO, mtp=1)), batch_of(LLAMA, rows=1)
    seen: list[Tensor] = []
    decoder.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    changed = inputs.tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % LLAMA.vocab
    for tokens in (inputs.tokens, changed):
        decoder(tokens, look_ahead(replace(inputs, tokens=tokens), 1))
    same = (seen[1] == seen[3]).all(dim=-1)[0]
    assert same[:8].all() and not same[8:].any()


def test_training_needs_the_tokens_ahead() -> None:
    decoder, inputs = filled(DEEPSEEK), replace(batch_of(DEEPSEEK), ahead=())
    with pytest.raises(AssertionError, match="look_ahead"):
        decoder(inputs.tokens, inputs)
    decoder.eval()
    decoder(inputs.tokens, inputs)


def test_evaluation_counts_the_next_token_only() -> None:
    changes = {"layers": "2", "mtp": "1", "dropout": "0.3"}
    plan = resolve(PlanOptions("tiny-moe", set=changes, microbatches=1), small=True)
    job = compose(plan, Mesh.of(plan, torch.device("cpu")), seed=0, dtype=torch.float64)
    drawn = samples(plan.batch, plan.shape.vocab, 0, 0, drops=True).as_batch()
    total, tokens = evaluate(job, [drawn])
    model = job.chunks[0].model
    assert model.training and tokens == (drawn.labels != NOT_COUNTED).sum()
    with torch.no_grad():
        more = model(drawn.tokens, look_ahead(replace(drawn, keys=None), 1))
        model.eval()
        plain = model(drawn.tokens, drawn)
    torch.testing.assert_close(total, plain, rtol=1e-14, atol=0)
    assert more > 1.2 * plain
