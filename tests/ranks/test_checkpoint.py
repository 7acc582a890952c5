"""Checkpoints: from any layout into any other bit for bit, and nothing damaged is ever opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kept_pool import KeptPool
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.weight_table import buffers, weights
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.data.batches import samples
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.optim.optimizer import Updater
from fivefold.optim.updater import make_updater
from fivefold.parallel.composition import Job, compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import step
from fivefold.train.callbacks.checkpoints import checkpoint_tensors, publish_weights
from fivefold.train.checkpoint.checkpoints import Checkpoints, Reader
from fivefold.train.checkpoint.folders import Facts, published

DENSE = {"layers": "4", "width": "32", "heads": "8", "kv_heads": "2", "ffn": "48", "vocab": "61"}
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "tied": ("tiny", DENSE | {"tied": "true"}),
    "experts": ("tiny-moe", {"layers": "4", "width": "32", "moe.ffn": "16", "moe.bias": "true"}),
}


def plan_of(model: str, layout: str, **options: Any) -> Plan:
    name, changes = MODELS[model]
    rules = {"balance": "bias+aux-global"} if model == "experts" else {}
    said = {"seq": 16, "batch": 8, "set": changes, **rules, **options}
    return resolve(PlanOptions(name, layout=layout, **said))


def built(plan: Plan, recipe: Recipe, dtype: str, seed: int) -> tuple[Job, Updater]:
    mesh, narrow = Mesh.of(plan, torch.device("cpu")), dtype != "float32"
    job = compose(plan, mesh, seed=seed, dtype=getattr(torch, dtype))
    return job, make_updater(recipe, job.owned, mesh.device, master=narrow, rank=mesh.rank)


def carry(
    worker: Worker,
    plan: Plan,
    source: Path | None,
    target: Path,
    steps: int,
    recipe: Recipe,
    dtype: str,
    part_ranks: int = 64,
) -> tuple[Facts | None, list[float]]:
    """Load from a folder, if any, train, and save into another; the losses on the way."""
    with worker.joined(plan.layout.world):
        job, updater = built(plan, recipe, dtype, seed=0 if source is None else 99)
        group = dist.new_group(backend="gloo") if plan.layout.world > 1 else None
        tensors, facts = checkpoint_tensors(job, updater), None
        if source is not None:
            facts = Checkpoints(source, 1, group).load(tensors, complain)
            publish_weights(job)
            assert facts is not None
            updater.resume_after(facts.updates)
        done, losses = facts.step if facts else 0, list[float]()
        for number in range(done, done + steps):
            drawn = samples(plan.batch, plan.shape.vocab, 7, number)
            batches = drawn.of(plan.layout.coord(worker.rank).dp)
            losses.append(float(step(job, updater, batches, 1.0).loss))
        now = Facts(done + steps, updates=updater.count, samples=8 * (done + steps), plan="p")
        Checkpoints(target, 1, group, part_ranks=part_ranks).save(tensors, now, wait=True)
        for chunk in job.chunks:
            chunk.data.wait()
        job.mesh.close_groups()
        return facts, losses


def complain(text: str) -> None:
    raise AssertionError(text)


def carried(
    pool: Pool,
    plan: Plan,
    source: Path | None,
    target: Path,
    steps: int = 0,
    recipe: Recipe | None = None,
    dtype: str = "float32",
    part_ranks: int = 64,
) -> list[tuple[Facts | None, list[float]]]:
    arguments = (plan, source, target, steps, recipe or Recipe(), dtype, part_ranks)
    return pool.run_each([(carry, arguments)] * plan.layout.world)


def contents(folder: Path) -> dict[str, Tensor]:
    (found,) = published(folder)
    reader = Reader(found)
    return {key: reader.read(key) for key in reader.tensors}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


ORIGINS = {
    "tied": ("dp=4", {"zero": 1}),
    "experts": ("dp=2 ep=2 pp=2", {"zero": 1}),
}


@pytest.fixture(scope="module")
def trained(kept_pool: KeptPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each model after two steps."""
    pool, found = kept_pool.whole(), dict[str, Path]()
    for model, (layout, options) in ORIGINS.items():
        found[model] = tmp_path_factory.mktemp(model)
        carried(pool, plan_of(model, layout, **options), None, found[model], steps=2)
    return found


