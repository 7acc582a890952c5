"""Mistakes in what `verify` and `train --check` share with the ranks: the judge notices each.

They are planted in all processes of a run, one at a time. Without the mistake the run passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.judge import mistakes_of_dropout as of_dropout
from tests.judge import mistakes_of_runs as of_runs
from tests.judge import mistakes_of_steps as of_steps
from tests.judge.cases import BY_NAME
from tests.judge.planting import Patch
from tests.judge.runs import differing, errors


@dataclass(frozen=True)
class Fault:
    """A mistake, a case in which it matters, and the first quantity that it changes."""

    plant: Callable[[], Patch]
    case: str
    first: str = "loss"

    def __str__(self) -> str:
        return self.plant.__name__


FAULTS = (
    Fault(of_steps.clip_coefficient_always_1, "clipped"),
    Fault(of_steps.learning_rate_of_the_step_before, "clipped"),
    Fault(of_steps.other_weights_of_muon_without_schedule, "muon"),
    Fault(of_steps.seed_of_weights_ignored, "two epochs"),
    Fault(of_steps.warmup_from_zero, "clipped"),
    Fault(of_steps.cosine_down_to_zero, "two epochs"),
    Fault(of_steps.wsd_falls_over_a_tenth, "muon", "lr"),
    Fault(of_steps.default_warmup_of_a_twentieth, "usual"),
    Fault(of_steps.mean_of_microbatch_means, "two epochs"),
    Fault(of_steps.last_microbatch_forgotten, "clipped"),
    Fault(of_steps.clipped_by_the_sum_of_norms, "two epochs"),
    Fault(of_steps.norms_decay, "clipped"),
    Fault(of_steps.embeddings_do_not_decay, "clipped"),
    Fault(of_steps.decay_through_the_moments, "two epochs"),
    Fault(of_steps.second_beta_of_torch, "two epochs"),
    Fault(of_steps.epsilon_of_torch, "two epochs"),
    Fault(of_steps.sgd_of_nesterov, "sgd"),
    Fault(of_steps.experts_made_orthogonal_together, "muon of experts"),
    Fault(of_steps.muon_without_decay, "muon"),
    Fault(of_steps.seed_of_rounding_ignored, "narrow states"),
    Fault(of_steps.rounding_by_the_place_in_a_shard, "narrow states"),
    Fault(of_runs.seed_of_the_order_ignored, "two epochs"),
    Fault(of_runs.every_epoch_in_one_order, "two epochs"),
    Fault(of_runs.rows_in_their_order, "clipped"),
    Fault(of_runs.equal_shares_of_a_mixture, "mixture"),
    Fault(of_runs.ends_of_documents_counted, "two epochs"),
    Fault(of_runs.documents_see_one_another, "two epochs"),
    Fault(of_runs.evaluation_times_tp, "muon", "eval_loss"),
    Fault(of_runs.evaluation_of_one_data_rank, "clipped", "eval_loss"),
    Fault(of_runs.evaluation_by_means_of_batches, "clipped", "eval_loss"),
    Fault(of_runs.evaluation_of_one_batch, "clipped", "eval_loss"),
    Fault(of_runs.evaluation_of_trained_rows, "clipped", "eval_loss"),
    Fault(of_steps.auxiliary_loss_not_scaled, "overflow"),
    Fault(of_steps.overflow_does_not_halve, "overflow", "norm"),
    Fault(of_steps.skipped_steps_count_as_updates, "overflow", "norm"),
    Fault(of_steps.one_skip_too_few, "not finite", "steps"),
    Fault(of_steps.bias_towards_full_experts, "biased"),
    Fault(of_steps.auxiliary_loss_of_slots, "experts"),
    Fault(of_runs.scaler_count_lost, "resumed after an overflow", "facts scaler"),
    Fault(of_dropout.nothing_dropped, "dropped"),
    Fault(of_dropout.pairs_kept, "dropped"),
    Fault(of_dropout.dropped_in_evaluation, "dropped and resumed", "eval_loss"),
    Fault(of_dropout.one_mask_for_all_steps, "dropped and resumed"),
    Fault(of_dropout.one_mask_for_all_sites, "dropped and resumed"),
    Fault(of_dropout.seed_of_dropout_ignored, "dropped experts"),
    Fault(of_dropout.mean_of_what_is_kept_not_restored, "dropped experts"),
    Fault(of_runs.update_count_lost, "resumed"),
    Fault(of_runs.samples_from_the_start, "resumed"),
    Fault(of_runs.states_lost, "resumed"),
    Fault(of_runs.load_of_experts_lost, "resumed with experts"),
    Fault(of_runs.schedule_ends_with_the_start, "resumed"),
)


@cache
def healthy(name: str, corpora: Path, folder: Path) -> dict[str, float]:
    """What differs without a mistake; many mistakes share a case."""
    case = BY_NAME[name]
    return differing(case, errors(case, corpora, folder / name.replace(" ", "-")))


@pytest.fixture(scope="session")
def healthy_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("healthy")


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_mistake_is_noticed(
    fault: Fault, corpora: Path, healthy_runs: Path, tmp_path: Path
) -> None:
    assert not healthy(fault.case, corpora, healthy_runs)
    case = BY_NAME[fault.case]
    seen = differing(case, errors(case, corpora, tmp_path / "planted", fault.plant))
    assert seen and next(iter(seen)) == fault.first, seen
