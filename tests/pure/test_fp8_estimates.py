"""fp8 in the planner: memory and time beside an H200's, and what each key changes."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.commands.search import search
from fivefold.core import hardware as machine
from fivefold.core.layout.fp8 import Fp8
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.planner.estimate import Estimate, estimate_plan, rank_memory
from fivefold.planner.setting import estimate_setting

H200 = machine.load("h200")
GIB = 2**30
# One H200, Llama-3.1-8B at 8k, batch 1 (docs/fp8.md): keys, GiB reserved, tokens/s.
MEASURED: tuple[tuple[dict[str, Any], float, float], ...] = (
    ({}, 82.2, 10_860),
    ({"precision": "fp8"}, 91.5, 14_338),
    ({"precision": "fp8", "fp8": "blockwise"}, 91.6, 13_021),
)
# These runs had no float32 copies of weights: the update reads and writes weight and two moments,
# and reads a gradient, 14 bytes; the norm reads it once more, 2. As in other updates, a tenth more.
BYTES_OF_UPDATE = 1.1 * 16


def plan_of(layout: str = "dp=1", model: str = "llama-3.1-8b", **keys: Any) -> Plan:
    said = {"seq": 8192, "microbatches": 1, "microbatch_size": 1, "grad_dtype": "bf16", **keys}
    return resolve(PlanOptions(model, layout=layout, machine="h200", **said))


def estimated(layout: str = "dp=1", model: str = "llama-3.1-8b", **keys: Any) -> Estimate:
    plan = plan_of(layout, model, **keys)
    setting, _ = estimate_setting(H200, plan.precision, 0.0, "compiled", 1.0)
    return estimate_plan(plan, setting)


@pytest.mark.parametrize(("keys", "gib", "tokens"), MEASURED)
def test_a_step_on_an_h200(keys: dict[str, Any], gib: float, tokens: float) -> None:
    """Memory within 2%, time within 5%."""
    found = estimated(train=Recipe(states="bf16"), **keys)
    reserved = found.total - found.memory["master"] - found.setting.stack.memory.context_bytes
    assert reserved / GIB == pytest.approx(gib, rel=0.02)
    parameters = found.memory["master"] / 4
    update = parameters * BYTES_OF_UPDATE / (H200.memory_bandwidth * H200.efficiency.memory)
    step = found.step - found.parts["optimizer"] + update
    assert 8192 / step == pytest.approx(tokens, rel=0.05)


def test_where_the_time_goes() -> None:
    plain, tensor, block = (estimated(**keys) for keys, _, _ in MEASURED)
    assert "rounding" not in plain.parts and "rounding" not in plain.breakdown()
    assert tensor.parts["rounding"] > block.parts["rounding"] > 0  # a maximum is one more pass
    assert plain.parts["products"] > block.parts["products"] > tensor.parts["products"]
    for part in ("attention", "head", "optimizer"):
        assert plain.parts[part] == tensor.parts[part] == block.parts[part]
    assert tensor.breakdown()["rounding"] == tensor.parts["rounding"]


def test_weights_are_rounded_once_a_step() -> None:
    """But at every use where ZeRO-3 gathers them for every microbatch, which keeps none of them."""
    one, four = (
        estimated(precision="fp8", microbatches=number).parts["rounding"] for number in (1, 4)
    )
    assert one < four < 3.5 * one
    kept, gathered = (
        estimated("dp=8", precision="fp8", zero=3, gather=gather, microbatches=4)
        for gather in ("step", "microbatch")
    )
    assert gathered.parts["rounding"] > 1.3 * kept.parts["rounding"]
    plain = estimated("dp=8", zero=3, gather="microbatch", microbatches=4)
    assert gathered.memory["weights"] == plain.memory["weights"]
    assert kept.memory["weights"] - plain.memory["weights"] > 12 * GIB


def test_maxima_over_ranks_take_time() -> None:
    """Tensorwise alone."""
    plain, tensor, block = (estimated("cp=4", **keys).parts["tp"] for keys, _, _ in MEASURED)
    assert tensor > block == plain == 0


def test_gathers_of_codes_take_less_time() -> None:
    """A byte for two, of a quarter of the tp traffic; blockwise moves values."""
    plain, tensor, block = (
        estimated("tp=4", tp_overlap=0, **keys).parts["tp"] for keys, _, _ in MEASURED
    )
    assert 0.6 * block < tensor < 0.9 * block and block == plain


def test_layers_that_stay_in_bf16() -> None:
    none, two, all_ = (
        estimated(precision="fp8", fp8_skip=skip) for skip in ("0+0", "1+1", "16+16")
    )
    plain = estimated()
    assert none.step < two.step < all_.step == pytest.approx(plain.step)
    assert none.memory["weights"] > two.memory["weights"] > all_.memory["weights"]
    assert all_.memory == plain.memory


def test_weight_gradients_in_bf16_take_longer_and_save_inputs_as_they_are() -> None:
    fast, slow = (estimated(precision="fp8", fp8_wgrad=operands) for operands in ("fp8", "bf16"))
    assert slow.parts["products"] > 1.2 * fast.parts["products"]
    assert slow.parts["rounding"] < fast.parts["rounding"]
    assert slow.memory["activations"] > fast.memory["activations"]


def test_deferred_weight_gradients_wait_as_codes() -> None:
    """One byte for two, of inputs and gradients of linears."""
    keys = {"schedule": "zb-h1", "microbatches": 8}
    plain, rounded = (
        estimated("pp=4", **keys, **more).memory["activations"]
        for more in ({}, {"precision": "fp8"})
    )
    assert 0.5 * plain < rounded < 0.75 * plain


MIXTRAL: dict[str, Any] = {"model": "mixtral-8x7b", "set": {"layers": "4"}, "ep_nodes": 1}


def test_routed_experts_multiply_in_fp8_and_their_weight_gradients_in_bf16() -> None:
    """So experts take more than two thirds of what they took. Half of their traffic is codes."""
    plain, rounded = (
        estimated("dp=8 ep=8", zero=1, **MIXTRAL, **more) for more in ({}, {"precision": "fp8"})
    )
    assert 0.66 * plain.parts["experts"] < rounded.parts["experts"] < 0.8 * plain.parts["experts"]
    assert 0.7 * plain.parts["ep"] < rounded.parts["ep"] < 0.8 * plain.parts["ep"]
    experts = 4 * 3 * 4096 * 14336  # one of them in every layer
    more = rounded.memory["weights"] - plain.memory["weights"]
    assert more > 2 * experts


def test_experts_have_their_own_scales_whatever_linears_have() -> None:
    """Blocks slow linears down, and `fp8_wgrad` says nothing of experts."""
    tensor, block, wide = (
        estimated("dp=8 ep=8", zero=1, precision="fp8", **MIXTRAL, **more).parts["experts"]
        for more in ({}, {"fp8": "blockwise"}, {"fp8_wgrad": "bf16"})
    )
    assert tensor == block == wide


def test_skipped_layers_leave_their_experts_in_bf16() -> None:
    plain = estimated("dp=8 ep=8", zero=1, **MIXTRAL)
    skipped = estimated("dp=8 ep=8", zero=1, precision="fp8", fp8_skip="2+2", **MIXTRAL)
    assert skipped.step == pytest.approx(plain.step) and skipped.memory == plain.memory


def test_weights_of_experts_that_do_not_stay_are_rounded_at_every_use() -> None:
    kept, gathered = (
        estimated("dp=8 ep=4", zero=3, gather=gather, microbatches=4, precision="fp8", **MIXTRAL)
        for gather in ("step", "microbatch")
    )
    assert gathered.parts["rounding"] > 1.3 * kept.parts["rounding"]
    assert kept.memory["weights"] > gathered.memory["weights"]


def test_gathers_of_codes_are_half_of_values() -> None:
    """ZeRO-3, tensorwise: of dense linears. Where nothing hides it, traffic takes half as long."""
    plain, tensor, block = (
        estimated("dp=8", zero=3, gather="microbatch", prefetch=0, **keys).parts["dp"]
        for keys, _, _ in MEASURED
    )
    assert tensor < 0.8 * block and block == pytest.approx(plain, rel=0.1)


def test_what_is_rounded_is_said() -> None:
    said = Fp8().describe()
    assert "routed experts have one scale for a row" in said
    assert said.endswith("embedding, head, router, norms and attention are not")
    assert Fp8("nvfp4").describe().endswith("norms, attention and routed experts are not")


def test_few_kv_heads_leave_every_layout_in_a_search() -> None:
    """Ranks that replicate KV heads are none where tp is below them: a group of no rank had no
    time, and took all such layouts out of the search."""
    keys: dict[str, Any] = {"machine": "h100", "gpus": 64, "precision": "fp8", "top": 1}
    few = search("llama-3.1-8b", kv_heads=4, **keys)
    alone = search("llama-3.1-8b", kv_heads=4, fix="tp=1", **keys)
    assert few.best.estimate is not None and alone.best.estimate is not None
    assert few.best.estimate.step <= 1.03 * alone.best.estimate.step


def test_codes_of_a_unit_that_is_used_are_gone_in_a_backward() -> None:
    """Whether or not it computes a forward again. Of the unit ahead, one byte a weight and this
    rank's shard of them are beside the values; with blocks values are gathered."""
    keys: dict[str, Any] = {"microbatches": 2, "zero": 3, "gather": "microbatch", "seq": 512}
    keys |= {"layout": "dp=4", "set": {"layers": "4", "vocab": "512"}, "precision": "fp8"}
    setting, _ = estimate_setting(machine.load("h200"), "fp8", 0.0, "compiled", 1.0)

    def gathered(**said: str) -> float:
        plan = resolve(PlanOptions("llama-3.2-1b", **keys, **said))
        return rank_memory(plan, setting, 0)["prefetch"]

    layer = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192
    for recompute in ("none", "selective", "full"):
        codes, values = (
            gathered(recompute=recompute),
            gathered(recompute=recompute, fp8="blockwise"),
        )
        assert codes - values == pytest.approx(1.25 * layer, rel=1e-3)
