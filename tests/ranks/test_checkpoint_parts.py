"""Checkpoints of large jobs: their parts, and messages and costs that do not grow with the job."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from kept_pool import KeptPool
from test_checkpoint import carried, contents, plan_of, same
from test_checkpoint_damage import cut, flip, forge
from test_copies import RankThreads, in_threads
from test_recovery import Killer, lines

from fivefold.commands.train import train
from fivefold.core.errors import FivefoldError
from fivefold.launch.backend import lazy_group
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.train.checkpoint import folders
from fivefold.train.checkpoint import ranks as ranks_module
from fivefold.train.checkpoint.checkpoints import Checkpoints, Reader
from fivefold.train.checkpoint.folders import published, verified_manifest
from fivefold.train.checkpoint.ranks import FAN_OUT, CheckpointRanks, RanksFailed
from tests import scale_checkpoints


@pytest.fixture(scope="module")
def parts(kept_pool: KeptPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of four ranks in one folder, and the same in two parts."""
    pool, folder = kept_pool.whole(), tmp_path_factory.mktemp("parts")
    plan = plan_of("tied", "dp=4", zero=1)
    carried(pool, plan, None, folder / "alone", steps=2)
    carried(pool, plan, folder / "alone", folder / "parts", part_ranks=2)
    return folder / "alone", folder / "parts"


def test_two_parts_have_what_one_folder_has(parts: tuple[Path, Path]) -> None:
    (path,) = published(parts[1])
    manifest = verified_manifest(path)
    assert manifest.parts == 2 and manifest.files.keys() == {"directory.npy"}
    assert sorted(each.name for each in path.iterdir()) == [
        *("directory.npy", "manifest.json", "part-00000", "part-00001")
    ]
    for number, names in enumerate((["__0_0", "__1_0"], ["__2_0", "__3_0"])):
        files = (path / f"part-{number:05d}").glob("*.distcp")
        assert sorted(file.stem for file in files) == names
    assert same(contents(parts[0]), contents(parts[1]))


@pytest.mark.parametrize("layout", ["tp=2 pp=2", "dp=1"])
def test_any_layout_reads_parts(
    pool: Pool, parts: tuple[Path, Path], tmp_path: Path, layout: str
) -> None:
    carried(pool, plan_of("tied", layout), parts[1], tmp_path)
    assert same(contents(tmp_path), contents(parts[0]))


