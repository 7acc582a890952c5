"""Plans: defaults, derivation, the strict TOML and its way back."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.core.errors import BadFile, FivefoldError, IllegalLayout
from fivefold.core.model.recompute import StageRecompute
from fivefold.core.plan.plan import Plan, PlanOptions, options_from, read, resolve
from fivefold.core.schedule import catalog
from fivefold.core.schedule.definition import Family


def plan(model: str = "tiny", *, small: bool = False, **options: object) -> Plan:
    return resolve(PlanOptions(model=model, **options), small=small)  # type: ignore[arg-type]


def test_defaults() -> None:
    resolved = plan(layout="dp=2 pp=2")
    assert (resolved.layout.zero, resolved.layout.sp, resolved.layout.context) == (
        1,
        True,
        "zigzag",
    )
    assert (resolved.batch.microbatches, resolved.batch.microbatch_size) == (4, 1)
    assert resolved.batch.sequences == 2 * 4 * 1
    assert resolved.batch.seq == 2048  # the model's, below 8192
    assert plan(layout="dp=2").layout.zero == 3
    assert plan("llama-3.1-8b", layout="dp=2").batch.seq == 8192


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "chunks"),
    [
        ("1f1b", 3, 6, 1),
        ("interleaved", 3, 6, 2),
        ("dualpipe", 2, 4, 1),
        ("zb-v", 4, 8, 2),
        ("auto", 4, 8, 2),
    ],
)
def test_microbatches_default_to_the_smallest_legal(
    schedule: str, stages: int, microbatches: int, chunks: int
) -> None:
    resolved = plan(layout=f"pp={stages}", schedule=schedule, small=True)
    assert (resolved.batch.microbatches, resolved.layout.chunks) == (microbatches, chunks)
    assert resolved.schedule.num_microbatches == microbatches


def test_small_runs_get_a_short_sequence_and_enough_layers() -> None:
    resolved = plan(layout="tp=2 cp=3 pp=6", schedule="zb-v", small=True)
    assert resolved.batch.seq == 36  # zigzag with cp=3 and sp with tp=2: a multiple of 6, from 32
    assert resolved.shape.layers == 12
    assert "12 layers" in resolved.notes[0]
    with pytest.raises(IllegalLayout, match="12 stages for 8 layers"):
        plan(layout="pp=6", schedule="zb-v")


def test_batch_that_the_schedule_cannot_run_names_the_nearest() -> None:
    with pytest.raises(IllegalLayout, match="multiple of the stages") as caught:
        plan(layout="dp=2 pp=4", schedule="interleaved", batch=12)
    assert "nearest: 4 stages, 8 microbatches, 2 chunks" in str(caught.value)
    with pytest.raises(IllegalLayout, match="use 12 or 14"):
        plan(layout="dp=2 pp=4", batch=13)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "tp=3 pp=2", "schedule": "dualpipe"},
        {"layout": "pp=3", "schedule": "dualpipe"},
        {"layout": "pp=16", "schedule": "dualpipe", "batch": 8},
        {"layout": "tp=3 pp=4", "schedule": "interleaved", "microbatches": 4},
        {"layout": "tp=3", "schedule": "interleaved", "microbatches": 4},
        {"layout": "tp=3 pp=2", "schedule": "zb-v", "chunks": 2, "batch": 6},
        {"layout": "dp=3", "batch": 8, "microbatches": 4},
        {"layout": "dp=5 pp=2", "batch": 12, "microbatch_size": 2, "schedule": "interleaved"},
        {"layout": "dp=11", "batch": 8, "microbatches": 8, "schedule": "zb-interleaved"},
    ],
)
def test_the_nearest_layouts_are_legal_with_the_same_options(options: dict[str, object]) -> None:
    with pytest.raises(IllegalLayout) as caught:
        plan(**options)
    assert len(caught.value.nearest) == 3
    for near in caught.value.nearest:
        plan(**{**options, "layout": near.split("  (")[0]})


@pytest.mark.parametrize("key", ["seq", "microbatches", "microbatch_size", "batch", "gpus"])
@pytest.mark.parametrize("number", [0, -1, 10**25])
def test_absurd_numbers_get_one_reason_with_the_limit(key: str, number: int) -> None:
    with pytest.raises(IllegalLayout) as caught:
        plan(layout="pp=2", **{key: number})
    (reason,) = caught.value.reasons
    assert reason.startswith(f"{key}={number}: give a whole number from 1 to 1,0")


@pytest.mark.parametrize(("chunks", "rule"), [(0, "at least 1"), (10**25, "from 1 to 64")])
def test_absurd_chunks_are_refused(chunks: int, rule: str) -> None:
    with pytest.raises(IllegalLayout, match=rule):
        plan(layout="pp=2", chunks=chunks)


def test_illegal_layouts_list_all_reasons_and_three_ways_out() -> None:
    with pytest.raises(IllegalLayout) as caught:
        plan("tiny-moe", layout="tp=3 ep=5")
    assert len(caught.value.reasons) >= 4
    assert len(caught.value.nearest) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "dp=2x2 tp=2 pp=2 cp=2", "schedule": "interleaved", "recompute": "full:2"},
        {"layout": "tp=4", "sp": False, "seq": 64, "batch": 6, "microbatch_size": 3},
        {"layout": "dp=2", "set": {"kv_heads": "1", "tied": "true"}, "packed": True, "zero": 2},
        {"layout": "pp=2 dp=4 order=tp-cp-pp-dp", "machine": "h100", "gpus": 8},
        {"layout": "pp=4", "schedule": "auto", "stage_layers": "1,1,1,1,1,1,1,1"},
        {"layout": "dp=2 pp=2", "stage_layers": "5,3", "zero": 3, "gather": "microbatch"},
        {"model": "tiny-moe", "layout": "dp=4 ep=4", "balance": "aux-seq:0.5+z", "ep_nodes": 2},
        {"model": "deepseek-v3", "layout": "dp=64 ep=64", "machine": "h100"},
    ],
)
def test_plan_files_read_back_to_the_same_plan(options: dict[str, object], tmp_path: Path) -> None:
    first = plan(**options)
    path = tmp_path / "plan.toml"
    path.write_text(first.to_toml(), encoding="utf-8")
    second = resolve(read(path))
    assert second == first
    assert second.to_toml() == first.to_toml()


def test_the_command_line_overrides_a_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('model = "tiny"\nlayout = "dp=2"\nzero = "SHARD_GRAD_OP"\n[set]\nlayers = 4\n')
    options = options_from(str(path), {"layout": "dp=4", "zero": None, "set": {"vocab": "251"}})
    resolved = resolve(options)
    assert (resolved.layout.dp, resolved.layout.zero) == (4, 3)  # derived anew for the new layout
    assert resolve(options_from(str(path), {"layout": "dp=2"})).layout.zero == 2
    assert resolve(options_from(str(path), {"layout": "dp=4", "zero": 1})).layout.zero == 1
    assert (resolved.shape.layers, resolved.shape.vocab) == (4, 251)


def test_a_new_schedule_or_layout_does_not_inherit_what_was_derived(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan(layout="pp=2", schedule="interleaved", zero=2).to_toml())
    other = resolve(options_from(str(path), {"schedule": "zb-h1"}))
    assert (other.layout.chunks, other.batch.microbatches, other.layout.zero) == (1, 4, 2)
    deeper = resolve(options_from(str(path), {"layout": "pp=4"}))
    assert (deeper.layout.chunks, deeper.batch.microbatches, deeper.layout.zero) == (2, 8, 1)
    kept = resolve(options_from(str(path), {"layout": "pp=4", "microbatches": 12}))
    assert kept.batch.microbatches == 12


def test_paths_in_a_plan_file_start_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "mine.csv").write_text(catalog.make("zb-h1", 2, 5).to_csv())
    (tmp_path / "mine.toml").write_text('base = "h100"\nprice_per_gpu_hour = 2.5\n')
    monkeypatch.chdir(tmp_path)
    first = plan(layout="pp=2", schedule="mine.csv", machine="mine.toml")
    (tmp_path / "inner" / "plan.toml").write_text(first.to_toml(Path("inner")))
    order = first.schedule.order
    monkeypatch.chdir("/")
    again = resolve(read(tmp_path / "inner" / "plan.toml"))
    assert again.schedule.order == order
    assert again.machine == first.machine
    assert again.options.model == "tiny"


def test_stages_follow_cost_or_what_is_said() -> None:
    wide = {"vocab": "65536"}
    assert [len(layers) for layers in plan(layout="pp=2", set=wide).stages] == [7, 1]
    said = plan(layout="pp=2", set=wide, stage_layers="3,5")
    assert (said.stage_layers, said.stages) == ((3, 5), (range(3), range(3, 8)))
    assert plan(layout="dp=2").stages == (range(8),)
    derived = plan(layout="pp=2")
    deeper = replace(derived, shape=replace(derived.shape, layers=10))
    assert deeper.stages == (range(5), range(5, 10))


def test_wrong_stage_layers_are_told_with_the_rest() -> None:
    with pytest.raises(IllegalLayout) as caught:
        plan(layout="pp=2 tp=3", stage_layers="3,3,3")
    count, total = (each for each in caught.value.reasons if "stage_layers" in each)
    assert count.endswith("is for 3 stages and the pipeline has 2: give 2 numbers")
    assert total.endswith("the model has 8 layers: give numbers that sum to 8")
    assert any("tp=3 does not divide heads" in each for each in caught.value.reasons)
    with pytest.raises(IllegalLayout, match="such as 7,8,8,7"):
        plan(layout="pp=2", stage_layers="four,four")
    with pytest.raises(IllegalLayout, match="for 2 stages") as caught:
        plan(layout="pp=4", stage_layers="4,4")
    for near in caught.value.nearest:
        assert len(plan(layout=near.split("  (")[0], stage_layers="4,4").stages) == 2


def test_stage_layers_outlive_no_change_of_what_they_fit(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan(layout="pp=2", stage_layers="3,5").to_toml())
    changes = [
        {"layout": "pp=4"},
        {"schedule": "zb-v"},
        {"chunks": 1, "schedule": "gpipe"},
        {"set": {"layers": "10"}},
    ]
    for said in changes:
        assert resolve(options_from(str(path), said)).stage_layers is None, said
    for said in ({}, {"microbatches": 8}, {"layout": "pp=2"}, {"chunks": 1}):
        assert resolve(options_from(str(path), said)).stage_layers == (3, 5), said
    both = {"layout": "pp=4", "stage_layers": "1,2,2,3"}
    assert resolve(options_from(str(path), both)).stage_layers == (1, 2, 2, 3)


def test_a_pipeline_keeps_gathered_weights_over_a_step(tmp_path: Path) -> None:
    assert plan(layout="dp=2 pp=2", zero=3).gather == "step"
    assert plan(layout="dp=2").gather == "microbatch"
    assert plan(layout="dp=2", gather="step").gather == "step"
    path = tmp_path / "plan.toml"
    path.write_text(plan(layout="dp=2 pp=2", gather="microbatch").to_toml())
    assert resolve(read(path)).gather == "microbatch"
    assert resolve(options_from(str(path), {"layout": "dp=2 pp=4"})).gather == "step"
    with pytest.raises(FivefoldError, match="did you mean step"):
        plan(layout="dp=2", gather="steps")


def test_a_search_settles_the_number_of_chunks() -> None:
    options = {"layout": "pp=2", "schedule": "auto", "microbatches": 5}
    found = plan(**options, chunks=3)
    assert (found.layout.chunks, found.schedule.num_chunks, len(found.stages)) == (2, 2, 4)
    assert resolve(found.options) == found
    assert plan(**options, chunks=3, stage_layers="2,2,2,2").stage_layers == (2, 2, 2, 2)
    with pytest.raises(FivefoldError, match="the pipeline has 4: give 4 numbers"):
        plan(**options, chunks=3, stage_layers="3,1,1,1,1,1")


def test_a_schedule_is_made_once() -> None:
    options = {"layout": "pp=4", "schedule": "auto"}
    assert plan(**options).schedule is plan(**options).schedule
    assert plan(layout="pp=4", schedule="AUTO").schedule is plan(**options).schedule


def test_a_file_of_a_schedule_is_read_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zb-h1", "gpipe"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.csv").write_text(catalog.make(name, 2, 4).to_csv())
        monkeypatch.chdir(tmp_path / name)
        mine = plan(layout="pp=2", schedule="mine.csv")
        assert mine.schedule.order == catalog.make(name, 2, 4).order


def test_without_a_pipeline_any_schedule_is_one_rank_after_itself() -> None:
    for name in ("interleaved", "zb-v", "dualpipe", "auto"):
        alone = plan(layout="dp=2", schedule=name, microbatches=2)
        assert alone.schedule.texts() == [["0F0", "0B0", "0F1", "0B1"]]
        assert alone.stages == (range(8),)


def test_ranks_of_a_file_may_hold_different_numbers_of_stages(tmp_path: Path) -> None:
    path = tmp_path / "lopsided.csv"
    path.write_text("0F0 2F0 2B0 0B0\n1F0 1B0\n")
    assert [len(layers) for layers in plan(layout="pp=2", schedule=str(path)).stages] == [3, 3, 2]
    said = plan(layout="pp=2", schedule=str(path), stage_layers="1,6,1")
    assert said.stages == (range(1), range(1, 7), range(7, 8))
    with pytest.raises(IllegalLayout, match="the pipeline has 3: give 3 numbers"):
        plan(layout="pp=2", schedule=str(path), stage_layers="2,2,2,2")


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules_refuse_what_has_one_age_of_weights(name: str) -> None:
    with pytest.raises(IllegalLayout) as caught:
        plan(layout="pp=2", schedule=name, zero=2, set={"tied": "true"})
    tied, zero = caught.value.reasons
    assert "untie it with --set tied=false" in tied
    assert "use zero=0 or 1" in zero
    for stage in (0, 1):
        assert plan(layout="dp=2 pp=2", schedule=name, zero=stage).schedule.asynchronous
    alone = plan(layout="dp=2", schedule=name, zero=3, set={"tied": "true"})
    assert not alone.schedule.asynchronous


def test_asynchronous_schedules_are_noted() -> None:
    assert any("ASYNCHRONOUS" in note for note in plan(layout="pp=2", schedule="pipedream").notes)
    assert plan(layout="pp=2").notes == ()


def test_experts_lie_on_as_many_nodes_as_the_machine_has_for_them(tmp_path: Path) -> None:
    """Eight GPUs to a node; without a machine nobody knows of nodes."""
    assert plan("deepseek-v3", layout="dp=64 ep=64", machine="h100").ep_nodes == 8
    assert plan("deepseek-v3", layout="dp=64 ep=8", machine="h100").ep_nodes == 1
    assert plan("deepseek-v3", layout="dp=64 ep=64", machine="h100", ep_nodes=2).ep_nodes == 2
    assert plan("deepseek-v3", layout="dp=64 ep=64").ep_nodes == 1
    path = tmp_path / "plan.toml"
    path.write_text(plan("deepseek-v3", layout="dp=64 ep=64", machine="h100").to_toml())
    # Another layout has other nodes.
    changed = resolve(options_from(str(path), {"layout": "dp=64 ep=16"}))
    assert changed.ep_nodes == 2


def test_unknown_and_wrong_keys_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('model = "tiny"\nlayuot = "dp=2"\nchunks = "two"\nprecision = "bf61"\n')
    with pytest.raises(BadFile) as caught:
        read(path)
    text = str(caught.value)
    assert "did you mean layout" in text
    assert "chunks = 'two': expected int" in text
    assert "did you mean bf16" in text


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="no such plan file"):
        options_from(str(tmp_path / "none.toml"), {})
    broken = tmp_path / "broken.toml"
    broken.write_text("model = \n")
    with pytest.raises(BadFile, match="not valid TOML"):
        read(broken)


def test_schedule_from_a_file_brings_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(catalog.make("zb-h1", 2, 5).to_csv(), encoding="utf-8")
    resolved = plan(layout="pp=2", schedule=str(path))
    assert resolved.batch.microbatches == 5
    assert resolved.schedule.order == catalog.make("zb-h1", 2, 5).order
    with pytest.raises(IllegalLayout, match="the file is for 2 stages"):
        plan(layout="pp=4", schedule=str(path))
    with pytest.raises(IllegalLayout, match="the file is for 5 microbatches"):
        plan(layout="pp=2", schedule=str(path), microbatches=4)


RULES = ["none", "selective", "full", "full:4", "norm+mlp", "selective,full@0-1", "none,act@3"]
RULES += ["full-but-attention", "full:2-but-attention", "full,full-but-attention@0-1"]


@pytest.mark.parametrize("text", RULES)
def test_recompute_text(text: str) -> None:
    assert str(StageRecompute.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ful",
        "full-but",
        "norm-but-attention",
        "full:0",
        "selective:2",
        "full:x",
        "norm+norm",
        "a+b",
    ],
)
def test_recompute_refuses(text: str) -> None:
    with pytest.raises(FivefoldError, match="full:K"):
        StageRecompute.parse(text)


@pytest.mark.parametrize("text", ["full,none", "full@2-1"])
def test_recompute_refuses_two_rules_for_a_stage(text: str) -> None:
    with pytest.raises(FivefoldError, match="RULE@FIRST-LAST"):
        StageRecompute.parse(text)


def test_recompute_of_a_stage_that_is_not_there() -> None:
    assert str(plan(layout="pp=2", recompute="none,full@0").recompute.of(0)) == "full"
    with pytest.raises(FivefoldError, match="there is no stage 2, the stages of this layout are 0"):
        plan(layout="pp=2", recompute="full@2")


@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.name)
def test_a_plan_can_be_sent_to_another_process(family: Family) -> None:
    """Also after an estimate, which asks what is known of its schedule."""
    sent = plan(layout="pp=2", schedule=family.name, set={"layers": "8"})
    assert (sent.family, len(sent.stages)) == (family, sent.schedule.num_stages)
    assert pickle.loads(pickle.dumps(sent)) == sent
