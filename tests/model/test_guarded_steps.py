"""Steps that are skipped: what they leave as it was, what bounds them, and who counts them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.data.batches import samples
from fivefold.model.batch import TokenBatch
from fivefold.optim.optimizer import LossScale
from fivefold.parallel.composition import compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import Guard, Reading, StepOutcome, squared_norm, step, sum_copies, updater_of
from fivefold.train.callbacks.stop import StopCallback
from fivefold.train.checkpoint.folders import Facts
from fivefold.train.state import Progress

SCALE = 2.0**10
UNBOUNDED = (float("inf"), float("inf"))


class Trained:
    """A small model with experts and a router bias, on one rank."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        changes = {"layers": "1", "moe.bias": "true", "moe.first_dense": "0"}
        options = PlanOptions("tiny-moe", layout="dp=1", seq=8, balance="bias:0.5", set=changes)
        self.plan = resolve(options, small=True)
        self.job = compose(
            self.plan, Mesh.of(self.plan, torch.device("cpu")), seed=0, dtype=torch.float32
        )
        self.updater = updater_of(self.job, recipe or Recipe())

    def step(
        self, number: int, guard: Guard, weights: Sequence[float] | None = None
    ) -> StepOutcome:
        return step(self.job, self.updater, self.batches(number), 1.0, guard, weights)

    def batches(self, number: int) -> list[TokenBatch]:
        return samples(self.plan.batch, self.plan.shape.vocab, 0, number).of(0)

    def state(self) -> list[Tensor | None]:
        """Weights, the router's bias, and the load that the next step balances by."""
        (layer,) = self.job.balancing.layers
        weights = [each.tensor.detach().clone() for each in self.job.owned]
        return [*weights, layer.mlp.router.bias.clone(), layer.balancer.load]


@pytest.mark.parametrize("bound", [(0.0, float("inf")), (float("inf"), 0.0)], ids=str)
def test_a_skipped_step_leaves_weights_bias_and_load_as_they_were(
    bound: tuple[float, float],
) -> None:
    trained = Trained()
    assert not trained.step(0, Guard(bound=UNBOUNDED)).skipped
    before = trained.state()
    assert before[-1] is not None and before[-2] is not None and before[-2].any()
    outcome = trained.step(1, Guard(bound=bound))
    assert outcome.skipped and outcome.load is None
    for one, other in zip(before, trained.state(), strict=True):
        assert one is not None and other is not None and one.equal(other)
    assert not trained.step(1, Guard(bound=UNBOUNDED)).skipped
    assert not any(
        one is not None and other is not None and one.equal(other)
        for one, other in zip(before[-2:], trained.state()[-2:], strict=True)
    )


def test_bounds_are_on_the_norm_without_the_loss_scale() -> None:
    norm = float(Trained().step(0, Guard()).norm)
    scaled = Trained().step(0, Guard(scale=SCALE, bound=(float("inf"), 1.5 * norm)))
    assert not scaled.skipped and float(scaled.norm) == pytest.approx(norm, rel=1e-4)
    assert Trained().step(0, Guard(scale=SCALE, bound=(float("inf"), 0.5 * norm))).skipped


def test_a_spike_is_shared_by_its_norm_without_the_loss_scale() -> None:
    asked: list[tuple[float, float]] = []

    def is_shared(loss: float, norm: float) -> bool:
        asked.append((loss, norm))
        return True

    spikes: Any = SimpleNamespace(is_shared=is_shared)
    numbers = torch.tensor([2.0, (3.0 * SCALE) ** 2, 0.0], dtype=torch.float64)
    assert Guard(scale=SCALE, spikes=spikes).counts(numbers)
    assert asked == [(2.0, 3.0)]


@pytest.mark.parametrize("numbers", [(2.0, float("inf")), (2.0, float("nan")), (float("inf"), 9.0)])
def test_a_step_that_is_not_finite_is_no_spike_of_all_ranks(numbers: tuple[float, float]) -> None:
    """Its loss may be fine and its norm not: it would update every weight to what is no number."""

    def is_shared(loss: float, norm: float) -> bool:
        raise AssertionError("ranks compare numbers that are not finite")

    spikes: Any = SimpleNamespace(is_shared=is_shared)
    assert not Guard(spikes=spikes).counts(torch.tensor([*numbers, 0.0], dtype=torch.float64))


