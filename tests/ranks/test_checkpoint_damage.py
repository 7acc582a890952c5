"""What checkpoints survive: damage, forgery, death, full disks, and steps that go on."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_checkpoint import complain, contents
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.boxes import whole_box
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.optim.disk_states import StateOnDisk
from fivefold.optim.optimizer import StateInMemory, StoredState
from fivefold.train.checkpoint import storage
from fivefold.train.checkpoint.checkpoints import Checkpoints, Reader, write_checkpoint
from fivefold.train.checkpoint.folders import Facts, latest, published
from fivefold.train.checkpoint.ranks import CannotSave
from fivefold.train.checkpoint.storage import CheckpointTensor


def plain(first: float, second: float = 0.0) -> list[CheckpointTensor]:
    values = {"model/a": torch.full((64, 8), first), "model/b": torch.full((5,), second)}
    return [
        CheckpointTensor(
            key, tuple(value.shape), value.dtype, (whole_box(value.shape),), StateInMemory(value)
        )
        for key, value in values.items()
    ]


def value_of(slots: Sequence[CheckpointTensor]) -> float:
    (value,) = slots[0].state.read().unique().tolist()
    return value


def saved(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep, None)
    for number in steps:
        checkpoints.save(plain(number), Facts(number), wait=True)
    return checkpoints


def loaded(folder: Path) -> tuple[float, list[str]]:
    """The value that a load finds, and what it complains of."""
    slots, told = plain(-1), list[str]()
    facts = Checkpoints(folder, 9, None).load(slots, told.append)
    assert facts is not None and facts.step == value_of(slots)
    return value_of(slots), told


class Evil:
    """A pickle that leaves a trace when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.trace),)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def forge(path: Path) -> None:
    path.write_bytes(pickle.dumps(Evil(path.parent.parent / "ran")))


def forge_beside(path: Path) -> None:
    """Metadata of a rank, which torch would look for if the other were missing."""
    forge(path.with_name("__0.metadata"))
    path.unlink()


