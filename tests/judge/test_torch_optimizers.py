"""Updaters beside torch's own optimizers, which the test makes itself: 20 steps with a clip factor,
a learning-rate curve and two groups of weight decay, on full weights and on shards of ranks.

Rounding differs: torch updates one tensor after another with its plain kernels, and fivefold runs
fused kernels, scales gradients inside of them, and sums momentum before it is scaled.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel.composition import Job, compose
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.units.flat_unit import OwnedShard
from fivefold.step import updater_of
from fivefold.verify.compare import ComparedPart, Wanted, errors_by_name, expected
from tests.model.test_updaters import SHAPES, some_weights
from tests.model.test_updaters import of as updater_over

STEPS, WARMUP, LR, DECAY = 20, 4, 2e-2, 0.1
DTYPES = (torch.float64, torch.float32)
CURVES = ("cosine", "linear", "wsd", "constant")
KINDS = ("adamw", "sgd", "muon", "nesterov")
STATES = {"momentum_buffer": "momentum"}  # our names of what a user's optimizer stores
SIZES = {"layers": "2", "width": "32", "heads": "4", "kv_heads": "2", "ffn": "24", "vocab": "61"}
NESTEROV = """
import torch

class Nesterov(torch.optim.SGD):
    states = ("momentum_buffer",)

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=0.9, nesterov=True)
"""
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"layout": "dp=4", "zero": 3},
    {"layout": "dp=2x2", "zero": 2},
    {"layout": "dp=2 tp=2 ep=2", "zero": 1},
    {"layout": "tp=4"},
    {"layout": "dp=2 pp=2", "zero": 1, "schedule": "zb-h1"},
)
# The slope of Muon's quintic at zero, by which each of five iterations may multiply an error.
STEEPEST = 3.4445**5
Tensors = dict[str, Tensor]
States = dict[str, Tensors]
Parts = list[ComparedPart]
OfRank = tuple[Parts, dict[str, Parts]]
"""Weights before the first step; weights and states by kind after the last."""


def curve_of(optimizer: torch.optim.Optimizer, name: str) -> lr_scheduler.SequentialLR:
    """A warmup that begins above zero, and then one of torch's curves; wsd falls over the last
    fifth."""
    after, falling = STEPS - WARMUP, STEPS // 5
    rising = lr_scheduler.LinearLR(optimizer, 1 / WARMUP, 1.0, total_iters=WARMUP - 1)
    flat = lr_scheduler.ConstantLR(optimizer, 1.0, total_iters=0)
    falls = partial(lr_scheduler.LinearLR, optimizer, 1.0, 0.0)
    curves: dict[str, tuple[list[Any], list[int]]] = {
        "constant": ([flat], [WARMUP]),
        "linear": ([falls(total_iters=after)], [WARMUP]),
        "cosine": (
            [lr_scheduler.CosineAnnealingLR(optimizer, after, eta_min=LR / 10)],
            [WARMUP],
        ),
        "wsd": ([flat, falls(total_iters=falling)], [WARMUP, STEPS - falling]),
    }
    schedulers, milestones = curves[name]
    return lr_scheduler.SequentialLR(optimizer, [rising, *schedulers], milestones)


def gradient(name: str, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One whose size changes from step to step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (drawn * 10.0 ** (number % 5 - 2)).to(dtype)


def clip_factor(number: int) -> float:
    return 1.0 if number % 3 else 0.3


def made_wide() -> AbstractContextManager[Any]:
    """torch's Muon multiplies in bfloat16; its arithmetic is judged in the dtype of the weights."""
    return patch.object(Tensor, "bfloat16", Tensor.clone)


