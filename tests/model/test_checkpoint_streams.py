"""Checkpoints at the disk's speed: several files at a time, hashed while they are written, each
written as soon as its values are copied."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fivefold.cli import main
from fivefold.core.layout.boxes import whole_box
from fivefold.optim.disk_states import DiskStore, StateOnDisk
from fivefold.optim.optimizer import StateInMemory
from fivefold.train import loop
from fivefold.train.checkpoint import checkpoints as snapshot
from fivefold.train.checkpoint import folders, storage, threads
from fivefold.train.checkpoint.checkpoints import Checkpoints
from fivefold.train.checkpoint.folders import Facts
from fivefold.train.checkpoint.ranks import CannotSave
from fivefold.train.checkpoint.storage import CheckpointTensor
from fivefold.train.checkpoint.threads import NUM_STREAMS, in_threads

NUM_TENSORS, SIZES = 2 * NUM_STREAMS, (32, 8)


def tensor_of(state: StateInMemory, number: int) -> CheckpointTensor:
    shape = tuple(state.tensor.shape)
    return CheckpointTensor(f"model/{number}", shape, torch.float32, (whole_box(shape),), state)


def tensors(first: float = 0.0) -> list[CheckpointTensor]:
    return [
        tensor_of(StateInMemory(torch.full(SIZES, first + number)), number)
        for number in range(NUM_TENSORS)
    ]


def values(found: list[CheckpointTensor]) -> list[float]:
    return [each.state.read().unique().item() for each in found]


def complain(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors are worth a file."""
    monkeypatch.setattr(threads, "STREAM_BYTES", 2 * 4 * SIZES[0] * SIZES[1])


def together(work: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    """The same, but it goes on only when as many threads as there are streams have begun it."""
    barrier = threading.Barrier(NUM_STREAMS, timeout=20)

    def waits(*args: Any, **named: Any) -> Any:
        if len(seen) < NUM_STREAMS:
            seen.append(threading.get_ident())
            barrier.wait()
        return work(*args, **named)

    return waits


def test_the_streams_of_a_rank_are_written_hashed_and_read_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_files: None
) -> None:
    written, hashed, read = list[int](), list[int](), list[int]()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", together(torch.save, written))
        Checkpoints(tmp_path, 1, None).save(tensors(), Facts(1), wait=True)
    (final,) = folders.published(tmp_path)
    files = sorted(final.glob("*.distcp"))
    assert [path.name for path in files] == [f"__{n}_0.distcp" for n in range(NUM_STREAMS)]
    assert len({path.stat().st_size for path in files}) == 1  # two tensors each
    found = tensors(100)
    reader = storage.FileSystemReader
    with monkeypatch.context() as patched:
        patched.setattr(folders, "checksum_of", together(folders.checksum_of, hashed))
        patched.setattr(reader, "read_data", together(reader.read_data, read))
        assert Checkpoints(tmp_path, 1, None).load(found, complain) is not None
    assert values(found) == list(range(NUM_TENSORS))
    assert all(len(set(each)) == NUM_STREAMS for each in (written, hashed, read))
    state = {each.key: torch.zeros(SIZES) for each in found}
    dcp.load(state, checkpoint_id=final, no_dist=True)
    assert [value.unique().item() for value in state.values()] == values(found)


def test_small_states_take_one_file(tmp_path: Path) -> None:
    Checkpoints(tmp_path, 1, None).save(tensors(), Facts(1), wait=True)
    (final,) = folders.published(tmp_path)
    assert [path.name for path in final.glob("*.distcp")] == ["__0_0.distcp"]


def test_a_file_is_hashed_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_BLOCK_BYTES", 1000)
    data = bytes(range(256)) * 20
    with folders.HashedFile(tmp_path / "file") as file:
        for start, stop in ((0, 7), (7, 7), (7, 4007), (4007, len(data))):
            assert file.write(memoryview(data)[start:stop]) == stop - start
            assert file.tell() == stop
    assert (tmp_path / "file").read_bytes() == data
    assert file.checksum() == folders.checksum_of(tmp_path / "file")


def test_one_file_that_fails_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_files: None
) -> None:
    """Not only in the thread that writes it."""
    write = folders.HashedFile.write

    def full(file: folders.HashedFile, data: memoryview) -> int:
        if Path(file._file.name).name == "__5_0.distcp":
            raise OSError(28, "No space left on device")
        return write(file, data)

    checkpoints = Checkpoints(tmp_path, 1, None)
    with monkeypatch.context() as patched:
        patched.setattr(folders.HashedFile, "write", full)
        with pytest.raises(CannotSave, match=r"__5_0\.distcp: No space left"):
            checkpoints.save(tensors(), Facts(1), wait=True)
    assert list(tmp_path.iterdir()) == []
    checkpoints.save(tensors(), Facts(1), wait=True)
    assert len(folders.published(tmp_path)) == 1


