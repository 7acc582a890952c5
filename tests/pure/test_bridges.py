"""Plans for other frameworks and back: what a file says is what was planned, or a listed loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.api.emitting import emit
from fivefold.api.planning import estimate_options
from fivefold.bridges import TARGETS, emit_plan, read_foreign
from fivefold.bridges.job_values import values_of
from fivefold.bridges.key_table import ours_of
from fivefold.bridges.target import world_of
from fivefold.core.plan import Plan, PlanOptions, resolve
from tests.bridge_plans import random_plan
from tests.bridge_table import capability_table

NUM_PLANS = 200
_HOW = estimate_options(0.05, "compiled", None, None)


def read_back(name: str, text: str, plan: Plan, folder: Path) -> Plan:
    """The plan of an emitted file; only a number of GPUs or a model that it cannot say is given."""
    path = folder / f"emitted{TARGETS[name].suffix}"
    path.write_text(text, "utf-8")
    model = plan.options.model if not TARGETS[name].comments else None
    found = read_foreign(path, world_of(values_of(plan)), model)
    assert not found.unknown, found.unknown
    return resolve(found.options)


@pytest.mark.sample(24)
@pytest.mark.parametrize("seed", range(NUM_PLANS))
@pytest.mark.parametrize("name", TARGETS)
def test_a_plan_is_read_back_from_every_target(name: str, seed: int, tmp_path: Path) -> None:
    plan = random_plan(seed)
    emitted = emit_plan(name, plan)
    nearest = resolve(emitted.options)
    assert values_of(read_back(name, emitted.text, nearest, tmp_path)) == values_of(nearest)
    before, after = values_of(plan), values_of(nearest)
    changed = {key for key in before if before[key] != after[key]}
    listed = {word for loss in emitted.losses for word in (loss.key + " " + loss.now).split()}
    listed = {part for word in listed for part in word.split("=")[0].split("+")}
    if {"pp", "interleaved", "schedule"} & listed:
        listed |= {"schedule", "chunks", "stage_layers", "order"}
    if {"replicate", "shard", "zero"} & listed:
        listed |= {"replicate", "shard", "zero", "gather", "microbatches", "prefetch", "order"}
    follow = {"lora": {"lora_alpha"}, "number": {"fp8_skip"}, "tp": {"sp", "tp_keep", "tp_overlap"}}
    for key, others in follow.items():
        listed |= others if key in listed else set()
    if after["cp"] == 1:
        listed.add("context")
    assert changed <= listed, (changed - listed, emitted.lines)


def test_a_plan_that_a_target_has_is_written_without_losses(tmp_path: Path) -> None:
    keys = {"schedule": "interleaved", "chunks": 2, "microbatches": 8, "recompute": "full"}
    plan = resolve(PlanOptions(model="llama-3-8b", layout="dp=2x2 tp=2 pp=2 cp=2", **keys))
    emitted = emit_plan("megatron", plan)
    assert not emitted.losses
    assert values_of(resolve(emitted.options)) == values_of(plan)


def test_losses_are_priced() -> None:
    options = PlanOptions(
        model="llama-3.1-8b", layout="dp=4 tp=2 pp=4", schedule="zb-v", batch=32, machine="h100"
    )
    emitted = emit(resolve(options), "megatron", _HOW)
    (line,) = [each for each in emitted.lines if "zb-v" in each]
    assert "Megatron-LM has no zb-v: " in line and ("slower" in line or "faster" in line)
    assert f"# {line}" in emitted.text
    slower = emitted.losses[0].slower
    assert slower is not None
    assert f"{abs(slower):.1%}" in line


def test_without_a_machine_nothing_is_priced() -> None:
    options = PlanOptions(model="llama-3.1-8b", layout="dp=4 pp=4", schedule="zb-v", batch=32)
    lines = emit(resolve(options), "nanotron", _HOW).lines
    assert lines[0] == "nanotron has no zb-v: 1f1b"


def test_every_table_names_keys_once() -> None:
    for target in TARGETS.values():
        names = [name for item in target.table for name in dict.fromkeys(item.names)]
        shared = {name for name in names if names.count(name) > 1}
        assert not shared - {"parallelism.fsdp_reshard_after_forward"}, (target.name, shared)
        ours = list(ours_of(target.table))
        assert len({*ours}) == len(ours), target.name


def test_deepspeed_gets_json_and_its_batch_multiplies() -> None:
    plan = resolve(PlanOptions(model="llama-3-8b", layout="dp=8 tp=2", batch=64, microbatch_size=2))
    table = json.loads(emit_plan("deepspeed", plan).text)
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert table["train_batch_size"] == table[sizes[0]] * table[sizes[1]] * 8 == 64
    assert table["tensor_parallel"]["autotp_size"] == 2
    assert table["zero_optimization"]["stage"] == 3


def test_an_edited_size_of_the_model_counts(tmp_path: Path) -> None:
    plan = resolve(PlanOptions(model="llama-3-8b", layout="dp=2", seq=1024))
    text = emit_plan("megatron", plan).text
    assert read_back("megatron", text, plan, tmp_path).shape == plan.shape
    edited = text.replace("--num-layers 32", "--num-layers 16")
    assert read_back("megatron", edited, plan, tmp_path).shape.layers == 16


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "bridges.md"
    assert capability_table() in page.read_text("utf-8"), "run: python -m tests.bridge_table"
