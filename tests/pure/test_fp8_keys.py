"""fp8: keys, defaults, refusals, and layouts that cut a block."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.core.errors import FivefoldError, IllegalLayout
from fivefold.core.layout.fp8 import Fp8
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.rules import _cut_blocks
from fivefold.core.model import presets as models
from fivefold.core.plan.great_runs import parse_settings
from fivefold.core.plan.plan import PlanOptions, read, resolve

LLAMA = models.load("llama-3.1-8b")
BLOCKS = Fp8.parse("blockwise")


def resolved(layout: str = "dp=1", **keys: Any) -> Fp8 | None:
    return resolve(PlanOptions("llama-3.1-8b", layout, precision="fp8", **keys)).fp8


def test_defaults_follow_what_shares_a_scale() -> None:
    assert resolved() == Fp8("tensorwise", "fp8", "e5m2", 0, 0)
    assert resolved(fp8="blockwise") == Fp8("blockwise", "fp8", "e4m3", 0, 0)
    assert resolve(PlanOptions("llama-3.1-8b")).fp8 is None


def test_keys_are_read_back_from_a_plan_file(tmp_path: Any) -> None:
    keys = {"fp8": "blockwise", "fp8_wgrad": "bf16", "fp8_gradients": "e5m2", "fp8_skip": "1+2"}
    plan = resolve(PlanOptions("llama-3.1-8b", precision="fp8", **keys))
    file = tmp_path / "plan.toml"
    file.write_text(plan.to_toml(tmp_path))
    assert resolve(read(file)).fp8 == plan.fp8 == Fp8("blockwise", "bf16", "e5m2", 1, 2)
    assert parse_settings({"precision": "fp8", **keys}).plan == {"precision": "fp8", **keys}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"fp8": "delayed"}, "checkpoints and resharding"),
        ({"fp8": "static"}, "tensorwise or blockwise"),
        ({"fp8": "blockwize"}, "did you mean blockwise"),
        ({"fp8_wgrad": "fp16"}, "fp8_wgrad"),
        ({"fp8_gradients": "e3m4"}, "e4m3"),
        ({"fp8_skip": "2"}, "such as 1+1"),
        ({"fp8_skip": "-1+1"}, "such as 1+1"),
    ],
)
def test_illegal_keys_are_refused_with_a_way_out(keys: dict[str, str], said: str) -> None:
    with pytest.raises(FivefoldError, match=said.replace("+", r"\+")):
        resolved(**keys)


def test_keys_without_the_precision_are_refused() -> None:
    with pytest.raises(FivefoldError, match="fp8_skip = 1\\+1 has no effect with precision = bf16"):
        resolve(PlanOptions("llama-3.1-8b", fp8_skip="1+1"))


def test_first_and_last_layers_are_left_out() -> None:
    rounded = [layer for layer in range(6) if Fp8(first=1, last=2).rounds(layer, 6)]
    assert rounded == [1, 2, 3]
    assert Fp8(first=1, last=2).rounds(6, 6)  # of multi-token prediction


def problems(layout: str, seq: int = 8192, rounding: Fp8 = BLOCKS, **changes: str) -> list[str]:
    shape = models.with_overrides(LLAMA, changes)
    return [*_cut_blocks(rounding, Layout.parse(layout), shape, seq)]


def test_one_device_cuts_nothing() -> None:
    assert not problems("dp=8 pp=4", 1000, ffn="1000")


def test_widths_that_tp_cuts_inside_of_a_block() -> None:
    assert not problems("tp=8", ffn="11264")
    (found,) = problems("tp=8", ffn="11520")
    assert found == (
        "tp=8 cuts the MLP of 11520 into shards of 1440, inside of a block of 128: "
        "the nearest legal degree is tp=2"
    )
    assert not problems("tp=2", ffn="11520")
    assert not problems("tp=8", ffn="11520", rounding=Fp8())


def test_heads_that_are_replicated_are_not_cut_further() -> None:
    assert not problems("tp=16", 16384)  # 8 key heads of 128 on 16 ranks
    (found,) = problems("tp=8", head_dim="64")
    assert "k and v of 512 into shards of 64" in found and found.endswith("tp=4")


def test_tokens_that_cp_or_sp_cuts_inside_of_a_block() -> None:
    assert not problems("cp=4", 1024)
    (found,) = problems("cp=4", 512)
    assert "chunks of 64" in found and "cp=2, the nearest length 1024" in found
    (found,) = problems("tp=8 cp=2", 1024)
    assert "shards of 64" in found and "tp=4, the nearest length 2048" in found
    assert not problems("tp=8 cp=4", 512, rounding=Fp8.parse("blockwise", "bf16"))


def test_widths_of_experts_and_latents() -> None:
    shape = models.load("deepseek-v3")
    assert not [*_cut_blocks(BLOCKS, Layout.parse("dp=8 ep=8"), shape, 4096)]
    rows_have_scales = [*_cut_blocks(BLOCKS, Layout.parse("dp=32 ep=2 etp=32"), shape, 4096)]
    assert not rows_have_scales


def test_a_layout_that_cuts_a_block_is_refused() -> None:
    with pytest.raises(IllegalLayout, match="the nearest legal degree is tp=4"):
        resolved("tp=8", fp8="blockwise", set={"head_dim": "64"})