class Hooked(StateInMemory):
    """A state that does something before it is copied."""

    def __init__(self, tensor: Tensor, before: Callable[[], None]) -> None:
        super().__init__(tensor)
        self.before = before

    def read(self) -> Tensor:
        self.before()
        return super().read()


def test_a_slab_is_written_while_the_next_one_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SLAB_BYTES", 1)
    file = tmp_path / "step-00000001.part" / "__0_0.distcp"

    def first_is_written() -> None:
        until = time.monotonic() + 20
        while not (file.exists() and file.stat().st_size):
            assert time.monotonic() < until, "nothing is written before all is copied"
            time.sleep(0.001)

    first, last = tensors()[:2]
    assert isinstance(last.state, StateInMemory)
    hooked = tensor_of(Hooked(last.state.tensor, first_is_written), 1)
    checkpoints = Checkpoints(tmp_path, 1, None)
    checkpoints.save([first, hooked], Facts(1), wait=True)
    found = tensors(100)[:2]
    checkpoints.load(found, complain)
    assert values(found) == [0, 1]


def test_values_that_cannot_be_copied_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that wait for them must not wait forever."""
    monkeypatch.setattr(snapshot, "SLAB_BYTES", 1)

    def no_memory() -> None:
        raise MemoryError("no memory for a copy")

    first, last = tensors()[:2]
    assert isinstance(last.state, StateInMemory)
    hooked = tensor_of(Hooked(last.state.tensor, no_memory), 1)
    checkpoints = Checkpoints(tmp_path, 1, None)
    with pytest.raises(CannotSave, match="no memory for a copy"):
        checkpoints.save([first, hooked], Facts(1), wait=True)
    assert list(tmp_path.iterdir()) == []
    checkpoints.save([first, last], Facts(1), wait=True)
    assert len(folders.published(tmp_path)) == 1


def test_reserved_memory_is_all_that_a_save_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 1, None)
    checkpoints.reserve(tensors())

    def no_more(num_bytes: int, pinned: bool) -> None:
        raise AssertionError("a save makes memory")

    monkeypatch.setattr(snapshot, "_memory", no_more)
    checkpoints.save(tensors(1), Facts(1), wait=True)
    found = tensors(100)
    checkpoints.load(found, complain)
    assert values(found) == [1 + number for number in range(NUM_TENSORS)]


def test_nothing_is_copied_where_states_are_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a save waits, so that weights in memory need no copy either."""

    def no_memory(num_bytes: int, pinned: bool) -> None:
        raise AssertionError("a save makes memory")

    monkeypatch.setattr(snapshot, "_memory", no_memory)
    store = DiskStore(tmp_path, 0, [32], {"exp_avg": torch.float32}, pinned=False)
    (state,) = store.states("exp_avg")
    assert state is not None
    state.write(torch.full((32,), 7.0))
    on_disk = CheckpointTensor("optim/0", (32,), torch.float32, (whole_box((32,)),), state)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, None)
    checkpoints.reserve([*tensors(1), on_disk])
    checkpoints.save([*tensors(1), on_disk], Facts(1))
    state.write(torch.zeros(32))  # after the save
    found = [*tensors(100), on_disk]
    checkpoints.load(found, complain)
    assert values(found) == [*range(1, NUM_TENSORS + 1), 7]


def disk_tensors(folder: Path, number: int) -> list[CheckpointTensor]:
    """States in files, of 32 elements that are 100, 101, …"""
    folder.mkdir()
    store = DiskStore(folder, 0, [32] * number, {"exp_avg": torch.float32}, pinned=False)
    stored: list[CheckpointTensor] = []
    for i, state in enumerate(store.states("exp_avg")):
        assert state is not None
        state.write(torch.full((32,), 100.0 + i))
        box = (whole_box((32,)),)
        stored.append(CheckpointTensor(f"optim/{i}", (32,), torch.float32, box, state))
    return stored


