"""Plans: defaults, derivation, the strict TOML and its way back."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.core.errors import BadFile, FivefoldError, IllegalLayout
from fivefold.core.plan import Plan, Recompute, Wishes, read, resolve, wishes_from
from fivefold.core.schedule import catalog


def plan(model: str = "tiny", *, small: bool = False, **wishes: object) -> Plan:
    return resolve(Wishes(model=model, **wishes), small=small)  # type: ignore[arg-type]


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
    assert resolved.make_schedule().num_microbatches == microbatches


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
    "wishes",
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
def test_the_nearest_layouts_are_legal_with_the_same_options(wishes: dict[str, object]) -> None:
    with pytest.raises(IllegalLayout) as caught:
        plan(**wishes)
    assert len(caught.value.nearest) == 3
    for near in caught.value.nearest:
        plan(**{**wishes, "layout": near.split("  (")[0]})


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
    "wishes",
    [
        {"layout": "dp=2x2 tp=2 pp=2 cp=2", "schedule": "interleaved", "recompute": "full:2"},
        {"layout": "tp=4", "sp": False, "seq": 64, "batch": 6, "microbatch_size": 3},
        {"layout": "dp=2", "set": {"kv_heads": "1", "tied": "true"}, "packed": True, "zero": 2},
        {"layout": "pp=2 dp=4 order=tp-cp-pp-dp", "machine": "h100", "gpus": 8},
    ],
)
def test_plan_files_read_back_to_the_same_plan(wishes: dict[str, object], tmp_path: Path) -> None:
    first = plan(**wishes)
    path = tmp_path / "plan.toml"
    path.write_text(first.to_toml(), encoding="utf-8")
    second = resolve(read(path))
    assert second == first
    assert second.to_toml() == first.to_toml()


def test_the_command_line_overrides_a_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('model = "tiny"\nlayout = "dp=2"\nzero = "SHARD_GRAD_OP"\n[set]\nlayers = 4\n')
    wishes = wishes_from(str(path), {"layout": "dp=4", "zero": None, "set": {"vocab": "251"}})
    resolved = resolve(wishes)
    assert (resolved.layout.dp, resolved.layout.zero) == (4, 3)  # derived anew for the new layout
    assert resolve(wishes_from(str(path), {"layout": "dp=2"})).layout.zero == 2
    assert resolve(wishes_from(str(path), {"layout": "dp=4", "zero": 1})).layout.zero == 1
    assert (resolved.shape.layers, resolved.shape.vocab) == (4, 251)


def test_a_new_schedule_or_layout_does_not_inherit_what_was_derived(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan(layout="pp=2", schedule="interleaved", zero=2).to_toml())
    other = resolve(wishes_from(str(path), {"schedule": "zb-h1"}))
    assert (other.layout.chunks, other.batch.microbatches, other.layout.zero) == (1, 4, 2)
    deeper = resolve(wishes_from(str(path), {"layout": "pp=4"}))
    assert (deeper.layout.chunks, deeper.batch.microbatches, deeper.layout.zero) == (2, 8, 1)
    kept = resolve(wishes_from(str(path), {"layout": "pp=4", "microbatches": 12}))
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
    order = first.make_schedule().order
    monkeypatch.chdir("/")
    again = resolve(read(tmp_path / "inner" / "plan.toml"))
    assert again.make_schedule().order == order
    assert again.machine == first.machine
    assert again.wishes.model == "tiny"


def test_asynchronous_schedules_are_noted() -> None:
    assert any("ASYNCHRONOUS" in note for note in plan(layout="pp=2", schedule="pipedream").notes)
    assert plan(layout="pp=2").notes == ()


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
        wishes_from(str(tmp_path / "none.toml"), {})
    broken = tmp_path / "broken.toml"
    broken.write_text("model = \n")
    with pytest.raises(BadFile, match="not valid TOML"):
        read(broken)


def test_schedule_from_a_file_brings_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(catalog.make("zb-h1", 2, 5).to_csv(), encoding="utf-8")
    resolved = plan(layout="pp=2", schedule=str(path))
    assert resolved.batch.microbatches == 5
    assert resolved.make_schedule().order == catalog.make("zb-h1", 2, 5).order
    with pytest.raises(IllegalLayout, match="the file is for 2 stages"):
        plan(layout="pp=4", schedule=str(path))
    with pytest.raises(IllegalLayout, match="the file is for 5 microbatches"):
        plan(layout="pp=2", schedule=str(path), microbatches=4)


@pytest.mark.parametrize("text", ["none", "selective", "full", "full:4"])
def test_recompute_text(text: str) -> None:
    assert str(Recompute.parse(text)) == text


@pytest.mark.parametrize("text", ["", "ful", "full:0", "selective:2", "full:x"])
def test_recompute_refuses(text: str) -> None:
    with pytest.raises(FivefoldError, match="full:K"):
        Recompute.parse(text)