def test_a_spike_of_all_ranks_updates_as_if_nothing_bounded_it() -> None:
    spikes: Any = SimpleNamespace(note=lambda local: None, is_shared=lambda loss, norm: True)
    usual, spiked = Trained(), Trained()
    before = usual.state()
    assert not usual.step(0, Guard(bound=UNBOUNDED)).skipped
    assert not spiked.step(0, Guard(bound=(0.0, 0.0), spikes=spikes)).skipped
    for initial, expected, value in zip(before, usual.state(), spiked.state(), strict=True):
        assert expected is not None and value is not None and value.equal(expected)
        assert initial is None or not initial.equal(value)


def test_an_outcome_has_both_numbers_of_the_watch() -> None:
    """Copies that differ are one of them, tensors that changed the other: either ends the run."""
    for numbers in ([3.0, 0.0], [0.0, 1.0]):
        flips = torch.tensor(numbers, dtype=torch.float64)
        watch: Any = SimpleNamespace(
            before_update=lambda flips=flips: flips, after_update=lambda: None
        )
        outcome = Trained().step(0, Guard(watch=watch))
        assert outcome.flips is not None and outcome.flips.tolist() == numbers


def test_a_loss_scale_changes_no_weight() -> None:
    """Powers of two round nothing. SGD hides no factor of the gradients, and these are clipped."""
    recipe = Recipe(optimizer="sgd", lr=0.5)
    usual, scaled = Trained(recipe), Trained(recipe)
    clip = float(usual.step(0, Guard()).clip)
    assert clip < 1.0
    assert float(scaled.step(0, Guard(scale=SCALE)).clip) == clip
    for expected, value in zip(usual.state(), scaled.state(), strict=True):
        assert expected is not None and value is not None and value.equal(expected)


def test_weights_multiply_the_losses_of_their_microbatches() -> None:
    number = len(Trained().batches(0))
    losses = [
        float(Trained().step(0, Guard(), weights).loss)
        for weights in ([1.0] * number, [3.0] * number, [3.0, *[1.0] * (number - 1)])
    ]
    assert losses[1] == pytest.approx(3.0 * losses[0])
    assert number == 1 or losses[0] < losses[2] < losses[1]


def test_numbers_of_a_step_are_read_after_their_event() -> None:
    """On a GPU they are on their way until then."""
    reading = Reading(torch.zeros(2))
    arrived: Any = SimpleNamespace(synchronize=lambda: reading.numbers.fill_(7.0))
    reading.event = arrived
    assert reading.wait().tolist() == [7.0, 7.0]


def test_the_norm_of_narrow_gradients_is_not_rounded_to_their_type() -> None:
    """bfloat16 has no 257 = 256 + 1: the squared norm of 257 ones would be 256."""
    gradients = torch.ones(257, dtype=torch.bfloat16).split([256, 1])
    owned = [SimpleNamespace(grad=grad) for grad in gradients]
    mesh = SimpleNamespace(device=torch.device("cpu"))
    job: Any = SimpleNamespace(owned=owned, copies=lambda shard: 1, mesh=mesh)
    assert float(squared_norm(job)) == pytest.approx(257.0, rel=1e-6)
    owned[:] = [SimpleNamespace(grad=torch.ones(257, dtype=torch.bfloat16))]
    assert float(squared_norm(job)) == pytest.approx(257.0, rel=1e-6)


def progress_at(scale: float) -> Progress:
    return Progress(LossScale(True, scale), last_step=100)


def test_a_skip_counts_once_the_loss_scale_does_not_explain_it() -> None:
    """The scale of the step that was skipped decides, and not the halved one."""
    progress = progress_at(4.0)
    for scale, in_a_row in ((2.0, 0), (1.0, 0), (1.0, 1), (1.0, 2)):
        progress.advance(1, True, False)
        assert (progress.scale.value, progress.skipped_in_a_row) == (scale, in_a_row)
    progress.advance(1, False, False)
    assert progress.skipped_in_a_row == 0 and progress.skipped == 4


