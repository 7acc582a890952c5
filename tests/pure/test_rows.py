"""Rows of measured runs are read strictly: what they leave out is counted, what is unknown refused,
and neither ids nor notes steer an estimate. Then each source without its own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_score import PUBLISHED, refuse, row, rows, run, run_of

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.tables import read_toml, to_toml
from fivefold.cost.grid import RECOMPUTE, SCHEDULES
from fivefold_score.left_out import error_bars, leave_one_out, quantile, rescore
from fivefold_score.outcome import ScoreResult, score, score_row
from fivefold_score.published import Case, cases
from fivefold_score.rows import read_runs
from fivefold_score.scoring import summary
from fivefold_score.spelling import is_usual_network, network_rate, source_of

BARE: dict[str, Any] = {"id": "nobody-1", "source": None, "notes": None}


def case(**changes: Any) -> Case:
    return cases(row(**changes))[0]


def test_neither_ids_nor_notes_steer_an_estimate() -> None:
    plain = score_row(row(**BARE))
    for changes in (
        {"id": "nobody-14050001", "notes": "full recompute of 2 layers per (virtual) stage"},
        {"notes": "A2A overlap; full_iteration graphs; FSDP; compile"},
        {"source": "TorchTitan and nanotron and DeepSpeed"},
    ):
        found = score_row(row(**{**BARE, **changes}))
        assert (found.seconds, found.gib) == (plain.seconds, plain.gib)
        assert found.assumptions == plain.assumptions


def test_the_stack_is_said_or_assumed() -> None:
    said = case(**BARE, stack="nanotron")
    assert said.stack.name == "nanotron"
    assert not any("stack" in each for each in said.assumptions)
    family = case()
    assert family.stack.name == "megatron-2021"
    assert "stack is not said: megatron-2021, as its family" in family.assumptions
    assert source_of(row(id="hfbench-1")) == "hugging-face" and source_of(row(**BARE)) == "nobody"
    with pytest.raises(FivefoldError, match="unknown stack 'megatrom'"):
        case(stack="megatrom")


@pytest.mark.parametrize(
    ("changes", "stack"),
    [
        ({"precision": "fp16"}, "megatron-2021"),
        ({"precision": None}, "megatron-2021"),
        ({"precision": "bf16"}, "eager"),
        ({"precision": "bf16", "gpu": "h100-sxm"}, "megatron"),
        ({"precision": "bf16", "zero": 3}, "fsdp"),
        ({"precision": "bf16", "zero": 3, "gpu": "h100-sxm"}, "torchtitan"),
        ({"precision": "bf16", "schedule": "zb1p", "pp": 2, "gpus": 16}, "zero-bubble"),
        ({"precision": "bf16", "gpu": "tpu_v4"}, "xla"),
    ],
)
def test_an_unknown_family_has_the_nearest_stack(changes: dict[str, Any], stack: str) -> None:
    found = case(**BARE, **changes)
    assert found.stack.name == stack
    assert any(each.startswith(f"stack is not said: {stack}, by") for each in found.assumptions)


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("NVLink4 + 8x400 Gb/s IB per node", 50e9),
        ("4x100 Gb RoCE per node", 6.25e9),
        ("1600 Gb/s node-node RoCE", 25e9),
        ("400 Gb/s RDMA per GPU; H100 96GB HBM2e 2.4 TB/s", 50e9),
        ("NVLink 900 GB/s, 25 GB/s a GPU", 25e9),
        ("IB 8x50 GB/s per node", 50e9),
        ("AWS EFA 400 Gb/s", 6.25e9),
        ("NVLink 900 GB/s", None),
        ("DGX H100 (fabric not stated)", None),
    ],
)
def test_the_rate_of_a_network_in_words(words: str, rate: float | None) -> None:
    assert network_rate(words, 8) == rate


def test_an_unknown_network_is_an_assumption() -> None:
    many = {"gpus": 64, "dp": 8}
    unknown = case(**many, interconnect="string and tin cans")
    assert any("'string and tin cans' tells no bandwidth" in one for one in unknown.assumptions)
    silent = case(**many, interconnect=None)
    assert "interconnect is not said: the network of a100" in silent.assumptions
    for stated in ({"interconnect": "4x100 Gb RoCE per node"}, {"network_gb_s": 6.25}):
        found = case(**many, **stated)
        assert found.machine.tiers[-1].link.bandwidth == 6.25e9
        assert not any("network" in one for one in found.assumptions)
    assert is_usual_network("Selene: NVLink3") and not is_usual_network("DGX (fabric not stated)")


def test_precisions_are_known_or_refused() -> None:
    assert case(precision="fp8 (per-tensor scaling)", gpu="h100-sxm").precision == "fp8"
    assert case(precision="mxfp8", gpu="gb200", gpus_per_node=4).precision == "mxfp8"
    assert "precision is not said: bf16" in case(precision=None).assumptions
    assert any(
        "precision = 'bf16 mixed'" in one for one in case(precision="bf16 mixed").assumptions
    )
    with pytest.raises(FivefoldError, match="unknown precision 'int4'"):
        case(precision="int4")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("activation", "swish", "unknown activation 'swish'"),
        ("recompute", "some", "unknown recompute 'some'"),
        ("schedule", "zigzag", "unknown schedule 'zigzag'"),
        ("zero", 4, "zero = 4"),
    ],
)
def test_unknown_words_are_refused(key: str, value: Any, words: str) -> None:
    with pytest.raises(FivefoldError, match=words):
        case(**{key: value, "pp": 2, "gpus": 16})
    skipped = score([row(**{key: value, "pp": 2, "gpus": 16})]).skipped
    assert [one.id for one in skipped] == ["korth-22b-full"]


def test_spellings_of_one_thing() -> None:
    assert case(gpu="A100-80GB").machine.name == "a100"
    assert case(precision="BFloat16").precision == "bf16"
    many = {"pp": 2, "gpus": 16, "dp": 1}
    for words, name in (("1F1B, overlapped", "1f1b"), ("Interleaved 1F1B (ours)", "interleaved")):
        found = case(**many, schedule=words, vpp=2 if name == "interleaved" else None)
        assert SCHEDULES[int(found.grid.schedule.item())] == name
    assert SCHEDULES[int(case(**many, schedule="zb2p").grid.schedule.item())] == "zb-h2"
    assert case(schedule="whatever").stack.name == "megatron-2021"  # one rank has none
    assert RECOMPUTE[int(case(recompute="Full (all)").grid.recompute.item())] == "full"


def test_unknown_keys_are_counted() -> None:
    found = case(micro_batchs=2, extra={"zero_group": 1, "cpu_offload_layers": 3})
    assert "unknown key 'micro_batchs' is passed over: did you mean micro_batch?" in [
        *found.assumptions
    ]
    assert "unknown key 'extra.cpu_offload_layers' is passed over" in found.assumptions


def test_the_number_of_parameters_tells_the_layers() -> None:
    sizes = {"layers": 16, "hidden": 2048, "ffn_hidden": 8192, "heads": 32, "kv_heads": 32}
    llama = case(**BARE, **sizes, vocab=131072, params_b=1.342)
    assert (llama.shape.activation, llama.shape.tied) == ("swiglu", True)
    gpt = case(**BARE, **sizes, vocab=131072, params_b=1.07)
    assert (gpt.shape.activation, gpt.shape.tied) == ("gelu", True)
    silent = case(**BARE, **sizes, vocab=131072, params_b=None)
    assert silent.shape.activation == "gelu"
    assert any(one.startswith("activation is not said") for one in silent.assumptions)
    said = case(**BARE, **sizes, vocab=131072, params_b=None, activation="swiglu", tied=False)
    assert (said.shape.activation, said.shape.tied) == ("swiglu", False)
    assert not any("activation" in one or "tied" in one for one in said.assumptions)


def test_assumptions_are_counted() -> None:
    outcomes = [
        run_of("x-1", 1.0, 1.0, assumptions=("a", "b")),
        run_of("x-2", 1.0, 1.0, assumptions=("a",)),
        run_of("x-3", 1.0, 1.0),
    ]
    found = summary(ScoreResult(outcomes))["assumptions"]
    assert found["rows"] == 2 and found["total"] == 3
    assert found["by_count"] == {"0": 1, "1": 1, "2": 1}
    assert found["kinds"] == {"a": 2, "b": 1}


# Each source left out


def test_a_run_is_scored_without_the_numbers_of_its_source() -> None:
    own = row(
        id="hfbench-1", gpu="h100-sxm", gpus=8, gpus_per_node=8, precision="bf16", vocab=51200
    )
    known = score_row(own)
    (left,) = rescore([known])
    assert left.seconds == score_row(own, "hugging-face").seconds
    assert left.seconds != known.seconds and left.gib != known.gib
    other = score_row(row())  # nothing was fitted to this source alone
    assert rescore([other]) == [other]


def test_every_source_has_the_same_weight() -> None:
    runs = [run_of(f"many-{i}", 1.1, 1.0) for i in range(9)] + [run_of("one-1", 1.5, 1.0)]
    bars = error_bars(runs)["time"]
    assert (bars["n"], bars["median"]) == (10, pytest.approx(0.1))
    assert bars["p90"] == pytest.approx(0.5)
    assert error_bars(runs)["memory"]["mean"] is None
    assert quantile([(3.0, 1.0), (1.0, 1.0), (2.0, 2.0)], 0.5) == 2.0
    assert quantile([], 0.5) is None


def test_figures_of_left_out_sources() -> None:
    runs = [run_of("a-1", 1.2, 1.0), run_of("b-1", 1.0, 1.0), run_of("vtrain-1", 2.0, 1.0)]
    runs = [
        run_of(one.name, one.seconds.low, 1.0, row={**one.row, "fully_specified": True})
        for one in runs
    ]
    found = leave_one_out(runs)
    assert found["time"]["mean"] == pytest.approx(0.4)
    assert found["published"]["n"] == 2 and found["published"]["mean"] == pytest.approx(0.1)
    assert found["by_source"]["a"]["time"]["mean"] == pytest.approx(0.2)


def test_the_left_out_figures_come_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    accuracy = tmp_path / "accuracy.toml"
    text = run(capsys, str(PUBLISHED), "--accuracy", str(accuracy))
    assert text.index("each source left out") < text.index("\nerror ")
    assert "numbers are fitted" in text and "rows have assumptions" in text
    bars = read_toml(accuracy)
    assert {"median", "p90", "n"} <= set(bars["time"]) and bars["time"]["n"] == 18
    assert "n" in bars["layouts"]
    table = json.loads(run(capsys, str(PUBLISHED), "--json"))
    left = table["leave_one_out"]
    assert {"n", "median", "mean", "p90"} <= set(left["time"])
    assert left["time"]["n"] == len(rows()) and set(left["by_source"]) == {"korth", "sc21"}
    assert left["new_source"]["time"]["median"] == pytest.approx(bars["time"]["median"], abs=1e-4)
    assert table["fitted"]["count"] == len(table["fitted"]["numbers"])
    assert table["assumptions"]["rows"] == 18


LATENTS = {"kv_rank": 512, "q_rank": 1536, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
CUT: dict[str, Any] = {
    **{"id": "nobody-2", "source": None, "notes": None, "stack": "megatron", "layers": 4},
    **{"model": "DeepSeek V3 cut to 4 layers", "hidden": 7168, "ffn_hidden": 2048, "heads": 128},
    **{"kv_heads": 128, "vocab": 129280, "experts": 256, "topk": 8, "seq_len": 4096},
    **{"gpu": "b200", "gpus": 8, "dp": 8, "tp": 1, "pp": 1, "ep": 8, "zero": 1, "params_b": None},
    **{"micro_batch": 1, "global_batch": 32, "recompute": "none", "precision": "bf16"},
    **{"activation": "swiglu", "tied": False},
}
OWN = {"mla": LATENTS, "ffn": 18432, "moe": {"first_dense": 1, "shared": 1}}


def test_a_row_is_priced_by_its_own_sizes_whatever_its_name() -> None:
    """A name like DeepSeek-V3 gave 61 layers to a run of 4: ten times its time."""
    named = case(**CUT)
    assert named.shape.layers == 4 and named.shape.mla is not None and named.shape.mtp == 0
    assert any("deepseek-v3" in each for each in named.assumptions)
    for model in ("DeepSeek V3 cut to 4 layers", "qwen3-30b", "whatever"):
        found = case(**{**CUT, "model": model}, shape=OWN)
        moe = found.shape.moe
        assert moe is not None and (moe.shared, moe.shared_ffn, moe.first_dense) == (1, 2048, 1)
        assert (found.shape.ffn, found.shape.head_dim, moe.ffn) == (18432, 192, 2048)
        assert not any("shape" in each for each in found.assumptions)
        assert found.shape.mla is not None and found.shape.mla.kv_rank == 512
    based = {"base": "deepseek-v3", "mtp": 0, "moe": {"first_dense": 1}}
    same = score_row(row(**{**CUT, "model": "whatever"}, shape=based))
    assert same.seconds == score_row(row(**CUT, shape=OWN)).seconds
    bare = case(**CUT, shape={})
    assert bare.shape.mla is None and bare.shape.moe is not None and not bare.shape.moe.shared


def test_the_software_of_a_row_changes_its_price() -> None:
    def seconds(**software: Any) -> float:
        fp8 = {"precision": "fp8"} if "fp8" in software else {}
        return score_row(row(**{**CUT, **fp8}, shape=OWN, software=software)).seconds.low

    plain = seconds()
    assert seconds(cuda_graphs=True) < plain
    assert seconds(compile=True) < seconds(compile=False)
    assert seconds(overlap={"ep": 1.0}) < plain < seconds(overlap={"ep": 0.0})
    assert seconds(overlap={"dp": False}) > plain
    assert seconds(fp8="tensorwise") < seconds(fp8="blockwise")
    tensor = {**CUT, "tp": 8, "dp": 1, "ep": 1, "sp": True}
    shown, hidden = (
        score_row(row(**tensor, shape=OWN, software={"overlap": {"tp": share}})).seconds.low
        for share in (0.0, 1.0)
    )
    assert hidden < shown
    staged = {**CUT, "pp": 2, "dp": 4, "ep": 4}
    waits, sends = (
        score_row(row(**staged, shape=OWN, software={"overlap": {"pp": said}})).seconds.low
        for said in (False, True)
    )
    assert sends < waits


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"shape": {"latents": 512}}, "unknown key 'shape.latents'"),
        ({"shape": {"moe": {"share": 1}}}, "unknown key 'shape.moe.share': did you mean shared"),
        ({"shape": {"mla": {"kv_rank": "512"}}}, "shape.mla.kv_rank = '512': expected int"),
        (
            {"shape": {"base": "deepseek-v33"}},
            "shape.base = 'deepseek-v33': did you mean deepseek-v3",
        ),
        ({"shape": {"layers": 61}}, "shape.layers = 61, but the row says layers = 4"),
        ({"software": {"graphs": True}}, "unknown key 'software.graphs': did you mean cuda_graphs"),
        ({"software": {"fp8": "row"}}, "software.fp8 = 'row': choose from blockwise"),
        ({"software": {"overlap": {"cp": True}}}, "unknown key 'software.overlap.cp'"),
        ({"software": {"overlap": {"tp": 1.5}}}, "give a share from 0 to 1"),
        ({"software": []}, "software = [] is not a JSON object"),
    ],
)
def test_shape_and_software_are_read_strictly(
    tables: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(row(**CUT, **tables)) + "\n", "utf-8")
    assert says in refuse(capsys, str(path))


def test_rows_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "runs.toml"
    said = row(**CUT, shape={**OWN, "layers": 4}, software={"cuda_graphs": True})
    text = to_toml({key: value for key, value in said.items() if value is not None})
    path.write_text(text, "utf-8")
    (found,) = read_runs([path]).rows
    assert found["layers"] == 4 and "layers" not in found["shape"]
    assert (
        score_row(found).seconds
        == score_row(row(**CUT, shape=OWN, software=said["software"])).seconds
    )
    path.write_text('[[run]]\nid = "a"\n[[run]]\nid = "b"\n', "utf-8")
    with pytest.raises(BadFile, match="run 1: achieved is null"):
        read_runs([path])
