"""Plans for other frameworks and back: what a file says is what was planned, or a listed loss."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.bridges.bridging import TARGETS, emit_plan, read_foreign
from fivefold.bridges.job_values import values_of
from fivefold.bridges.key_table import ours_of
from fivefold.bridges.nearest import Priced, _NearestPlan, express
from fivefold.bridges.target import Target, world_of
from fivefold.commands.plan import emit
from fivefold.commands.search import estimate_options
from fivefold.core.errors import FivefoldError
from fivefold.core.model.shape import Shape
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
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
    listed = {
        word for loss in emitted.losses for word in (loss.key + " " + loss.replacement).split()
    }
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


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda one: one.name)
def test_no_framework_is_said_to_lack_what_the_field_calls_selective(target: Target) -> None:
    """Ours makes norms and activations again; theirs is core attention, or every second matmul."""
    plan = resolve(PlanOptions("llama-3.1-8b", layout="dp=8", recompute="selective"))
    model = (plan.options.model, plan.options.set, plan.shape)
    found = express(target, values_of(plan), model, lambda _: None)
    said = [each.text(target.title) for each in found.losses if each.key == "recompute"]
    assert all("recompute=norm+act" in each and "selective" not in each for each in said)
    assert said or target.name != "megatron"


def test_memory_after_every_substitution_is_shown_and_what_fits_is_preferred() -> None:
    """A faster candidate that is tight is not taken where another one fits."""
    keys = {"zero": 2, "microbatches": 4, "recompute": "selective", "machine": "h100"}
    plan = resolve(PlanOptions(model="llama-3.1-8b", layout="dp=4 tp=2", **keys))
    emitted = emit(plan, "torchtitan", _HOW)
    changed = [each for each in emitted.losses if not each.left]
    assert len(changed) == 2 and emitted.after is not None
    for loss, line in zip(emitted.losses, emitted.lines, strict=True):
        assert loss.left or (str(loss.after) in line and " of 79.1 GiB: fits" in line)
    assert f"# memory of the fullest rank: {emitted.after}\n" in emitted.text
    tight, small = Priced(1.0, 78.7, 79.1, "tight"), Priced(2.0, 60.0, 79.1, "fits")
    search = _NearestPlan(TARGETS["megatron"], values_of(plan), _model(plan), lambda _: small)
    search.price = lambda values: tight if values["recompute"] == "norm" else small
    search.take("recompute", "selective", [{"recompute": "norm"}, {"recompute": "mlp"}])
    assert search.values["recompute"] == "mlp"


def _model(plan: Plan) -> tuple[str, dict[str, str], Shape]:
    return plan.options.model, plan.options.set, plan.shape


@pytest.mark.parametrize(
    ("target", "keys", "reason"),
    [
        (  # the plan itself
            "megatron",
            {"model": "llama-3.1-70b", "layout": "dp=4 pp=2", "machine": "h100"},
            r"Megatron-LM cannot run this plan, [\d.]+ of 79.1 GiB: does not fit",
        ),
        (  # what is left of it without ZeRO-3
            "nanotron",
            {"model": "llama-2-70b", "layout": "dp=16 tp=4", "machine": "h100", "seq": 2048},
            r"has no zero=3.*does not fit",
        ),
        ("nanotron", {"model": "gpt2"}, "model=gpt2; a file without a model"),
        ("megatron", {"model": "llama-3-8b", "train": Recipe(lora=8)}, "lora=8; lora=0"),
        ("nanotron", {"model": "llama-3-8b", "train": Recipe(optimizer="muon")}, "optimizer=muon"),
        ("nanotron", {"model": "llama-3-8b", "train": Recipe(lr_curve="wsd")}, "lr_curve=wsd"),
    ],
)
def test_what_a_target_cannot_run_is_refused(
    target: str, keys: dict[str, Any], reason: str
) -> None:
    with pytest.raises(FivefoldError, match=f"(?s){reason}"):
        emit(resolve(PlanOptions(**keys)), target, _HOW)


@pytest.mark.parametrize("name", TARGETS)
def test_what_nobody_planned_is_left_to_the_user(name: str, tmp_path: Path) -> None:
    """Default steps and rates are not in the file, and its head names what is still missing."""
    options = PlanOptions(model="llama-3.1-8b", layout="dp=4", seq=1024, zero=3)
    emitted = emit(resolve(options), name, _HOW)
    (note,) = emitted.notes
    assert re.match(
        r"still yours: data \(.*, tokenizer \(.*, saves \(.*, learning rate \(.*, steps \(", note
    )
    body = [line for line in emitted.text.splitlines() if not line.lstrip().startswith("#")]
    values = re.findall(r"[=: ](0\.001|0\.0001|20)\b,?$", "\n".join(body), re.MULTILINE)
    assert not values, body
    assert emitted.target.comments == (note in emitted.text)
    train = Recipe(lr=3e-4, steps=5000)
    planned = emit(resolve(replace(options, train=train)), name, _HOW)
    assert not {"learning rate", "steps"} & {*planned.notes[0].replace(",", " (").split(" (")}
    if name not in ("deepspeed", "accelerate"):
        back = read_back(name, planned.text, resolve(options), tmp_path).options.train
        assert (back.lr, back.steps, back.warmup_steps) == (3e-4, 5000, 500)


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
    emitted = emit_plan("deepspeed", plan)
    table = json.loads(emitted.text)
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert table["train_batch_size"] == table[sizes[0]] * table[sizes[1]] * 8 == 64
    assert table["tensor_parallel"]["autotp_size"] == 2
    assert table["zero_optimization"]["stage"] == 2  # AutoTP has no ZeRO-3
    assert "DeepSpeed has no tp=2 beside other values of this plan: zero=2" in emitted.lines
    assert table["optimizer"]["type"] == "AdamW"


def test_a_scheduler_of_deepspeed_has_its_own_parameters() -> None:
    parameters: dict[str, object] = {}
    for curve in ("cosine", "linear", "constant"):
        recipe = Recipe(lr_curve=curve, steps=1000, lr=3e-4)
        plan = resolve(PlanOptions(model="llama-3-8b", layout="dp=8", train=recipe))
        parameters[curve] = json.loads(emit_plan("deepspeed", plan).text)["scheduler"]["params"]
    rest = {"warmup_num_steps": 100}
    assert parameters == {
        "cosine": {**rest, "cos_min_ratio": 0.1, "total_num_steps": 1000},
        "linear": {**rest, "total_num_steps": 1000, "warmup_max_lr": 3e-4},
        "constant": {**rest, "warmup_max_lr": 3e-4},
    }


@pytest.mark.parametrize(("model", "factor"), [("llama-3.1-8b", 8.0), ("llama-3.2-1b", 32.0)])
def test_megatron_scales_positions_as_llama_does(model: str, factor: float, tmp_path: Path) -> None:
    plan = resolve(PlanOptions(model=model, layout="dp=2", seq=1024))
    emitted = emit_plan("megatron", plan)
    assert not emitted.losses
    assert f"--use-rope-scaling \\\n    --rope-scaling-factor {factor} " in emitted.text
    unnamed = re.sub(r"# fivefold: .*", "", emitted.text)
    found = read_back("megatron", unnamed, plan, tmp_path).shape.rope
    assert found == plan.shape.rope is not None
    usual = unnamed.replace(f"    --rope-scaling-factor {factor} \\\n", "")
    found = read_back("megatron", usual, plan, tmp_path).shape.rope
    assert found is not None and found.factor == 8.0


def test_an_edited_size_of_the_model_counts(tmp_path: Path) -> None:
    plan = resolve(PlanOptions(model="llama-3-8b", layout="dp=2", seq=1024))
    text = emit_plan("megatron", plan).text
    assert read_back("megatron", text, plan, tmp_path).shape == plan.shape
    edited = text.replace("--num-layers 32", "--num-layers 16")
    assert read_back("megatron", edited, plan, tmp_path).shape.layers == 16


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "bridges.md"
    assert capability_table() in page.read_text("utf-8"), "run: python -m tests.bridge_table"


GOLDEN = {  # words of a file, for a plan with something of everything; names as their sources have
    "megatron": (
        *("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--swiglu"),
        *("--context-parallel-size 2", "--expert-model-parallel-size 4", "--sequence-parallel"),
        *("--expert-tensor-parallel-size 1", "--use-distributed-optimizer", "--num-experts 128"),
        *("--pipeline-model-parallel-layout 'Et*13|(t*13|)*2t*9L'", "--cp-comm-type a2a"),
        *("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"),
        *("--micro-batch-size 1", "--global-batch-size 32", "--seq-length 4096", "--num-layers 48"),
    ),
    "bridge": (
        *("model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"),
        *("model.context_parallel_size=2", "model.expert_model_parallel_size=4"),
        *("model.expert_tensor_parallel_size=1", "ddp.use_distributed_optimizer=true"),
        *("model.sequence_parallel=true", "train.global_batch_size=32", "model.cp_comm_type=a2a"),
        *("mixed_precision=bf16_mixed", "--recipe qwen3_30b_a3b_pretrain_config"),
    ),
    "torchtitan-main": (
        *("config.parallelism.tensor_parallel_degree = 2", "num_pp_microbatches = 8"),
        *("config.parallelism.data_parallel_shard_degree = 4", "expert_parallel_degree = 4"),
        *("config.training.num_tokens_per_microbatch_per_dp_rank = 4096", "import qwen3_30b_a3b"),
        *("config.training.num_tokens_per_train_step = 131072", "= FullAC.Config()"),
    ),
    "nanotron": (
        *(
            "  dp: 4\n",
            "  tp: 2\n",
            "  pp: 2\n",
            '  pp_engine: "1f1b"\n',
            "  tp_mode: REDUCE_SCATTER",
        ),
        *("  context_parallel_size: 2\n", "      num_experts: 128\n", "  recompute_layer: true"),
        *("  zero_stage: 1\n", "  batch_accumulation_per_replica: 8\n", "  micro_batch_size: 1\n"),
    ),
    "axolotl": (
        *("base_model: Qwen/Qwen3-30B-A3B\n", "context_parallel_size: 2\n", "sequence_len: 4096\n"),
        *("gradient_checkpointing: true\n", "fsdp_version: 2\n", "  reshard_after_forward: "),
    ),
    "deepspeed": (
        *('"train_batch_size": 32', '"autotp_size": ', '"sequence_parallel_size": 2', '"stage": '),
    ),
    "accelerate": (
        *("distributed_type: FSDP\n", "parallelism_config_cp_size: 2\n", "num_processes: 32\n"),
        *("  fsdp_activation_checkpointing: true\n", "mixed_precision: bf16\n"),
    ),
    "torchtitan": (
        *("pipeline_parallel_degree = 2", 'pipeline_parallel_schedule = "Interleaved1F1B"'),
        *('name = "qwen3"', 'mode = "full"', "local_batch_size = 8", "global_batch_size = 32"),
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_names_of_keys(name: str) -> None:
    keys = {"schedule": "interleaved", "microbatches": 8, "recompute": "full", "seq": 4096}
    layout = "dp=4 tp=2 pp=2 cp=2 ep=4"
    context = {"context": "ulysses"} if name in ("megatron", "bridge") else {}
    plan = resolve(PlanOptions(model="qwen3-30b-a3b", layout=layout, **keys, **context))
    text = emit_plan(name, plan).text
    assert not [words for words in GOLDEN[name] if words not in text], text
