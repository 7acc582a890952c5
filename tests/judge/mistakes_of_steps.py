"""Mistakes in the recipe, in accumulation, in the optimizers, in loss scaling and with experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from fivefold import step as step_module
from fivefold.core.plan import recipe as recipe_module
from fivefold.model import balance as balance_module
from fivefold.model.batch import NOT_COUNTED
from fivefold.optim import blockwise, muon, optimizer
from fivefold.parallel import composition as compose_module
from fivefold.parallel.composition import Balancing
from fivefold.parallel.pipeline import Pipeline
from fivefold.train.callbacks import stop
from tests.judge.planting import Patch, instead, with_step

# The recipe.


def clip_coefficient_always_1() -> Patch:
    def unclipped(real: Any, job: Any, opt: Any, some: Any, norm: float, guard: Any) -> Any:
        return real(job, opt, some, 1e30, guard)

    return with_step(unclipped)


def learning_rate_of_the_step_before() -> Patch:
    """The log shows the right one."""
    last: dict[int, float] = {}

    def late(real: Any, self: Any, lr: float) -> None:
        real(self, last.get(id(self), lr))
        last[id(self)] = lr

    return instead(optimizer.DeviceUpdater, "set_lr", late)


def other_weights_of_muon_without_schedule() -> Patch:
    def only_muon(real: Any, self: Any, lr: float) -> None:
        self.lr = lr

    return instead(muon.Muon, "set_lr", only_muon)


def seed_of_weights_ignored() -> Patch:
    inner = compose_module.compose

    def seedless(*given: Any, **named: Any) -> Any:
        return inner(*given, **{**named, "seed": 0})

    return patch("fivefold.train.build.compose", seedless)


def warmup_from_zero() -> Patch:
    def late(real: Any, self: Any, number: int) -> float:
        rising = number <= self.warmup_steps
        return self.lr * (number - 1) / self.warmup_steps if rising else real(self, number)

    return instead(recipe_module.Recipe, "lr_at", late)


def cosine_down_to_zero() -> Patch:
    return patch.object(recipe_module, "_LOWEST", 0.0)


def wsd_falls_over_a_tenth() -> Patch:
    return patch.object(recipe_module, "_DECAY", 10)


def default_warmup_of_a_twentieth() -> Patch:
    return patch.object(recipe_module, "_WARM_UP", 20)


# Accumulation and clipping.


def mean_of_microbatch_means() -> Patch:
    inner = Pipeline.run

    def means(self: Any, some: Sequence[Any], tokens: Any, scale: float = 1.0) -> Any:
        counts = [(one.labels != NOT_COUNTED).sum().double() * len(some) for one in some]
        return inner(self, some, counts, scale)

    return patch.object(Pipeline, "run", means)


def last_microbatch_forgotten() -> Patch:
    def fewer(real: Any, job: Any, opt: Any, some: Any, norm: float, guard: Any) -> Any:
        silent = replace(some[-1], labels=torch.full_like(some[-1].labels, NOT_COUNTED))
        return real(job, opt, [*some[:-1], silent], norm, guard)

    return with_step(fewer)


def clipped_by_the_sum_of_norms() -> Patch:
    def sums(job: Any) -> Any:
        return torch.stack([each.grad.norm() for each in job.owned]).sum().double() ** 2

    return patch.object(step_module, "squared_norm", sums)


# Optimizers.


def norms_decay() -> Patch:
    return patch.object(optimizer, "decays", MagicMock(return_value=True))


def embeddings_do_not_decay() -> Patch:
    inner = optimizer.decays

    def others(role: str) -> bool:
        return inner(role) and role != "embedding"

    return patch.object(optimizer, "decays", others)


def decay_through_the_moments() -> Patch:
    """Adam with an L2 penalty."""

    def adam(groups: Any, lr: float, eps: float) -> Any:
        return torch.optim.Adam(groups, lr=lr, betas=(0.9, 0.95), eps=eps, fused=True)

    return patch.object(optimizer, "adamw", adam)


def second_beta_of_torch() -> Patch:
    def adamw(groups: Any, lr: float, eps: float) -> Any:
        return torch.optim.AdamW(groups, lr=lr, eps=eps, fused=True)

    return patch.object(optimizer, "adamw", adamw)


def epsilon_of_torch() -> Patch:
    return patch.object(optimizer, "ADAM_EPS", 1e-8)


def sgd_of_nesterov() -> Patch:
    def sgd(groups: Any, lr: float, eps: float) -> Any:
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)

    return patch.object(optimizer, "sgd", sgd)


def experts_made_orthogonal_together() -> Patch:
    inner = muon.orthogonalize

    def together(matrices: Any) -> Any:
        return inner(matrices.flatten(0, -2)).view(matrices.shape)

    return patch.object(muon, "orthogonalize", together)


def muon_without_decay() -> Patch:
    inner = muon.Muon.__init__

    def careless(self: Any, recipe: Any, *given: Any) -> None:
        inner(self, replace(recipe, weight_decay=0.0), *given)

    return patch.object(muon.Muon, "__init__", careless)


def seed_of_rounding_ignored() -> Patch:
    inner = blockwise.rounding_bits

    def seedless(seed: int, *given: Any) -> Any:
        return inner(0, *given)

    return patch.object(blockwise, "rounding_bits", seedless)


def rounding_by_the_place_in_a_shard() -> Patch:
    inner = blockwise.rounding_bits

    def local(*given: Any) -> Any:
        return inner(*given[:6])

    return patch.object(blockwise, "rounding_bits", local)


# Loss scaling, and steps that are not finite.


def auxiliary_loss_not_scaled() -> Patch:
    return instead(Balancing, "scale_losses", lambda real, self, scale: None)


def overflow_does_not_halve() -> Patch:
    return instead(optimizer.LossScale, "update", lambda real, self, skipped: real(self, False))


def skipped_steps_count_as_updates() -> Patch:
    def counted(real: Any, job: Any, opt: Any, *given: Any) -> Any:
        outcome = real(job, opt, *given)
        if outcome.skipped and isinstance(opt, optimizer.DeviceUpdater):
            opt.count += 1
        return outcome

    return with_step(counted)


def one_skip_too_few() -> Patch:
    def early(real: Any, self: Any, record: Any) -> None:
        real(replace(self, skip_limit=self.skip_limit - 1), record)

    return instead(stop.StopCallback, "after_step", early)


# Experts.


def bias_towards_full_experts() -> Patch:
    inner = balance_module.update_balance

    def away(mlp: Any, balancer: Any, rules: Any, counts: Any) -> None:
        before = mlp.router.bias.clone()
        inner(mlp, balancer, rules, counts)
        mlp.router.bias.copy_(2 * before - mlp.router.bias)

    return patch("fivefold.parallel.composition.update_balance", away)


def auxiliary_loss_of_slots() -> Patch:
    """Divided by the tokens times the experts of each."""
    inner = balance_module.load_losses

    def halved(scores: Any, load: Any) -> Any:
        return inner(scores, load) / 2

    return patch.object(balance_module, "load_losses", halved)