def advance(path: Path) -> None:
    body = json.loads(path.read_text())
    body["facts"]["step"] += 1
    path.write_text(json.dumps(body))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("__0_0.distcp", flip, "__0_0.distcp: its checksum differs"),
        ("__0_0.distcp", cut, "__0_0.distcp: has"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp: No such file"),
        ("manifest.json", Path.unlink, "manifest.json: No such file"),
        ("manifest.json", cut, "manifest.json: "),
        ("manifest.json", advance, "manifest.json: was changed"),
        (".metadata", flip, ".metadata: its checksum differs"),
        (".metadata", forge, ".metadata: "),
        (".metadata", forge_beside, "__0.metadata: is in no manifest"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damage_is_told_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    value, told = loaded(tmp_path)
    assert value == 1
    assert len(told) == 1 and words in told[0] and "step-00000002" in told[0]
    assert not (tmp_path / "ran").exists()
    with pytest.raises(FivefoldError, match="step-00000002"):
        Reader(tmp_path / "step-00000002")
    assert not (tmp_path / "ran").exists()
    damage(tmp_path / "step-00000001" / name)
    with pytest.raises(FivefoldError, match="no checkpoint in "):
        loaded(tmp_path)


def test_the_forged_pickle_would_run(tmp_path: Path) -> None:
    """Else its absence above shows nothing."""
    forge(tmp_path / "folder.metadata")
    assert not (tmp_path.parent / "ran").exists()
    pickle.loads((tmp_path / "folder.metadata").read_bytes())
    (tmp_path.parent / "ran").rmdir()


def test_nothing_there_is_nothing_loaded(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", 1, None).load(plain(0), complain) is None
    assert latest(tmp_path) is None


class Dying(StateOnDisk):
    """A state whose file is read while a checkpoint is written; the process ends there."""

    def __init__(self) -> None:
        super().__init__(None, [])  # type: ignore[arg-type]

    def read(self) -> Tensor:
        os.kill(os.getpid(), 9)
        raise AssertionError


def test_a_killed_writer_leaves_the_last_one(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    first, second = plain(2)
    dying = CheckpointTensor(second.key, second.shape, second.dtype, second.boxes, Dying())

    def write() -> None:
        Checkpoints(tmp_path, 9, None).save([first, dying], Facts(2))

    writer = multiprocessing.get_context("fork").Process(target=write)
    writer.start()
    writer.join(20)
    assert writer.exitcode == -9
    left = tmp_path / "step-00000002.part"
    assert list(left.glob("*.distcp"))  # it had begun
    assert loaded(tmp_path) == (1, [])
    assert not left.exists()


def test_a_full_disk_is_told_and_the_next_save_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        checkpoints.save(plain(2), Facts(2))
        with pytest.raises(CannotSave) as failed:
            checkpoints.save(plain(3), Facts(3))
        words = ("step 2", "step-00000002.part/__0_0.distcp: No space left", "step-00000001")
        assert all(word in str(failed.value) for word in words)
        assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]
        checkpoints.save(plain(3), Facts(3))
        until, told = time.monotonic() + 20, None
        while told is None and time.monotonic() < until:
            told = checkpoints.failure()
        assert told is not None and "step 3" in told
        assert checkpoints.failure() is None  # it is told once
    checkpoints.save(plain(4), Facts(4), wait=True)
    assert loaded(tmp_path) == (4, [])


def save_beyond_the_limit(worker: Worker, folder: Path) -> list[str]:
    """One rank of four may not write large files: what each is told, and then a save that works."""
    with worker.joined(4):
        checkpoints = Checkpoints(folder, 1, dist.new_group(backend="gloo"))
        value = torch.full((4096,), float(worker.rank))
        (box,) = (whole_box(value.shape),)
        slot = CheckpointTensor(
            f"model/{worker.rank}", (4096,), value.dtype, (box,), StateInMemory(value)
        )
        limits, told = resource.getrlimit(resource.RLIMIT_FSIZE), list[str]()
        if worker.rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            checkpoints.save([slot], Facts(1), wait=True)
        except CannotSave as error:
            told.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        checkpoints.save([slot], Facts(2), wait=True)
        return told


def test_one_rank_that_cannot_write_fails_the_save_of_all(pool: Pool, tmp_path: Path) -> None:
    told = pool.run_each([(save_beyond_the_limit, (tmp_path,))] * 4)
    assert told[0] == told[1] == told[2] == told[3]
    (text,) = told[0]
    assert "rank 2" in text and "step-00000001.part/__2_0.distcp: File too large" in text
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000002"]
    assert len(contents(tmp_path)) == 4


def test_old_ones_go_and_the_newest_good_one_stays(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3, keep=2)
    assert [each.name for each in published(tmp_path)] == ["step-00000002", "step-00000003"]
    flip(tmp_path / "step-00000003" / ".metadata")
    (tmp_path / "step-00000009.part").mkdir()
    slots = plain(-1)
    checkpoints = Checkpoints(tmp_path, 1, None)
    assert checkpoints.load(slots, lambda _: None) == Facts(2, has_states=False)
    assert not (tmp_path / "step-00000009.part").exists()
    before = (tmp_path / "step-00000002" / "manifest.json").stat().st_ino
    checkpoints.save(slots, Facts(2), wait=True)  # it is there
    assert (tmp_path / "step-00000002" / "manifest.json").stat().st_ino == before
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000008")  # damaged as well
    checkpoints.save(plain(3), Facts(3), wait=True)  # in the place of the damaged one
    assert [each.name for each in published(tmp_path)] == ["step-00000003", "step-00000008"]
    value, told = loaded(tmp_path)
    assert value == 3 and "step-00000008" in told[0]


def test_a_save_is_behind_the_steps_and_of_its_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, checksum_of = threading.Event(), storage.checksum_of

    def waits(path: Path) -> object:
        assert go_on.wait(20)
        return checksum_of(path)

    monkeypatch.setattr(storage, "checksum_of", waits)
    slots = plain(1)
    checkpoints = Checkpoints(tmp_path, 1, None)
    for number in (1, 2):
        go_on.clear()
        for slot in slots:
            slot.state.write(torch.full(slot.shape, float(number)))
        checkpoints.save(slots, Facts(number))
        for slot in slots:
            slot.state.write(torch.full(slot.shape, 77.0))  # the step behind it
        names = [each.name for each in published(tmp_path)]
        assert names == [f"step-{done:08d}" for done in range(1, number)]
        assert checkpoints.failure() is None
        go_on.set()
        checkpoints.wait()
        found = contents(tmp_path)
        assert all(value.unique().tolist() == [number] for value in found.values())


def test_weights_alone_leave_states_as_they_are(tmp_path: Path) -> None:
    """What an import writes: one tensor in memory at a time."""
    made: list[weakref.ref[Tensor]] = []

    def make(value: float) -> Tensor:
        assert sum(each() is not None for each in made) <= 1  # the one just written
        value_there = torch.full((16, 4), value)
        made.append(weakref.ref(value_there))
        return value_there

    keys = [f"model/{name}" for name in "abcd"]
    entries = [
        (key, (16, 4), torch.float32, lambda place=place: make(place))
        for place, key in enumerate(keys)
    ]
    where = write_checkpoint(tmp_path / "checkpoints", entries, Facts(0, has_states=False))
    assert where == latest(tmp_path)
    kept: dict[str, StoredState] = {key: StateInMemory(torch.full((16, 4), -1.0)) for key in keys}
    kept["optim/exp_avg/a"] = StateInMemory(torch.zeros(16, 4))
    slots = [
        CheckpointTensor(key, (16, 4), torch.float32, (whole_box((16, 4)),), one)
        for key, one in kept.items()
    ]
    facts = Checkpoints(tmp_path / "checkpoints", 1, None).load(slots, complain)
    assert facts == Facts(0, has_states=False)
    assert [value_of([slot]) for slot in slots] == [0, 1, 2, 3, 0]