def test_a_resume_has_the_scale_of_its_checkpoint() -> None:
    """Also a scale that overflows have lowered to 1, which runs without a scale have too."""

    def resumed(facts: Facts, dtype: str = "float16") -> tuple[float, int]:
        progress = Progress(LossScale.of(dtype), last_step=100)
        progress.resume(facts)
        return progress.scale.value, progress.scale.good_steps

    first = LossScale.of("float16").value
    for value in (1.0, 4.0):
        lowered = Progress(LossScale(True, value, good_steps=7), last_step=100).facts(5, 0, "")
        assert resumed(lowered) == (value, 7)
        assert resumed(lowered, "bfloat16") == (1.0, 0)
    without = Progress(LossScale.of("bfloat16"), last_step=100).facts(5, 0, "")
    assert resumed(without) == (first, 0)
    older = {"scale": 4.0, "good_steps": 7}  # of a checkpoint that does not say
    assert resumed(Facts(5, scaler=older)) == (4.0, 7)
    assert resumed(Facts(5, scaler={"scale": 1.0, "good_steps": 0})) == resumed(Facts(5))
    assert resumed(Facts(5)) == (first, 0)


def test_a_run_gives_up_after_the_limit_and_not_at_it() -> None:
    progress, waited = progress_at(1.0), list[None]()
    checkpoints: Any = SimpleNamespace(wait=lambda: waited.append(None))
    stop = StopCallback(SimpleNamespace(), progress, 2, checkpoints)  # type: ignore[arg-type]
    for number in (1, 2):
        progress.advance(1, True, False)
        stop.after_step(number)
    progress.advance(1, True, False)
    with pytest.raises(FivefoldError, match=r"3 steps in a row .* skip_limit"):
        stop.after_step(3)
    assert waited == [None]


def test_skips_in_a_row_and_the_loss_scale_go_on_after_a_resume() -> None:
    progress = progress_at(1.0)
    for _ in range(3):
        progress.advance(1, True, False)
    resumed = progress_at(2.0**16)
    resumed.resume(progress.facts(updates=0, seed=0, plan=""))
    assert (resumed.skipped, resumed.skipped_in_a_row, resumed.step) == (3, 3, 3)
    resumed.scale.value = 1.0  # a scale of 1 is none to continue with
    resumed.advance(1, True, False)
    assert resumed.skipped_in_a_row == 4
    grown = progress_at(8.0)
    for _ in range(499):
        grown.advance(1, False, False)
    again = progress_at(2.0**16)
    again.resume(grown.facts(updates=499, seed=0, plan=""))
    assert again.scale.value == 8.0
    again.advance(1, False, False)
    assert (again.scale.value, again.scale.good_steps) == (16.0, 0)


def test_the_loss_scale_grows_after_500_good_steps_and_again_after_500_more() -> None:
    scale = LossScale(True, 8.0)
    values: list[float] = []
    for _ in range(1000):
        scale.update(skipped=False)
        values.append(scale.value)
    assert values == [8.0] * 499 + [16.0] * 500 + [32.0]
    for _ in range(499):
        scale.update(skipped=False)
    scale.update(skipped=True)
    assert (scale.value, scale.good_steps) == (16.0, 0)
    for _ in range(499):
        scale.update(skipped=False)
    assert scale.value == 16.0
    scale.update(skipped=False)
    assert scale.value == 32.0


def test_copies_of_a_tied_weight_are_summed_in_float32() -> None:
    """Of bfloat16 gradients too: both stages then round the same sum, once."""
    sent: list[torch.dtype] = []

    def all_reduce(flat: Tensor, *_: Any) -> Any:
        sent.append(flat.dtype)
        flat.add_(2.0**-9)  # of the other stage; bfloat16 cannot add it to 1 before it adds 2⁻⁸
        flat.add_(2.0**-8)
        return SimpleNamespace(wait=lambda: None)

    tied = SimpleNamespace(
        row=SimpleNamespace(name="head.weight"), grad=torch.ones(2, dtype=torch.bfloat16)
    )
    mesh = Mesh.__new__(Mesh)
    mesh.device = torch.device("cpu")
    mesh.all_reduce = all_reduce  # type: ignore[method-assign]
    mesh.size = lambda _: 2  # type: ignore[method-assign]
    placement = SimpleNamespace(mirrored=False)
    plan = SimpleNamespace(schedule=SimpleNamespace(placement=placement))
    job: Any = SimpleNamespace(owned=[tied], is_tied=lambda _: True, mesh=mesh, plan=plan)
    sum_copies(job)
    assert sent == [torch.float32]
    assert tied.grad.tolist() == [1.0078125] * 2 and tied.grad.dtype == torch.bfloat16