class Torch:
    """The optimizers of a model as a user of torch would make them.

    Muon has the matrices of hidden layers, one parameter for each expert, and AdamW the others.
    """

    def __init__(
        self, kind: str, weights: Mapping[str, Tensor], decayed: set[str], hidden: set[str]
    ) -> None:
        self.weights = {name: weight.clone() for name, weight in weights.items()}
        self.views: dict[str, list[Tensor]] = {
            name: [*weight] if weight.dim() == 3 and name in hidden and kind == "muon" else [weight]
            for name, weight in self.weights.items()
        }
        matrices = hidden if kind == "muon" else set[str]()
        groups = [
            {
                "params": [view for name in names for view in self.views[name]],
                "weight_decay": DECAY if names <= decayed else 0.0,
            }
            for names in (decayed - matrices, {*weights} - decayed)
        ]
        # An optimizer over no parameters is refused.
        groups = [group for group in groups if group["params"]]
        self.optimizers: list[torch.optim.Optimizer] = []
        if kind == "sgd":
            self.optimizers.append(torch.optim.SGD(groups, lr=LR, momentum=0.9, foreach=False))
        elif kind == "nesterov":
            nesterov = {"momentum": 0.9, "nesterov": True, "foreach": False}
            self.optimizers.append(torch.optim.SGD(groups, lr=LR, **nesterov))
        else:
            adam = {"betas": (0.9, 0.95), "eps": 1e-5, "foreach": False, "fused": False}
            self.optimizers.append(torch.optim.AdamW(groups, lr=LR, **adam))
        if matrices:
            params = [view for name in sorted(matrices) for view in self.views[name]]
            muon = {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
            self.optimizers.append(torch.optim.Muon(params, lr=LR, weight_decay=DECAY, **muon))

    def run(self, curve: str) -> States:
        """All steps; weights and states by name."""
        schedulers = [curve_of(optimizer, curve) for optimizer in self.optimizers]
        for number in range(STEPS):
            for name, weight in self.weights.items():
                full = gradient(name, number, tuple(weight.shape), weight.dtype)
                full *= clip_factor(number)
                split = [*full] if len(self.views[name]) > 1 else [full]
                for view, own in zip(self.views[name], split, strict=True):
                    view.grad = own
            with made_wide():
                for optimizer, scheduler in zip(self.optimizers, schedulers, strict=True):
                    optimizer.step()
                    scheduler.step()
        return {"weights": self.weights, **self._states()}

    def _states(self) -> States:
        """By our names; torch's Muon has a twentieth of the sum of gradients."""
        states: States = {}
        for optimizer in self.optimizers:
            ours = {"momentum_buffer": "momentum", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
            factor = 20.0 if isinstance(optimizer, torch.optim.Muon) else 1.0
            for name, views in self.views.items():
                for key, state in ours.items():
                    stored = [optimizer.state.get(view, {}).get(key) for view in views]
                    if stored[0] is not None:
                        full = torch.stack(stored).view(self.weights[name].shape)
                        states.setdefault(state, {})[name] = full * factor
        return states


def tolerance(kind: str, dtype: torch.dtype, largest_side: int) -> float:
    """Relative to the largest element. A step rounds a weight or a state at most twice on each
    side; an update of Muon also has the errors of its matrix, as its iterations enlarge them."""
    eps = torch.finfo(dtype).eps
    rounded = 4 * eps * STEPS
    update = 0.2 * largest_side**0.5 * LR * STEPS * STEEPEST * 4 * eps
    return rounded + (update if kind == "muon" else 0.0)


def errors(ours: States, theirs: States) -> dict[str, float]:
    """The largest of each kind, relative to the largest element of a tensor."""
    assert ours.keys() == theirs.keys()
    return {
        kind: max(relative_error(ours[kind][name], tensor) for name, tensor in tensors.items())
        for kind, tensors in theirs.items()
        if ours[kind].keys() == tensors.keys()
    }


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    difference = (ours.reshape(theirs.shape).double() - theirs.double()).abs().max()
    return float(difference / theirs.double().abs().max())


def recipe_of(kind: str, curve: str, folder: Path) -> Recipe:
    (folder / "own.py").write_text(NESTEROV)
    name: Any = f"{folder}/own.py:Nesterov" if kind == "nesterov" else kind
    keys = {"steps": STEPS, "warmup": WARMUP, "lr": LR, "weight_decay": DECAY}
    return Recipe(optimizer=name, lr_curve=cast(Any, curve), **keys)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "curve"), [*zip(KINDS, CURVES, strict=True)])