def of_another_step(path: Path) -> None:
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"facts": body["facts"] | {"step": 9}}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("directory.npy", flip),
        ("directory.npy", Path.unlink),
        ("part-00001", shutil.rmtree),
        ("part-00001/manifest.json", cut),
        ("part-00001/manifest.json", of_another_step),
        ("part-00001/.metadata", flip),
        ("part-00001/.metadata", forge),
        ("part-00000/__1_0.distcp", flip),
        ("part-00000/__1_0.distcp", Path.unlink),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damage_of_a_part_is_found(
    parts: tuple[Path, Path], tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(parts[1], tmp_path / "run")
    (path,) = published(tmp_path / "run")
    damage(path / name)
    with pytest.raises(FivefoldError, match=name.split("/")[-1]):
        Reader(path)
    with pytest.raises(FivefoldError, match="no checkpoint in "):
        Checkpoints(tmp_path / "run", 1, None).load([], lambda _: None)
    assert not (path / "ran").exists() and not (path.parent / "ran").exists()


def test_ranks_share_the_files_of_parts(
    parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is hashed by one of them, however many they are."""
    (path,) = published(parts[1])
    manifest, hashed = verified_manifest(path), list[str]()
    checksum_of = folders.checksum_of

    def noted(file: Path) -> object:
        hashed.append(str(file.relative_to(path)))
        return checksum_of(file)

    monkeypatch.setattr(folders, "checksum_of", noted)
    files = {
        str(file.relative_to(path))
        for file in path.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    }
    for size in (1, 2, 3, 5, 7, 64):
        hashed.clear()
        for rank in range(size):
            assert folders.damage_of(path, manifest, rank, size) == []
        assert sorted(hashed) == sorted(files)


@pytest.mark.parametrize("size", [1, 2, 9, 65])
def test_values_are_merged_in_the_order_of_ranks(size: int) -> None:
    def work(ranks: RankThreads) -> tuple[list[int], int, set[int]]:
        gathered = ranks.gather(lambda: ranks.rank, lambda values: values)
        answer = ranks.ask(lambda: ranks.rank, lambda values: [3 * value for value in values])
        ranks.on_all(lambda: None)
        return gathered, answer, ranks.peers

    for rank, (gathered, answer, peers) in enumerate(in_threads(size, work)):
        assert gathered == list(range(size)) and answer == 3 * rank
        assert len(peers) <= 2 * FAN_OUT


def test_one_rank_that_fails_fails_all() -> None:
    def work(ranks: RankThreads) -> list[str]:
        told: list[str] = []
        for call in (ranks.on_all, lambda fails: ranks.ask(fails, lambda values: values)):
            try:
                call(lambda: 1 // (ranks.rank - 11))
            except RanksFailed as failed:
                told.append(str(failed))
        return told

    text = "rank 11: integer division or modulo by zero"
    assert in_threads(20, work) == [[text, text]] * 20


def growth(few: dict[str, float], many: dict[str, float], ratio: float) -> list[str]:
    """What grew by more."""
    return [name for name in few if many[name] > ratio * few[name] and many[name] - few[name] > 2]


def beyond(ranks: int, times: int) -> list[str]:
    """Activities that grow faster than log N on a rank, or than N on the first."""
    pairs = zip(
        scale_checkpoints.activities(ranks),
        scale_checkpoints.activities(ranks * times),
        strict=True,
    )
    logs = 1 + times.bit_length() / ranks.bit_length()
    return [
        f"{few.name}: {name}"
        for few, many in pairs
        for name in (*growth(few.rank, many.rank, logs), *growth(few.root, many.root, 1.5 * times))
    ]


def test_no_cost_grows_faster_than_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert beyond(128, 4) == []
    few = scale_checkpoints.started(128)
    monkeypatch.setattr(ranks_module, "FAN_OUT", 1 << 20)  # all meet at the first, as before
    many = scale_checkpoints.started(512)
    assert growth(few.root, many.root, 2) == ["store calls", "open files"]


@pytest.mark.nightly
def test_a_save_of_16384_ranks() -> None:
    start, save, load, lost = scale_checkpoints.activities(16_384)
    assert save.root["files"] <= 20_000
    assert max(start.rank["open files"], start.root["open files"]) <= 64
    total = sum(
        each.rank.get("processor seconds", 0) + each.root.get("processor seconds", 0)
        for each in (start, save, load, lost)
    )
    assert total < 60


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def connected(worker: Worker) -> tuple[int, int]:
    """Files that a group of checkpoints opens, before and after its messages."""
    with worker.joined(8):
        before = descriptors()
        group = lazy_group(timedelta(minutes=2))
        made = descriptors()
        dist.barrier()  # or a faster rank has connected before this one counts
        assert "TORCH_GLOO_LAZY_INIT" not in os.environ
        ranks = CheckpointRanks(group)
        assert ranks.gather(lambda: ranks.rank, lambda values: values) == list(range(8))
        after = descriptors()
        dist.barrier()
        return made - before, after - before


def test_a_rank_connects_only_to_those_it_has_messages_for(pool: Pool) -> None:
    opened = pool.run_each([(connected, ())] * 8)
    few = scale_checkpoints.GLOO_FILES
    assert all(made <= few for made, _ in opened)
    assert all(after <= few + 2 for _, after in opened[1:])


@pytest.mark.nightly
def test_64_ranks_start_save_lose_one_and_resume(tmp_path: Path) -> None:
    killer = Killer({3: 41})
    train(
        "tiny",
        out=tmp_path,
        on_progress=killer,
        restarts=1,
        **{"layout": "dp=16 tp=2 pp=2", "zero": 1, "seq": 16, "batch": 32, "steps": 4},
        **{"save_every": 2, "device": "cpu", "layers": 2},
    )
    (restart,) = killer.restarts
    assert "rank 41" in str(restart.lost)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    names = [path.name for path in published(tmp_path / "checkpoints")]
    assert names[-1] == "step-00000004"
    assert len(list((tmp_path / "checkpoints" / names[-1]).glob("*.distcp"))) <= 64
