"""Balancing: losses, loads, capacities and biases, against numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small import DEEPSEEK, MOE, batch_of, filled, gradients
from torch import Tensor

from fivefold.core.balance import parse
from fivefold.core.shape import Shape
from fivefold.model.balance import Balancer, Capacity, balance, load_loss, update_bias
from fivefold.model.batch import TokenBatch
from fivefold.model.moe import Routing
from fivefold.model.recompute import apply

F64 = torch.float64
# Two rows of two tokens, three experts, one choice each: row 0 goes to expert 0 twice.
SCORES = torch.tensor(
    [[0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], dtype=F64
)
EXPERTS = torch.tensor([[0], [0], [1], [2]])


def routing(scores: Tensor = SCORES, experts: Tensor = EXPERTS) -> Routing:
    """Logits that are the logarithms of these scores."""
    logits = scores.log().requires_grad_()
    found = logits.softmax(1)
    return Routing(experts, found.gather(1, experts), found, logits)


def value(words: str, num_rows: int, given: Routing | None = None, **settings: object) -> float:
    """The loss that is recorded in one backward."""
    given = given or routing()
    balancer = Balancer(parse(words), 3, "cpu")
    for name, setting in settings.items():
        setattr(balancer, name, setting)
    balancer(given, num_rows).weights.sum().backward()
    _, losses = balancer.take()
    return losses.sum().item()


def test_the_load_loss_of_a_microbatch_by_hand() -> None:
    # f = (2, 1, 1)/4, P = (1.5, 1.3, 1.2)/4
    assert value("aux:0.5", 2) == pytest.approx(0.5 * 3 * (2 * 1.5 + 1.3 + 1.2) / 16, rel=1e-12)


def test_the_load_loss_of_sequences_by_hand() -> None:
    # Row 0: f = (1, 0, 0), P = (0.6, …); row 1: f = (0, ½, ½), P = (…, 0.4, 0.45). Their mean.
    by_hand = 3 * (0.6 + (0.4 + 0.45) / 2) / 2
    assert value("aux-seq:1", 2) == pytest.approx(by_hand, rel=1e-12)
    # A unit of one row is the sequence.
    assert value("aux:1", 2, rows_in_unit=1) == pytest.approx(by_hand, rel=1e-12)


def test_the_global_load_is_given() -> None:
    load = torch.tensor([0.2, 0.3, 0.5], dtype=F64)
    by_hand = 3 * (0.2 * 1.5 + 0.3 * 1.3 + 0.5 * 1.2) / 4
    assert value("aux-global:1", 2, load=load) == pytest.approx(by_hand, rel=1e-12)
    assert value("aux-global:1", 2) == pytest.approx(1.0), "equal loads pull nowhere"


def test_the_z_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]], dtype=F64)
    given = routing(logits.exp(), torch.tensor([[0], [1]]))
    by_hand = (math.log(3) ** 2 + math.log(math.exp(1) + math.exp(2) + math.exp(3)) ** 2) / 2
    assert value("z:0.1", 1, given) == pytest.approx(0.1 * by_hand, rel=1e-12)


def test_sigmoids_are_divided_by_their_sum() -> None:
    scores = torch.tensor([[0.2, 0.6], [0.9, 0.1]], dtype=F64)
    load = torch.tensor([[0.25, 0.75]], dtype=F64)
    by_hand = 2 * (0.25 * 0.25 + 0.75 * 0.75 + 0.25 * 0.9 + 0.75 * 0.1)
    assert load_loss(scores, load).item() == pytest.approx(by_hand, rel=1e-12)


def test_the_loss_enters_backward_with_slope_one_beside_the_weights() -> None:
    given = routing()
    balancer = Balancer(parse("aux-seq:1+z:1"), 3, "cpu")
    out = balancer(given, 2).weights
    assert torch.equal(out, given.weights)
    slope = torch.randn(4, 1, dtype=F64)
    (found,) = torch.autograd.grad(out, given.logits, slope, retain_graph=True)
    load = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]], dtype=F64)
    loss = 3 * (given.scores * load).sum() / 4 + given.logits.logsumexp(1).square().mean()
    (expected,) = torch.autograd.grad((given.weights * slope).sum() + loss, given.logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_microbatches_share_the_loss_and_the_load_of_the_step() -> None:
    """Row by row, told the size of the step, is the same as both rows at once."""
    whole = Balancer(parse("aux-seq+z"), 3, "cpu")
    whole(routing(), 2).weights.sum().backward()
    parts = Balancer(parse("aux-seq+z"), 3, "cpu")
    parts.tokens_in_step = 4
    for rows in (slice(0, 2), slice(2, 4)):
        parts(routing(SCORES[rows], EXPERTS[rows]), 1).weights.sum().backward()
    (counts, losses), (wanted, expected) = parts.take(), whole.take()
    assert counts.tolist() == wanted.tolist() == [2, 1, 1]
    torch.testing.assert_close(losses, expected, rtol=1e-13, atol=0)
    assert parts.take()[0].tolist() == [0, 0, 0], "what was taken is gone"


def test_ranks_that_share_a_row_need_only_its_load() -> None:
    """Each has one token of every row, and is told the sum of both loads."""
    whole = Balancer(parse("aux-seq"), 3, "cpu")
    given = routing()
    whole(given, 2).weights.sum().backward()
    shares = []
    for rank in range(2):
        mine = slice(rank, None, 2)
        part = Balancer(parse("aux-seq"), 3, "cpu")
        part.tokens_in_step = 4
        part.total = lambda counts: torch.tensor([[2, 0, 0], [0, 1, 1]])
        here = routing(SCORES[mine], EXPERTS[mine])
        part(here, 2).weights.sum().backward()
        torch.testing.assert_close(here.logits.grad, given.logits.grad[mine], rtol=1e-12, atol=0)
        shares.append(part.take()[1])
    torch.testing.assert_close(sum(shares), whole.take()[1], rtol=1e-13, atol=0)


def test_capacity_by_hand() -> None:
    """One row of four tokens with two choices: 4/3 · 2·4/4 slots, rounded up, is 3 an expert."""
    experts = torch.tensor([[[0, 1], [0, 2], [0, 1], [0, 3]]])
    scores = torch.tensor([[[0.4, 0.3], [0.6, 0.2], [0.5, 0.1], [0.9, 0.05]]], dtype=F64)
    assert Capacity(4 / 3, "probability", 4).room(4, 2) == 3
    kept = Capacity(4 / 3, "probability", 4)(experts, scores)
    assert kept[0, :, 0].tolist() == [False, True, True, True] and kept[0, :, 1].all()
    kept = Capacity(4 / 3, "position", 4)(experts, scores)
    assert kept[0, :, 0].tolist() == [True, True, True, False] and kept[0, :, 1].all()
    # Equal scores: the earlier tokens stay.
    kept = Capacity(1.0, "probability", 4)(experts, torch.ones_like(scores))
    assert kept[0, :, 0].tolist() == [True, True, False, False]


def test_capacity_counts_each_row_by_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(5, 12, 6, generator=generator, dtype=F64)
    top = scores.topk(2, dim=-1)
    for keep in ("probability", "position"):
        capacity = Capacity(1.0, keep, 6)
        kept = capacity(top.indices, top.values)
        for row in range(5):
            alone = capacity(top.indices[row : row + 1], top.values[row : row + 1])[0]
            assert torch.equal(kept[row], alone)
            for expert in range(6):
                mine = top.indices[row] == expert
                stay = mine & kept[row]
                assert stay.sum() == min(4, mine.sum())
                lost = mine & ~kept[row]
                if keep == "probability" and lost.any():
                    assert top.values[row][stay].min() >= top.values[row][lost].max()
                if keep == "position" and lost.any():
                    assert stay.nonzero()[:, 0].max() <= lost.nonzero()[:, 0].min()


def test_dropped_slots_weigh_nothing_and_still_count_as_load() -> None:
    balancer = Balancer(parse("capacity:0.75"), 3, "cpu")  # one slot a row and expert
    out = balancer(routing(), 2)
    # Of row 0 the second token wants expert 0 more.
    torch.testing.assert_close(out.weights[:, 0], torch.tensor([0, 0.7, 0.6, 0.6], dtype=F64))
    out.weights.sum().backward()
    assert balancer.take()[0].tolist() == [2, 1, 1]


def test_a_dropped_token_leaves_no_trace_in_the_experts() -> None:
    decoder = filled(MOE)
    moe = decoder.get_submodule("blocks.1.mlp")
    balance(decoder, parse("capacity:0.000001"))  # one slot a row and expert
    x = torch.randn(1, 16, MOE.width, dtype=F64, requires_grad=True)
    routed = moe.balance(moe.router(x[0]), 1)
    lost = (routed.weights == 0).all(1)
    assert lost.any() and not lost.all()
    y = moe.dispatch(x[0], routed, moe.experts)
    assert y[lost].count_nonzero() == 0 and y[~lost].ne(0).all()


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("shape", [MOE, DEEPSEEK], ids=["moe", "deepseek"])
def test_recomputation_records_once_and_gives_the_same_gradients(shape: Shape, kind: str) -> None:
    plain, again, batch = filled(shape), filled(shape), batch_of(shape)
    apply(again, kind)
    rules = parse("aux-seq:0.1+z:0.1+capacity:1.2")
    found = []
    for decoder in (plain, again):
        balancers = balance(decoder, rules)
        assert len(balancers) == shape.num_moe_layers + shape.mtp
        grads = gradients(decoder, batch)
        found.append((grads, {name: each.take() for name, each in balancers.items()}))
    (wanted, load), (grads, again_load) = found
    assert all(torch.equal(grads[name], grad) for name, grad in wanted.items())
    for name, (counts, losses) in load.items():
        assert counts.sum() == 32 * shape.moe.top_k and losses.gt(0).all()
        assert torch.equal(again_load[name][0], counts)
        assert torch.equal(again_load[name][1], losses)


def test_without_a_loss_gradients_are_those_of_no_balancing() -> None:
    plain, told, batch = filled(MOE), filled(MOE), batch_of(MOE)
    balancers = balance(told, parse("none"))
    expected = gradients(plain, batch)
    for name, grad in gradients(told, batch).items():
        assert torch.equal(grad, expected[name])
    assert all(each.take()[0].sum() == 64 for each in balancers.values())


def test_the_loss_reaches_the_router_and_what_lies_below_but_no_expert() -> None:
    plain, told, batch = filled(MOE), filled(MOE), batch_of(MOE)
    balance(told, parse("aux:1"))
    expected, found = gradients(plain, batch), gradients(told, batch)
    changed = {name for name in found if not torch.equal(found[name], expected[name])}
    last = {f"blocks.3.mlp.experts.{one}.weight" for one in ("gate", "up", "down")}
    assert "blocks.3.mlp.router.weight" in changed and "embed.weight" in changed
    assert not changed & {*last, "blocks.3.mlp.shared.up.weight", "head.weight"}


def test_nothing_is_recorded_without_a_backward() -> None:
    decoder, batch = filled(MOE), batch_of(MOE)
    balancers = balance(decoder, parse("aux"))
    with torch.no_grad():
        decoder(batch.tokens, batch)
    assert all(each.take()[0].sum() == 0 for each in balancers.values())


def test_the_bias_takes_one_step_towards_the_mean() -> None:
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    update_bias(bias, torch.tensor([10, 2, 4, 4], dtype=F64), rate=0.001)
    torch.testing.assert_close(bias, torch.tensor([0.499, 0.001, -0.499, 0.001]))
    # A load at the mean, 5, moves nothing.
    update_bias(bias, torch.tensor([5, 5, 5, 5]), rate=0.001)
    torch.testing.assert_close(bias, torch.tensor([0.499, 0.001, -0.499, 0.001]))


def test_the_bias_evens_the_load_without_a_gradient() -> None:
    """Twenty steps on one batch: the busiest expert of the layer loses tokens."""
    shape = replace(DEEPSEEK, mtp=0, moe=replace(DEEPSEEK.moe, groups=1, groups_kept=1))
    decoder, batch = filled(shape), batch_of(shape, rows=4)
    balancers = balance(decoder, parse("bias:0.02"))
    router, balancer = decoder.get_submodule("blocks.2.mlp.router"), balancers["blocks.2.mlp"]

    def load(inputs: TokenBatch) -> Tensor:
        decoder(inputs.tokens, inputs).backward()
        return balancer.take()[0]

    before = load(batch)
    for _ in range(20):
        update_bias(router.bias, load(batch), rate=0.02)
    assert load(batch).max() < before.max() and load(batch).std() < 0.7 * before.std()
    assert "blocks.2.mlp.router.bias" in decoder.state_dict()
    assert "blocks.2.mlp.router.bias" not in dict(decoder.named_parameters())