def test_states_on_a_disk_are_written_in_files_of_their_own(tmp_path: Path) -> None:
    """Torch has all values of a file in memory until it is written, those of weights too."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, None)
    checkpoints.save([*tensors(), *disk_tensors(tmp_path / "states", 2)], Facts(1))
    (final,) = folders.published(tmp_path / "checkpoints")
    assert len(list(final.glob("*.distcp"))) == NUM_TENSORS + 2


def test_states_on_a_disk_are_loaded_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is in memory until it is written, and only then the next one is."""
    on_disk = disk_tensors(tmp_path / "states", 3)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, None)
    checkpoints.save([*tensors(), *on_disk], Facts(1))
    calls: list[tuple[str, int]] = []

    def noted(name: str) -> Callable[..., Any]:
        inner = getattr(StateOnDisk, name)

        def run(state: StateOnDisk, *arguments: Any) -> Any:
            calls.append((name, [tensor.state for tensor in on_disk].index(state)))
            return inner(state, *arguments)

        return run

    for name in ("read", "write"):
        monkeypatch.setattr(StateOnDisk, name, noted(name))
    checkpoints.load([*tensors(), *on_disk], complain)
    assert calls == [(name, number) for number in range(3) for name in ("read", "write")]


def test_what_is_read_in_place_waits_for_the_kernels_that_write_it(tmp_path: Path) -> None:
    """And fails with them: nothing is published of a step that has failed on the device."""

    def lost() -> None:
        if threading.current_thread() is threading.main_thread():  # which waits for the device
            raise RuntimeError("an illegal memory access")

    hooked = tensor_of(Hooked(torch.zeros(SIZES), lost), 0)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, None)
    with pytest.raises(CannotSave, match="an illegal memory access"):
        checkpoints.save([hooked, *disk_tensors(tmp_path / "states", 1)], Facts(1))
    assert folders.published(tmp_path / "checkpoints") == []


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file whole, then the folder that lists them; and then that of the new name."""
    synced: list[tuple[str, int]] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path.name, 0 if path.is_dir() else path.stat().st_size))
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        synced.append((f"{path.name} to {target.name}", 0))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    Checkpoints(tmp_path / "checkpoints", 1, None).save(tensors(), Facts(1), wait=True)
    (final,) = folders.published(tmp_path / "checkpoints")
    sizes = {path.name: path.stat().st_size for path in final.iterdir()}
    assert synced[-6:] == [
        (".metadata.tmp", sizes[".metadata"]),
        (".metadata.tmp to .metadata", 0),
        ("manifest.json", sizes["manifest.json"]),
        (f"{final.name}.part", 0),
        (f"{final.name}.part to {final.name}", 0),
        ("checkpoints", 0),
    ]
    assert sorted(synced[:-6]) == sorted(
        (name, size) for name, size in sizes.items() if name.endswith(".distcp")
    )


def test_a_run_makes_the_memory_of_its_checkpoints_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"  # the rank is another process

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            with seen.open("a") as file:
                file.write(f"{name} ")
            return real(*given, **named)

        return run

    monkeypatch.setattr(snapshot, "_memory", noted("memory", snapshot._memory))
    monkeypatch.setattr(loop, "step", noted("step", loop.step))
    words = "train tiny --steps 2 --batch 2 --seq 16 --set save_every=1 --layout dp=1"
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), "--out", str(tmp_path / "run")])
    assert seen.read_text() == "memory step step "


def test_slabs_have_the_bytes_of_their_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SLAB_BYTES", 1000)
    lengths = [100, 16, 8, 300, 120, 120, 10]  # of four bytes each; a copy begins at 64 bytes
    states = [StateInMemory(torch.arange(float(length))) for length in lengths]
    sources = [
        snapshot.BoxSource(storage.MetadataIndex(each.key, (0,)), each, each.boxes[0])
        for each in map(tensor_of, states, range(len(lengths)))
    ]
    slabs = [[each.box.numel for each in slab] for slab in snapshot.slabs_of(sources)]
    assert slabs == [[100, 16, 8], [300], [120], [120, 10]]
    memory = snapshot.HostCopies()
    addresses: list[list[int]] = []
    for step in range(2):
        for state in states:
            state.tensor.add_(step)
        taken = memory.snapshot(sources)
        taken.take()
        copies = [taken.reads[each.index]() for each in sources]
        assert all(map(torch.equal, copies, [state.tensor for state in states]))
        assert all(copy.untyped_storage().size() == copy.nbytes for copy in copies)
        addresses.append([copy.data_ptr() for copy in copies])
    assert addresses[0] == addresses[1]
    assert addresses[0][1] - addresses[0][0] == 448


def test_threads_return_results_in_order_and_raise_the_first_error() -> None:
    assert in_threads(lambda item: -item, range(100), 4) == [-item for item in range(100)]
    assert in_threads(lambda item: item, list[int](), 4) == []
    done: list[int] = []

    def fails(item: int) -> None:
        done.append(item)
        raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        in_threads(fails, range(100), 1)
    assert done == [0]