def test_it_has_every_tensor_whole(trained: dict[str, Path]) -> None:
    for model, folder in trained.items():
        shape = plan_of(model, "dp=1").shape
        found = contents(folder)
        whole = {weight.name: weight.shape for weight in weights(shape)}
        wanted = {f"model/{name}": sizes for name, sizes in whole.items()}
        for state in ("exp_avg", "exp_avg_sq"):
            wanted |= {f"optim/{state}/{name}": sizes for name, sizes in whole.items()}
        wanted |= {f"model/{each.name}": each.shape for each in buffers(shape)}
        wanted |= {f"balance/load/{layer}": (8,) for layer in shape.moe_layers}
        assert {key: tuple(value.shape) for key, value in found.items()} == wanted
        assert all(value.any() for value in found.values())  # nothing was left out


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [
        ("tied", "tp=2 pp=2", {}),
        ("tied", "tp=8", {}),  # KV heads on several ranks, a padded vocabulary
        ("tied", "dp=2 cp=2", {"zero": 3}),
        ("tied", "pp=2", {"schedule": "dualpipe"}),
        ("tied", "dp=2 pp=2", {"schedule": "zb-v", "zero": 2}),  # both ends on one rank
        ("tied", "dp=1", {}),
        ("experts", "dp=2 tp=2 ep=2 etp=2", {"zero": 3}),
        ("experts", "dp=8 ep=4", {"zero": 1}),
        ("experts", "dp=1", {}),
    ],
    ids=str,
)
def test_any_layout_reads_it_bit_for_bit(
    pool: Pool,
    trained: dict[str, Path],
    tmp_path: Path,
    model: str,
    layout: str,
    options: dict[str, Any],
) -> None:
    ranks = carried(pool, plan_of(model, layout, **options), trained[model], tmp_path)
    assert [facts for facts, _ in ranks] == [Facts(2, updates=2, samples=16, plan="p")] * len(ranks)
    assert same(contents(tmp_path), contents(trained[model]))


def test_a_run_goes_on_as_if_it_had_not_stopped(pool: Pool, tmp_path: Path) -> None:
    """Biases and loads of experts, states and counts: all that the next losses depend on."""
    plan = plan_of("experts", "dp=2 ep=2", zero=2)
    through = carried(pool, plan, None, tmp_path / "through", steps=4)
    carried(pool, plan, None, tmp_path / "first", steps=2)
    resumed = carried(pool, plan, tmp_path / "first", tmp_path / "then", steps=2)
    assert resumed[0][1] == through[0][1][2:]
    assert same(contents(tmp_path / "then"), contents(tmp_path / "through"))


def test_masters_are_what_is_kept_of_narrow_weights(pool: Pool, tmp_path: Path) -> None:
    """Bfloat16 with states in files, read into plain float32, and back."""
    small = {"set": DENSE | {"layers": "2"}}
    plan = plan_of("tied", "dp=2", zero=1, **small)
    disk = Recipe(offload=f"nvme:{tmp_path}")
    carried(pool, plan, None, tmp_path / "narrow", steps=2, recipe=disk, dtype="bfloat16")
    narrow = contents(tmp_path / "narrow")
    assert {value.dtype for value in narrow.values()} == {torch.float32}
    embed = narrow["model/embed.weight"]
    assert not torch.equal(embed, embed.bfloat16().float())
    carried(pool, plan_of("tied", "pp=2", **small), tmp_path / "narrow", tmp_path / "wide")
    assert same(contents(tmp_path / "wide"), narrow)
    carried(pool, plan, tmp_path / "wide", tmp_path / "again", recipe=disk, dtype="bfloat16")
    assert same(contents(tmp_path / "again"), narrow)


def shares(folder: Path) -> list[int]:
    """Bytes of each rank's file."""
    (found,) = published(folder)
    return [path.stat().st_size for path in found.glob("__*.distcp")]


def test_what_all_hold_is_written_once_and_by_all(pool: Pool, tmp_path: Path) -> None:
    carried(pool, plan_of("tied", "dp=4", zero=0), None, tmp_path / "four", steps=1)
    carried(pool, plan_of("tied", "dp=1"), None, tmp_path / "one", steps=1)
    four, (one,) = shares(tmp_path / "four"), shares(tmp_path / "one")
    assert len(four) == 4
    assert sum(four) < 1.1 * one
    assert max(four) < 0.4 * one


def test_torch_reads_it_too(trained: dict[str, Path]) -> None:
    found = contents(trained["tied"])
    state = {key: torch.zeros_like(value) for key, value in found.items()}
    dcp.load(state, checkpoint_id=published(trained["tied"])[0])
    assert same(state, found)


def refused(worker: Worker, folder: Path, plan: Plan) -> str:
    """What is said of a checkpoint of another model, by one rank of several."""
    with worker.joined(plan.layout.world):
        job, updater = built(plan, Recipe(), "float32", 0)
        group = dist.new_group(backend="gloo")
        try:
            Checkpoints(folder, 1, group).load(checkpoint_tensors(job, updater), complain)
        except FivefoldError as error:
            return str(error)
        finally:
            job.mesh.close_groups()
        return ""


def test_another_model_is_refused_on_all_ranks(pool: Pool, trained: dict[str, Path]) -> None:
    deeper = {"set": DENSE | {"tied": "true", "layers": "6"}}
    shallow = {"set": DENSE | {"tied": "true", "layers": "2"}}
    wider = {"set": DENSE | {"tied": "true", "ffn": "64"}}
    for options, words in (
        (deeper, "it has no model/blocks.4.attention.k.weight"),
        (shallow, "this run has no model/blocks.2.attention.k.weight"),
        (wider, "(64, 32), which is (48, 32) there"),
    ):
        plan = plan_of("tied", "pp=2", **options)
        told = pool.run_each([(refused, (trained["tied"], plan))] * 2)
        assert told[0] == told[1]
        assert words in told[0] and "another model or optimizer" in told[0]


# One process and two plain tensors are enough for what disks and killers do.
