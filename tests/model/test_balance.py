"""Balancing: losses, loads, capacities and biases, against numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small import DEEPSEEK, MOE, batch_of, filled, gradients
from torch import Tensor

from fivefold.core.model.balance import Keep, parse
from fivefold.core.model.recompute import Recompute
from fivefold.core.model.shape import Shape
from fivefold.model.balance import (
    Balancer,
    LocalRows,
    attach_balancers,
    load_losses,
    slots_within_capacity,
    update_balance,
)
from fivefold.model.batch import TokenBatch
from fivefold.model.moe import OverlappedTask, Routing
from fivefold.model.recompute import apply_recompute

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


def value(
    words: str,
    num_rows: int,
    given: Routing | None = None,
    rows: LocalRows | None = None,
    load: Tensor | None = None,
) -> float:
    """The loss that is recorded in one backward."""
    given = given or routing()
    balancer = Balancer(parse(words), 3, "cpu", rows)
    if load is not None:
        balancer.set_load(load)
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
    assert value("aux:1", 2, rows=LocalRows(rows_in_unit=1)) == pytest.approx(by_hand, rel=1e-12)


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
    by_hand = [2 * (0.25 * 0.25 + 0.75 * 0.75), 2 * (0.25 * 0.9 + 0.75 * 0.1)]
    assert load_losses(scores, load).tolist() == pytest.approx(by_hand, rel=1e-12)
    # With a load for each unit, here of one token.
    loads = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=F64)
    assert load_losses(scores, loads).tolist() == pytest.approx([by_hand[0], 1.8], rel=1e-12)


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


def test_the_loss_scale_multiplies_gradients_of_losses_alone() -> None:
    """Routing weights have the loss scale of the model already."""
    given, balancer = routing(), Balancer(parse("aux-seq:1+z:1"), 3, "cpu")
    slope = torch.ones(4, 1, dtype=F64)

    def gradient(weights: Tensor) -> Tensor:
        return torch.autograd.grad(weights, given.logits, slope, retain_graph=True)[0]

    def of_losses(scale: float) -> Tensor:
        balancer.scale_losses(scale)
        return gradient(balancer(given, 2).weights) - gradient(given.weights)

    torch.testing.assert_close(of_losses(8.0), 8 * of_losses(1.0), rtol=1e-12, atol=1e-14)
    assert of_losses(1.0).abs().max() > 0.01


def test_loads_are_summed_over_ranks_whatever_other_rules_need() -> None:
    """The z-loss needs no load."""
    counts = torch.tensor([[3, 1, 0], [0, 1, 3]])
    rows = LocalRows(sum_over_ranks=lambda _: counts)
    together, load_loss = (value(words, 2, rows=rows) for words in ("aux-seq:1+z:1", "aux-seq:1"))
    assert together - value("z:1", 2) == pytest.approx(load_loss, rel=1e-12)
    assert load_loss != pytest.approx(value("aux-seq:1", 2), rel=1e-3)


def test_microbatches_share_the_loss_and_the_load_of_the_step() -> None:
    """Row by row, told the size of the step, is the same as both rows at once."""
    whole = Balancer(parse("aux-seq+z"), 3, "cpu")
    whole(routing(), 2).weights.sum().backward()
    parts = Balancer(parse("aux-seq+z"), 3, "cpu", LocalRows(tokens_in_step=4))
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
        rows = LocalRows(
            tokens_in_step=4, sum_over_ranks=lambda counts: torch.tensor([[2, 0, 0], [0, 1, 1]])
        )
        part = Balancer(parse("aux-seq"), 3, "cpu", rows)
        here = routing(SCORES[mine], EXPERTS[mine])
        part(here, 2).weights.sum().backward()
        torch.testing.assert_close(here.logits.grad, given.logits.grad[mine], rtol=1e-12, atol=0)
        shares.append(part.take()[1])
    torch.testing.assert_close(sum(shares), whole.take()[1], rtol=1e-13, atol=0)


def test_capacity_by_hand() -> None:
    """One row of four tokens with two choices: 4/3 · 2·4/4 slots, rounded up, is 3 an expert."""
    experts = torch.tensor([[[0, 1], [0, 2], [0, 1], [0, 3]]])
    scores = torch.tensor([[[0.4, 0.3], [0.6, 0.2], [0.5, 0.1], [0.9, 0.05]]], dtype=F64)
    (rule,) = parse(f"capacity:{4 / 3}")
    assert rule.capacity(seq=4, top_k=2, num_experts=4) == 3
    kept = slots_within_capacity(experts, scores, 3, "probability", 4)
    assert kept[0, :, 0].tolist() == [False, True, True, True] and kept[0, :, 1].all()
    kept = slots_within_capacity(experts, scores, 3, "position", 4)
    assert kept[0, :, 0].tolist() == [True, True, True, False] and kept[0, :, 1].all()
    # Equal scores: the earlier tokens stay.
    kept = slots_within_capacity(experts, torch.ones_like(scores), 2, "probability", 4)
    assert kept[0, :, 0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("keep", ["probability", "position"])
def test_capacity_counts_each_row_by_itself(keep: Keep) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(5, 12, 6, generator=generator, dtype=F64)
    top = scores.topk(2, dim=-1)
    kept = slots_within_capacity(top.indices, top.values, 4, keep, 6)
    for row in range(5):
        alone = top.indices[row : row + 1], top.values[row : row + 1]
        assert torch.equal(kept[row], slots_within_capacity(*alone, 4, keep, 6)[0])
        for expert in range(6):
            mine = top.indices[row] == expert
            stay = mine & kept[row]
            assert stay.sum() == min(4, mine.sum())
            lost = mine & ~kept[row]
            if keep == "probability" and lost.any():
                assert top.values[row][stay].min() >= top.values[row][lost].max()
            if keep == "position" and lost.any():
                assert stay.nonzero()[:, 0].max() <= lost.nonzero()[:, 0].min()


def test_dropped_slots_go_nowhere_weigh_nothing_and_still_count_as_load() -> None:
    balancer = Balancer(parse("capacity:0.75"), 3, "cpu")  # one slot a row and expert
    out = balancer(routing(), 2)
    assert out.experts[:, 0].tolist() == [3, 0, 1, 2]
    assert out.drops and out.capacity is None
    # Of row 0 the second token wants expert 0 more.
    torch.testing.assert_close(out.weights[:, 0], torch.tensor([0, 0.7, 0.6, 0.6], dtype=F64))
    out.weights.sum().backward()
    assert balancer.take()[0].tolist() == [2, 1, 1]


def test_padding_has_no_loss_no_load_and_no_room() -> None:
    """Rows of one token, padded to two."""
    real = torch.tensor([True, False])
    # Of tokens 0 and 2: f = (1, 0, 0) and (0, 1, 0), P = 0.5 and 0.6.
    rows = LocalRows(tokens_in_step=2, real=real, seq=1)
    assert value("aux-seq:1", 2, rows=rows) == pytest.approx(3 * (0.5 + 0.6) / 2, rel=1e-12)
    given = routing()
    rows = replace(
        rows,
        gather_tokens=lambda of_tokens: of_tokens[:, :1],  # else padding would take the room
        local_tokens=lambda kept: kept.expand(2, 2, 1) & real[:, None],
    )
    balancer = Balancer(parse("z:1+capacity:3"), 3, "cpu", rows)
    out = balancer(given, 2)
    assert out.experts[:, 0].tolist() == [0, 3, 1, 3]
    out.weights.sum().backward()
    assert balancer.take()[0].tolist() == [1, 1, 0]
    assert given.logits.grad is not None
    assert given.logits.grad.any(1).tolist() == [True, False, True, False]


def test_ranks_that_share_a_row_decide_what_to_drop_as_one_does() -> None:
    """One row of four tokens; each rank has two of them, not side by side, and is told the rest."""
    experts = torch.tensor([[0], [0], [1], [0]])
    whole = Balancer(parse("capacity:0.75"), 3, "cpu")(routing(SCORES, experts), 1).experts
    assert whole[:, 0].tolist() == [3, 0, 1, 3], "of expert 0 the most probable stays"
    for mine in ([0, 3], [1, 2]):
        here = routing(SCORES[mine], experts[mine])
        known = {torch.int64: experts[None], F64: SCORES.gather(1, experts)[None]}
        rows = LocalRows(
            seq=4,
            gather_tokens=lambda some, known=known: known[some.dtype],
            local_tokens=lambda kept, mine=mine: kept[:, mine],
        )
        for words, room in (("capacity:0.75", None), ("capacity-pad:0.75", 1)):
            found = Balancer(parse(words), 3, "cpu", rows)(here, 1)
            assert found.experts.tolist() == whole[mine].tolist() and found.capacity == room


def test_padding_gives_room_for_all_that_may_come() -> None:
    # ⌈0.75·1·2/3⌉ = 1 slot in each of two rows; ⌈9·1·2/3⌉ = 6 slots, but a row has two tokens.
    for words, room in (("capacity-pad:0.75", 2), ("capacity-pad:9", 4)):
        assert Balancer(parse(words), 3, "cpu")(routing(), 2).capacity == room


def test_a_dropped_token_leaves_no_trace_in_the_experts() -> None:
    decoder = filled(MOE)
    moe = decoder.get_submodule("blocks.1.mlp")
    attach_balancers(decoder, parse("capacity:0.000001"), "cpu")  # one slot a row and expert
    x = torch.randn(1, 16, MOE.width, dtype=F64, requires_grad=True)
    routed = moe.balance(moe.router(x[0]), 1)
    lost = (routed.weights == 0).all(1)
    assert lost.any() and not lost.all()
    y = moe.dispatch(x[0], routed, moe.experts, OverlappedTask(lambda: None))
    assert y[lost].count_nonzero() == 0 and y[~lost].ne(0).all()


@pytest.mark.parametrize("kind", ["none", "selective", "experts", "full"])
@pytest.mark.parametrize("shape", [MOE, DEEPSEEK], ids=["moe", "deepseek"])
def test_recomputation_records_once_and_gives_the_same_gradients(shape: Shape, kind: str) -> None:
    plain, again, batch = filled(shape), filled(shape), batch_of(shape)
    apply_recompute(again, Recompute.parse(kind))
    rules = parse("aux-seq:0.1+z:0.1+capacity:1.2")
    found = []
    for decoder in (plain, again):
        balancers = attach_balancers(decoder, rules, "cpu")
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
    balancers = attach_balancers(told, parse("none"), "cpu")
    expected = gradients(plain, batch)
    for name, grad in gradients(told, batch).items():
        assert torch.equal(grad, expected[name])
    assert all(each.take()[0].sum() == 64 for each in balancers.values())


def test_the_loss_reaches_the_router_and_what_lies_below_but_no_expert() -> None:
    plain, told, batch = filled(MOE), filled(MOE), batch_of(MOE)
    attach_balancers(told, parse("aux:1"), "cpu")
    expected, found = gradients(plain, batch), gradients(told, batch)
    changed = {name for name in found if not torch.equal(found[name], expected[name])}
    last = {f"blocks.3.mlp.experts.{one}.weight" for one in ("gate", "up", "down")}
    assert "blocks.3.mlp.router.weight" in changed and "embed.weight" in changed
    assert not changed & {*last, "blocks.3.mlp.shared.up.weight", "head.weight"}


def test_nothing_is_recorded_without_a_backward() -> None:
    decoder, batch = filled(MOE), batch_of(MOE)
    balancers = attach_balancers(decoder, parse("aux"), "cpu")
    with torch.no_grad():
        decoder(batch.tokens, batch)
    assert all(each.take()[0].sum() == 0 for each in balancers.values())


def test_the_bias_takes_one_step_towards_the_mean() -> None:
    mlp = filled(replace(DEEPSEEK, mtp=0)).get_submodule("blocks.2.mlp")
    rules = parse("bias:0.001")
    balancer = Balancer(rules, 8, "cpu")
    start = [0.5, 0.0, -0.5, 0.0, 1.0, 0.0, 0.0, 0.0]
    mlp.router.bias.copy_(torch.tensor(start))
    # The mean is 5; a load at the mean moves nothing.
    update_balance(mlp, balancer, rules, torch.tensor([10, 2, 4, 4, 5, 5, 5, 5], dtype=F64))
    moved = torch.tensor([0.499, 0.001, -0.499, 0.001, 1.0, 0, 0, 0])
    torch.testing.assert_close(mlp.router.bias, moved)
    by_hand = [0.25, 0.05, 0.1, 0.1, *[0.125] * 4]
    assert balancer.load is not None and balancer.load.tolist() == pytest.approx(by_hand)
    update_balance(mlp, balancer, rules, torch.full((8,), 5.0, dtype=F64))
    torch.testing.assert_close(mlp.router.bias, moved, rtol=0, atol=0)
    update_balance(mlp, balancer, parse("aux-global"), torch.arange(8, dtype=F64))
    torch.testing.assert_close(mlp.router.bias, moved, rtol=0, atol=0)
    update_balance(mlp, balancer, rules, torch.zeros(8, dtype=F64))
    assert balancer.load.tolist() == [0.0] * 8, "a step without tokens is no division by zero"


def test_the_bias_evens_the_load_without_a_gradient() -> None:
    """Twenty steps on one batch: the busiest expert of the layer loses tokens."""
    shape = replace(DEEPSEEK, mtp=0, moe=replace(DEEPSEEK.moe, groups=1, groups_kept=1))
    decoder, batch = filled(shape), batch_of(shape, rows=4)
    rules = parse("bias:0.02")
    balancer = attach_balancers(decoder, rules, "cpu")[2]

    def load(inputs: TokenBatch) -> Tensor:
        decoder(inputs.tokens, inputs).backward()
        return balancer.take()[0]

    before = load(batch)
    for _ in range(20):
        update_balance(decoder.get_submodule("blocks.2.mlp"), balancer, rules, load(batch))
    assert load(batch).max() < before.max() and load(batch).std() < 0.7 * before.std()
    assert "blocks.2.mlp.router.bias" in decoder.state_dict()
    assert "blocks.2.mlp.router.bias" not in dict(decoder.named_parameters())


def test_layers_of_prediction_ahead_are_numbered_behind_the_rest() -> None:
    assert list(attach_balancers(filled(DEEPSEEK), (), "cpu")) == [1, 2, 3]
    assert list(attach_balancers(filled(MOE), (), "cpu")) == [1, 2, 3]
