"""What families of Hugging Face have besides Llama, on ranks: norms after, blocks side by side,
partial rotations, each in layouts of every dimension that it allows."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.core import hardware as machine
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.launch.processes import Pool
from fivefold.planner.setting import estimate_setting
from fivefold.rehearse.rank import rehearse_rank
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import run_trial
from tests.ranks.priced import planned_bytes

OLMO2 = {"norm_at": "after", "qk_norm": "full"}
GLM4 = {"norm_at": "both", "rotary_dim": "4", "rope_interleaved": "true", "qkv_bias": "true"}
BIASED = dict.fromkeys(("norm_bias", "qkv_bias", "out_bias", "mlp_bias"), "true")
GLM4_EXPERTS = {**GLM4, "moe.shared": "0", "moe.shared_ffn": "0", "moe.first_dense": "0"}
NEOX = BIASED | {
    "norm": "layer",
    "activation": "gelu",
    "rotary_dim": "2",
    "kv_heads": "8",
    "parallel_block": "true",
    "parallel_norms": "2",
}
FALCON = {"norm": "layer", "norm_bias": "true", "activation": "gelu"}
FALCON_7B = FALCON | {"kv_heads": "1", "parallel_block": "true", "tied": "true"}
GEMMA3 = {
    "norm": "rms_offset",
    "norm_at": "both",
    "scaled_embedding": "true",
    "tied": "true",
    "activation": "geglu_tanh",
    "qk_norm": "head",
    "score_dim": "12",
    "window": "9",
    "global_every": "2",
    "global_rotary": "true",
    "local_theta": "100.0",
}
GEMMA2 = GEMMA3 | {"qk_norm": "none", "score_cap": "0.3", "logit_cap": "0.2"}
GEMMA2.pop("local_theta")
LLAMA4 = {
    "rope_interleaved": "true",
    "window": "9",
    "window_kind": "chunked",
    "global_every": "2",
    "nope_floor": "5",
    "qk_norm": "l2",
    "moe.weigh_inputs": "true",
    "moe.score": "sigmoid",
    "moe.every": "2",
    "moe.first_dense": "0",
}
GPT_OSS = {
    "activation": "swiglu_clamped",
    "sinks": "true",
    "window": "9",
    "global_every": "2",
    "global_rotary": "true",
    "qkv_bias": "true",
    "out_bias": "true",
    "moe.biases": "true",
    "moe.shared": "0",
    "moe.shared_ffn": "0",
    "moe.first_dense": "0",
}
LONGROPE = {
    "rope.kind": "longrope",
    "rope.factor": "8",
    "rope.original_seq": "20",
    "rope.short": "1,1.25,1.5,2",
    "rope.long": "4,5,6,7",
}
DOCUMENTS = LONGROPE | {"rope.original_seq": "8"}  # some have outgrown it
AT_ITS_LENGTH = LONGROPE | {"rope.original_seq": "31"}
YARN = {"rope.kind": "yarn", "rope.factor": "8.0", "rope.original_seq": "8"}
MINISTRAL = {"window": "9", "global_every": "2", "global_rotary": "true"}
OLMO3 = OLMO2 | MINISTRAL | YARN | {"local_theta": "10000.0"}
SMOLLM3 = YARN | {"global_every": "2", "tied": "true"}
STARCODER2 = BIASED | {"norm": "layer", "activation": "gelu_tanh", "window": "9", "tied": "true"}
STABLELM = {"norm": "layer", "norm_bias": "true", "rotary_dim": "2", "parallel_block": "true"}
ERNIE = BIASED | {"norm_bias": "false", "rope_interleaved": "true"}
DOTS1 = {
    "qk_norm": "head",
    "moe.score": "sigmoid",
    "moe.renormalise": "true",
    "moe.scaling": "2.5",
    "moe.group_score": "top2",
    "moe.bias": "true",
    "moe.first_dense": "1",
}
TRAITS: list[tuple[dict[str, str], str, dict[str, Any]]] = [
    (OLMO2, "dp=2 pp=2", {"schedule": "zb-h1", "recompute": "selective"}),
    (OLMO2, "dp=2 cp=2", {"zero": 3, "packed": True}),
    ({"norm_at": "after"}, "tp=2 dp=2", {"recompute": "norm"}),
    (GLM4, "dp=2 tp=2", {"zero": 3, "recompute": "selective"}),
    (GLM4, "tp=4", {"sp": False}),
    (GLM4, "pp=2 tp=2 cp=2", {"schedule": "dualpipe", "recompute": "full"}),
    (GLM4_EXPERTS, "dp=2 tp=2 ep=2 etp=2", {"recompute": "full:2"}),
    (GLM4_EXPERTS, "dp=2 tp=2 ep=2 etp=2", {"recompute": "experts"}),
    (NEOX, "tp=2 cp=2", {"microbatch_size": 2, "recompute": "norm"}),
    (NEOX, "pp=2 tp=2", {"schedule": "zb-v", "recompute": "mlp"}),
    (GEMMA3, "dp=2 tp=2", {"zero": 3, "recompute": "selective"}),
    (GEMMA3, "tp=2 cp=2", {"packed": True, "recompute": "full-but-attention"}),
    (GEMMA3, "cp=4", {"context": "ring", "recompute": "full:2"}),
    (GEMMA3, "cp=2 dp=2", {"context": "allgather"}),
    (GEMMA3, "pp=2 tp=2", {"schedule": "zb-v"}),
    (GEMMA2, "dp=2 tp=2", {"zero": 3, "recompute": "selective"}),
    (GEMMA2, "tp=2 cp=2", {"packed": True, "recompute": "full-but-attention"}),
    (GEMMA2, "cp=2 pp=2", {"schedule": "zb-h1", "context": "ring"}),
    (GEMMA2, "cp=2 dp=2", {"context": "ulysses"}),
    (LLAMA4, "dp=2 tp=2 ep=2", {"zero": 3, "recompute": "selective"}),
    (LLAMA4, "tp=2 cp=2 ep=2", {"recompute": "full-but-attention", "seq": 40}),
    (LLAMA4, "cp=2 pp=2", {"schedule": "zb-h1", "context": "ring", "packed": True}),
    (LLAMA4, "cp=2 dp=2 ep=4", {"context": "ulysses"}),
    (GPT_OSS, "dp=2 tp=2 ep=4", {"zero": 3, "recompute": "selective"}),
    (GPT_OSS, "tp=2 cp=2 ep=2", {"recompute": "full-but-attention", "packed": True}),
    (GPT_OSS, "cp=2 pp=2 ep=2", {"schedule": "zb-h1", "context": "ring"}),
    (GPT_OSS, "cp=2 dp=2", {"context": "ulysses", "recompute": "experts"}),
    (DOCUMENTS, "tp=2 cp=2", {"packed": True, "recompute": "full-but-attention"}),
    (LONGROPE, "pp=2 cp=2", {"schedule": "zb-h1", "context": "ring"}),
    (LONGROPE, "dp=2 tp=2", {"zero": 3, "recompute": "selective"}),
    # Rows of the original length, which context ranks pad.
    (AT_ITS_LENGTH, "tp=2 cp=2", {"seq": 31}),
    (DOCUMENTS, "cp=4", {"seq": 31, "context": "ulysses", "packed": True}),
    (OLMO3, "cp=2 pp=2", {"context": "ring", "recompute": "selective"}),
    (MINISTRAL, "tp=2 pp=2 cp=2", {"recompute": "full-but-attention"}),
    (SMOLLM3, "tp=2 cp=2", {"packed": True, "context": "ulysses"}),
    (SMOLLM3, "pp=2 tp=2 cp=2", {"schedule": "zb-h1"}),
    (STARCODER2, "tp=2 pp=2 cp=2", {"recompute": "selective"}),
    (STABLELM, "tp=2 pp=2 cp=2", {"schedule": "zb-v"}),
    (ERNIE, "tp=2 pp=2 cp=2", {"recompute": "norm"}),
    (DOTS1, "tp=2 cp=2 dp=2 ep=4", {"zero": 3}),
    ({"dropout": "0.2", "embedding_dropout": "0.0", **BIASED}, "tp=2 pp=2 cp=2", {}),
    (FALCON_7B, "dp=2 tp=2", {"zero": 2, "recompute": "selective"}),
    (FALCON_7B, "pp=2 tp=2", {"schedule": "zb-h1"}),
    (FALCON_7B, "tp=2 cp=2", {"context": "ulysses", "recompute": "attention"}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("changes", "layout", "options"), TRAITS)
def test_a_family_computes_the_same_in_every_layout(
    pool: Pool, changes: dict[str, str], layout: str, options: dict[str, Any]
) -> None:
    changes = {"layers": "4" if "pp" in layout else "2", **changes}
    model = "tiny-moe" if any(key.startswith("moe.") for key in changes) else "tiny"
    plan = resolve(PlanOptions(model, layout=layout, set=changes, **options), small=True)
    verdict = run_trial(pool, plan, VerifySettings(steps=1))
    assert verdict.passed, (verdict.errors, verdict.traffic_match, verdict.diverges_at)


# As wide as they are: norms twice, after attention and MLP, and blocks side by side.
SIDE = {"norm": "layer", "norm_bias": "true", "parallel_block": "true"}
PAIRS = {f"rope.{name}": ",".join(["2"] * 64) for name in ("short", "long")}
HELD: list[tuple[dict[str, str], str, dict[str, Any]]] = [
    ({"norm_at": "after"}, "tp=2 dp=2", {"recompute": "selective"}),
    ({"norm_at": "both", "rotary_dim": "64"}, "dp=2", {"zero": 1}),
    ({"norm_at": "both"}, "pp=2 tp=2", {"schedule": "zb-h1"}),
    (SIDE, "dp=2", {"zero": 1}),
    (PAIRS | {"rope.kind": "longrope", "rope.original_seq": "1024"}, "tp=2 dp=2", {}),
    (SIDE | {"parallel_norms": "2"}, "tp=2 dp=2", {"recompute": "selective"}),
]


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(("changes", "layout", "said"), HELD)
def test_a_rank_of_a_family_holds_what_is_planned(
    changes: dict[str, str], layout: str, said: dict[str, Any]
) -> None:
    keys = {"precision": "bf16", "seq": 2048, "microbatches": 4, "set": {"layers": "4", **changes}}
    plan = resolve(PlanOptions("llama-3.1-8b", layout=layout, **{**keys, **said}))
    setting, _ = estimate_setting(machine.load("h200"), "bf16", 0.0, "compiled", 1.0)
    planned = planned_bytes(plan, setting, 0)
    assert planned == pytest.approx(rehearse_rank(plan, 0, {}).peak, rel=0.005)
