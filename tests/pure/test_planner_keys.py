"""Every key of a plan and of its recipe changes the estimate, or is free for a reason."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from fivefold.cli import main
from fivefold.core.errors import FivefoldError
from fivefold.core.hardware import load
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.cost.hardware import stack as stacks
from fivefold.planner.estimate import Estimate, estimate_plan
from fivefold.planner.setting import EstimateSetting


def estimated(model: str, layout: str, **options: Any) -> Estimate:
    said = {"seq": 4096, "machine": "h100", **options}
    plan = resolve(PlanOptions(model, layout=layout, **said))
    stack = stacks.BY_KERNELS[plan.options.train.kernels]
    setting = EstimateSetting(load(plan.options.machine or "h100"), stack, plan.precision)
    return estimate_plan(plan, setting)


LLAMA, DATA = ("llama-3.1-8b", "dp=8"), {"zero": 3, "microbatches": 4}
ROUNDED = {**DATA, "precision": "fp8"}
SPLIT, PIPE = ("llama-3.1-8b", "tp=4 dp=2"), ("llama-3.1-8b", "dp=2 pp=4")
EXPERTS = ("mixtral-8x7b", "dp=16 ep=8")
# Of each key: the job in which it is changed, and the change.
CHANGES: dict[str, tuple[tuple[str, str], dict[str, Any], dict[str, Any]]] = {
    "model": (LLAMA, DATA, {"model": "llama-3.2-1b"}),
    "layout": (LLAMA, DATA, {"layout": "dp=4 tp=2"}),
    "machine": (LLAMA, DATA, {"machine": "h200"}),
    "zero": (LLAMA, DATA, {"zero": 1}),
    "gather": (LLAMA, DATA, {"gather": "step"}),
    "grad_dtype": (LLAMA, DATA, {"grad_dtype": "bf16"}),
    "unit_size": (LLAMA, DATA, {"unit_size": 2000.0}),
    "prefetch": (LLAMA, DATA, {"prefetch": 0}),
    "sp": (SPLIT, {}, {"sp": False}),
    "context": (("llama-3.1-8b", "cp=4 dp=2"), {}, {"context": "ulysses"}),
    "schedule": (PIPE, {}, {"schedule": "gpipe"}),
    "chunks": (PIPE, {"schedule": "interleaved", "microbatches": 8}, {"chunks": 4}),
    "stage_layers": (PIPE, {}, {"stage_layers": "5,9,9,9"}),
    "microbatches": (LLAMA, DATA, {"microbatches": 2}),
    "microbatch_size": (LLAMA, DATA, {"microbatch_size": 2}),
    "batch": (LLAMA, {"zero": 3}, {"batch": 32}),
    "seq": (LLAMA, DATA, {"seq": 2048}),
    "recompute": (LLAMA, DATA, {"recompute": "full"}),
    "balance": (EXPERTS, {}, {"balance": "capacity-pad:1.25"}),
    "ep_nodes": (EXPERTS, {}, {"ep_nodes": 2}),
    "tp_keep": (SPLIT, {}, {"tp_keep": "gathered"}),
    "tp_overlap": (SPLIT, {}, {"tp_overlap": 2}),
    "precision": (LLAMA, DATA, {"precision": "fp32"}),
    "fp8": (LLAMA, ROUNDED, {"fp8": "blockwise"}),
    "fp8_wgrad": (LLAMA, ROUNDED, {"fp8_wgrad": "bf16"}),
    "fp8_skip": (LLAMA, ROUNDED, {"fp8_skip": "1+1"}),
    "set": (LLAMA, DATA, {"set": {"layers": "16"}}),
    "optimizer": (LLAMA, DATA, {"train": Recipe(optimizer="muon")}),
    "states": (LLAMA, DATA, {"train": Recipe(states="bf16")}),
    "offload": (LLAMA, DATA, {"train": Recipe(offload="cpu")}),
    "offload_grads": (LLAMA, DATA, {"train": Recipe(offload_grads="cpu")}),
    "compile": (LLAMA, DATA, {"train": Recipe(compile=False)}),
    "lora": (LLAMA, DATA, {"train": Recipe(lora=16)}),
    "lora_targets": (
        LLAMA,
        {**DATA, "train": Recipe(lora=16)},
        {"train": Recipe(lora=16, lora_targets="q")},
    ),
    "train_only": (LLAMA, DATA, {"train": Recipe(train_only="head")}),
}
FREE = {
    "fp8_gradients": "both formats have one byte and one speed",
    "fp8_matmul": "emulation is for proofs and old GPUs: how long it takes is not estimated",
    "gpus": "the product of the degrees; another number is refused",
    "packed": "how long documents are is known only to the data: rows are priced as one document",
    "train": "a table of the keys below",
    "steps": "a step does not depend on how many there are",
    "lr": "a number in a kernel that runs anyway",
    "lr_curve": "the same",
    "warmup": "the same",
    "weight_decay": "the same",
    "lora_alpha": "the same",
    "clip": "the norm is always computed",
    "seed": "which numbers are drawn, not how many",
    "dpo_beta": "a forward before each step, which is not estimated: `train` says so",
    "loss": "which tokens count: the logits of all are computed",
    "data": "it is read ahead, in the background",
    "save_every": "checkpoints are written in the background, between steps",
    "mtbf_hours": "how often they are written, if auto decides",
    "copy_every": "copies in host memory, which is not estimated; they are taken between steps",
    "copy_domain": "who keeps them",
    "keep": "files on a disk",
    "keep_best": "the same",
    "eval_data": "which rows are evaluated, between steps",
    "eval_every": "evaluations are between steps, and reported apart",
    "sample_every": "samples are between steps; their weights are there only while they are drawn",
    "skip_limit": "a count",
    "compare_every": "one pass over weights and states in N steps; its cost is measured below 1%",
    "replay": "one more forward and backward in N steps: a proof, and reported as such",
    "hang_after": "when a run that hangs is ended",
    "spike_bound": "one more step after a spike, which is rare; `docs` has how rare",
    "log": "records are written in the background",
    "callbacks": "what a user's hooks cost is not known; they run between steps",
    "events": "the same; `docs` has what it costs when it is measured",
}


def test_every_key_is_priced_or_free() -> None:
    keys = {each.name for kind in (PlanOptions, Recipe) for each in fields(kind)}
    assert CHANGES.keys() | FREE.keys() == keys
    assert not CHANGES.keys() & FREE.keys()


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_changes_what_runs_changes_the_estimate(key: str) -> None:
    (model, layout), said, change = CHANGES[key]
    before = estimated(model, layout, **said)
    words = {"model": model, "layout": layout, **said, **change}
    after = estimated(words.pop("model"), words.pop("layout"), **words)
    assert (before.step, before.memory) != (after.step, after.memory)


RULES = ("norm", "act", "attention", "mlp", "selective", "full", "full:2", "attention+mlp")


def test_every_rule_of_recomputation_saves_memory_and_takes_time() -> None:
    plain = estimated("llama-3.1-8b", "dp=8", microbatches=4)
    found = {
        rule: estimated("llama-3.1-8b", "dp=8", microbatches=4, recompute=rule) for rule in RULES
    }
    assert len({one.memory["activations"] for one in found.values()}) == len(RULES)
    for one in found.values():
        assert one.total < plain.total and one.step > plain.step
    assert found["full"].memory["activations"] < found["attention+mlp"].memory["activations"]
    assert found["selective"].total < min(found["norm"].total, found["act"].total)


def test_a_stage_may_have_its_own_rule() -> None:
    some, all_, none = (
        estimated("llama-3.1-8b", "dp=2 pp=4", recompute=rule)
        for rule in ("none,full@0-1", "full", "none")
    )
    assert all_.total < some.total < none.total
    assert none.step < some.step <= all_.step


@pytest.mark.parametrize("layout", ["dp=4 pp=2", "dp=8"])
def test_weights_that_stay_gathered_take_memory_and_save_time(layout: str) -> None:
    found = [
        estimated("llama-3.1-8b", layout, zero=3, microbatches=8, gather=gather)
        for gather in ("step", "microbatch", None)
    ]
    step, microbatch, usual = found
    assert step.memory["prefetch"] > microbatch.memory["prefetch"]
    assert step.parts["dp"] < microbatch.parts["dp"]
    assert usual.step == (step if "pp" in layout else microbatch).step


def test_inputs_that_stay_gathered_take_memory_and_save_time() -> None:
    for overlap in (0, 1):
        shard, gathered = (
            estimated("llama-3.1-8b", "tp=4 dp=2", tp_keep=keep, tp_overlap=overlap)
            for keep in ("shard", "gathered")
        )
        assert shard.memory["activations"] < gathered.memory["activations"]
        assert shard.parts["tp"] > gathered.parts["tp"]
        if not overlap:
            assert shard.parts["tp"] == pytest.approx(gathered.parts["tp"] * 5 / 4, rel=0.02)


def test_tensor_collectives_beside_matmuls_save_time() -> None:
    """In backward, then in chunks of the forward too; a schedule that defers weight gradients has
    none of them left beside a reduction."""
    plain, backward, chunks = (
        estimated("llama-3.1-8b", "tp=4 dp=2", tp_overlap=overlap).parts["tp"]
        for overlap in (0, 1, 2)
    )
    assert chunks < backward < plain
    late = [
        estimated("llama-3.1-8b", "tp=4 pp=2", schedule=name, tp_overlap=1).parts["tp"]
        for name in ("1f1b", "zb-h1")
    ]
    assert late[0] < late[1] < plain


def test_tokens_that_cross_to_each_node_once() -> None:
    """Flat, every copy of a token crosses by itself."""
    flat, nodes = (
        estimated("mixtral-8x7b", "dp=16 ep=8 tp=2 etp=2", ep_nodes=number, set={"layers": "8"})
        for number in (1, 2)
    )
    assert nodes.parts["ep"] != flat.parts["ep"]
    assert nodes.parts["tp"] == flat.parts["tp"]


def test_states_of_optimizers() -> None:
    """AdamW has two moments, SGD one, Muon one for matrices; in bf16 they take half."""
    usual, half, sgd, muon = (
        estimated("llama-3.1-8b", "dp=8", **DATA, train=recipe).memory["optimizer"]
        for recipe in (
            Recipe(),
            Recipe(states="bf16"),
            Recipe(optimizer="sgd"),
            Recipe(optimizer="muon"),
        )
    )
    assert half == sgd == usual / 2 < muon < usual


def test_what_muon_cannot_do_is_refused() -> None:
    with pytest.raises(FivefoldError, match="muon keeps its"):
        Recipe(optimizer="muon", offload="cpu")


def test_deferred_weight_gradients_take_memory() -> None:
    """A split backward holds inputs and output gradients of weights, gathered over tp."""
    at_once, split = (
        estimated("llama-3.1-70b", "tp=8 pp=4", schedule=name, microbatches=8)
        for name in ("1f1b", "zb-h1")
    )
    assert split.memory["activations"] > 1.5 * at_once.memory["activations"]


@pytest.mark.parametrize("rule", ["norm", "full:2", "attention+mlp"])
def test_a_search_takes_any_rule_for_all_stages(
    rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", "llama-3.2-1b", "--gpus", "8", "--machine", "h100", "--recompute", rule)
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--set", "top=2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {one["recompute"] for one in found["layouts"]} == {rule}


def test_a_rule_for_some_stages_needs_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "llama-3.2-1b", "--gpus", "8", "--machine", "h100")
    with pytest.raises(SystemExit) as stop:
        main([*words, "--recompute", "none,full@0"])
    assert stop.value.code == 2 and "give a --layout" in capsys.readouterr().err