def test_an_updater_is_torchs_optimizer(
    kind: str, curve: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = [OwnedShard(weight.row, weight.tensor) for weight in some_weights(dtype)]
    recipe = recipe_of(kind, curve, tmp_path)
    start = {weight.row.name: weight.tensor.clone() for weight in weights}
    decayed, hidden = {"w0", "w2", "w3", "w5"}, {"w0", "w2", "w3"}
    theirs = Torch(kind, start, decayed, hidden).run(curve)
    updater = updater_over(recipe, weights)
    for number in range(STEPS):
        for weight in weights:
            weight.gradient = gradient(weight.row.name, number, weight.row.shape, dtype)
            weight.clip(torch.tensor(clip_factor(number), dtype=torch.float64))
        updater.set_lr(recipe.lr_at(number + 1))
        updater.step()
    ours = {"weights": {weight.row.name: weight.tensor for weight in weights}}
    for key, states in updater.states().items():
        pairs = zip(weights, states, strict=True)
        ours[STATES.get(key, key)] = {
            weight.row.name: state.read() for weight, state in pairs if state is not None
        }
    assert ours["weights"].keys() == {f"w{number}" for number in range(len(SHAPES))}
    differences = errors(ours, theirs)
    assert differences.keys() == theirs.keys()
    assert max(differences.values()) < tolerance(kind, dtype, max(SHAPES[0])), differences
    assert all((theirs["weights"][name] - first).abs().max() > LR for name, first in start.items())


def of_ranks(worker: Worker, plan: Plan, recipe: Recipe, dtype: torch.dtype) -> OfRank:
    """A rank before the first and after the last of all steps, whose gradients are shards of the
    drawn ones."""
    with worker.joined(plan.layout.world):
        mesh = Mesh.of(plan, torch.device("cpu"))
        job = compose(plan, mesh, seed=0, dtype=dtype)
        updater = updater_of(job, recipe)
        first = parts_of(job, [shard.tensor for shard in job.owned])
        for number in range(STEPS):
            for shard, part in zip(job.owned, first, strict=True):
                full = gradient(part.name, number, job.table[part.name].shape, dtype)
                values = torch.from_numpy(expected(full.numpy(), part))
                shard.gradient = values.view(shard.tensor.shape)
                shard.clip(torch.tensor(clip_factor(number), dtype=torch.float64))
            updater.set_lr(recipe.lr_at(number + 1))
            updater.step()
        last = {"weights": parts_of(job, [shard.tensor for shard in job.owned])}
        for key, states in updater.states().items():
            last[key] = parts_of(job, [None if state is None else state.read() for state in states])
        mesh.close_groups()
        return first, last


def parts_of(job: Job, tensors: Sequence[Tensor | None]) -> list[ComparedPart]:
    """Tensors beside the weights that a rank owns, by their place in the full weights."""
    return [
        ComparedPart(
            job.table[shard.row.name].name,
            job.shards[shard.row.name],
            shard.start,
            tensor.detach().numpy().copy(),
        )
        for shard, tensor in zip(job.owned, tensors, strict=True)
        if tensor is not None
    ]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    torch.set_num_threads(1)  # a fork after parallel work would hang
    with Pool(4, 120.0) as pool:
        yield pool


def plan_of(layout: str, zero: int = 0, schedule: str = "1f1b") -> Plan:
    keys = {"seq": 16, "batch": 4, "set": SIZES, "zero": zero, "schedule": schedule}
    return resolve(PlanOptions("tiny-moe", layout=layout, **cast(Any, keys)), small=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize(
    "layout",
    LAYOUTS,
    ids=lambda layout: layout["layout"],
)
def test_shards_of_ranks_are_those_of_torchs_weights(
    pool: Pool, layout: dict[str, Any], kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    curve = CURVES[KINDS.index(kind)]
    recipe = recipe_of(kind, curve, tmp_path)
    ((alone, _),) = pool.run_each([(of_ranks, (plan_of("dp=1"), recipe, dtype))])
    start = {part.name: torch.from_numpy(part.values) for part in alone}
    decayed = {name for name, weight in start.items() if weight.dim() > 1}
    theirs = Torch(kind, start, decayed, decayed - {"embed.weight", "head.weight"}).run(curve)
    plan = plan_of(**layout)
    ranks = pool.run_each([(of_ranks, (plan, recipe, dtype))] * plan.layout.world)
    largest_side = max(max(weight.shape) for weight in start.values())
    assert {key for _, last in ranks for key in last} == theirs.keys()
    for key, tensors in theirs.items():
        truth = {name: tensor.numpy() for name, tensor in tensors.items()}
        parts = [part for _, last in ranks for part in last.get(key, [])]
        differences = errors_by_name(Wanted(truth, parts))
        assert differences.keys() == truth.keys()
        assert max(differences.values()) < tolerance(kind, dtype, largest_side), (key, differences)
