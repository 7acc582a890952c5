"""Which backend and device a rank gets, and what each thread of it does with the device.

No GPU is needed: the number of GPUs and the NCCL library are given.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.boxes import whole_box
from fivefold.core.layout.groups import FEW_CHANNELS, Topology, communicators
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.launch import backend
from fivefold.launch.backend import (
    Backend,
    NcclLibrary,
    RankDevice,
    choose_backend,
    forked_device,
    launched_device,
)
from fivefold.launch.launcher import LauncherEnvironment
from fivefold.optim.optimizer import StateInMemory
from fivefold.parallel.mesh import Mesh, nccl_options
from fivefold.parallel.units import flat_unit
from fivefold.train.checkpoint import checkpoints as snapshot
from fivefold.train.checkpoint.checkpoints import Checkpoints
from fivefold.train.checkpoint.folders import Facts
from fivefold.train.checkpoint.storage import CheckpointTensor

NONE = NcclLibrary(None)
OLD = NcclLibrary((2, 28, 9))
OLD_TOLD = NcclLibrary((2, 28, 9), may_share=True)
NEW = NcclLibrary((2, 30, 7), may_share=True)
THIRD = torch.device("cuda", 3)


def cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


# The choice for forked ranks.


@pytest.mark.parametrize(
    ("asked", "device", "ranks", "gpus", "nccl", "expected"),
    [
        (None, "cpu", 8, 0, NONE, "gloo"),
        (None, "cpu", 8, 8, NEW, "gloo"),
        ("gloo", "cpu", 8, 8, OLD, "gloo"),
        (None, "cuda", 8, 8, OLD, "nccl"),
        (None, "cuda", 2, 8, OLD, "nccl"),
        (None, "cuda", 8, 4, OLD, "gloo"),
        (None, "cuda", 8, 1, NEW, "nccl"),
        ("nccl", "cuda", 8, 1, NEW, "nccl"),
        ("nccl", "cuda", 8, 8, OLD, "nccl"),
        ("nccl", "cuda", 8, 8, OLD_TOLD, "nccl"),
        ("gloo", "cuda", 8, 8, NEW, "gloo"),
        ("gloo", "cuda", 8, 1, NONE, "gloo"),
        (None, "cuda", 1, 1, NONE, "nccl"),  # a rank alone has no collectives
    ],
)
def test_choice(
    asked: Backend | None, device: str, ranks: int, gpus: int, nccl: NcclLibrary, expected: Backend
) -> None:
    assert choose_backend(asked, device, ranks, gpus, nccl) == expected


REFUSED = {
    "shared without permission": (
        ("nccl", "cuda", 8, 4, OLD),
        "8 ranks on 4 GPUs: NCCL refuses ranks that share a GPU; set NCCL_MULTI_RANK_GPU_ENABLE=1 "
        "with NCCL 2.30 or newer, choose --backend gloo, or start at most one rank per GPU",
    ),
    "too old to share": (
        ("nccl", "cuda", 2, 1, OLD_TOLD),
        "2 ranks on 1 GPU: NCCL 2.28.9 cannot share a GPU, even with NCCL_MULTI_RANK_GPU_ENABLE=1; "
        "load NCCL 2.30 or newer (LD_PRELOAD=/path/to/libnccl.so.2), choose --backend gloo, or "
        "start at most one rank per GPU",
    ),
    "too old to share, by default": ((None, "cuda", 2, 1, OLD_TOLD), "NCCL 2.28.9 cannot share"),
    "no NCCL": (
        ("nccl", "cuda", 2, 2, NONE),
        "--backend nccl: this torch has no NCCL; install a torch for CUDA, or choose --backend "
        "gloo",
    ),
    "no NCCL, by default": ((None, "cuda", 2, 2, NONE), "this torch has no NCCL"),
    "on CPUs": (
        ("nccl", "cpu", 2, 2, NEW),
        "--backend nccl is for GPUs, and these ranks are on CPUs: use --device cuda, or leave "
        "--backend out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused(name: str) -> None:
    given, sentence = REFUSED[name]
    with pytest.raises(FivefoldError) as refused:
        choose_backend(*given)  # type: ignore[arg-type]
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "devices", "sharers"), [(1, [0, 0, 0], 4), (2, [0, 1, 0], 2), (8, [0, 1, 2], 1)]
)
def test_forked_ranks_take_the_gpus_in_turn(
    gpus: int, devices: list[int], sharers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "num_gpus", lambda: gpus)
    found = [forked_device("cuda", "nccl", rank, world=4) for rank in range(3)]
    assert found == [RankDevice(cuda(each), "nccl", sharers) for each in devices]
    assert forked_device("cpu", "gloo", 3, 4) == RankDevice()


# Ranks of a launcher.


def rank_of(local_rank: int, local_world: int | None, own_gpu: bool = False) -> LauncherEnvironment:
    return LauncherEnvironment(
        local_rank, 16, local_rank, "host", 29500, local_world=local_world, own_gpu=own_gpu
    )


@pytest.mark.parametrize(
    ("asked", "launched", "gpus", "nccl", "expected"),
    [
        (None, rank_of(3, 8), 8, OLD, RankDevice(cuda(3), "nccl")),
        (None, rank_of(3, None), 8, OLD, RankDevice(cuda(3), "nccl")),
        ("gloo", rank_of(3, 8), 8, OLD, RankDevice(cuda(3), "gloo")),
        # One visible GPU for each task.
        (None, rank_of(3, 8, own_gpu=True), 1, OLD, RankDevice(cuda(0), "nccl")),
        (None, rank_of(0, 8, own_gpu=True), 1, OLD, RankDevice(cuda(0), "nccl")),
        (None, rank_of(3, None, own_gpu=True), 1, OLD, RankDevice(cuda(0), "nccl")),
        (None, rank_of(3, 8, own_gpu=True), 2, OLD, RankDevice(cuda(1), "nccl")),
        # More ranks than GPUs.
        (None, rank_of(3, 8), 1, NEW, RankDevice(cuda(0), "nccl", 8)),
        (None, rank_of(3, 8, own_gpu=True), 1, NEW, RankDevice(cuda(0), "nccl", 8)),
        (None, rank_of(7, 8), 4, NEW, RankDevice(cuda(3), "nccl", 2)),
        ("gloo", rank_of(7, 8), 4, OLD, RankDevice(cuda(3), "gloo", 2)),
    ],
)
def test_launched_rank(
    asked: Backend | None,
    launched: LauncherEnvironment,
    gpus: int,
    nccl: NcclLibrary,
    expected: RankDevice,
) -> None:
    assert launched_device("cuda", asked, launched, gpus, nccl) == expected
    assert launched_device("cpu", None, launched, gpus, nccl) == RankDevice()


@pytest.mark.parametrize("rank", range(8))
def test_every_launched_rank_of_a_full_host_is_refused(rank: int) -> None:
    with pytest.raises(FivefoldError, match="8 ranks on 4 GPUs: NCCL refuses"):
        launched_device("cuda", None, rank_of(rank, 8), 4, OLD)


def test_a_launched_rank_beyond_the_gpus_is_refused() -> None:
    """A launcher that does not count the ranks of a host still gives local ranks."""
    with pytest.raises(FivefoldError, match="5 ranks on 4 GPUs: NCCL refuses"):
        launched_device("cuda", None, rank_of(4, None), 4, OLD)
    with pytest.raises(FivefoldError, match=r"NCCL 2\.28\.9 cannot share"):
        launched_device("cuda", None, rank_of(4, None), 4, OLD_TOLD)


# What a rank does with it.


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (RankDevice(THIRD, "nccl", 1), {}),
        (RankDevice(THIRD, "nccl", 4), {"NCCL_NVLS_ENABLE": "0"}),
        (RankDevice(THIRD, "nccl", 5), {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}),
        (RankDevice(THIRD, "gloo", 8), {}),
    ],
)
def test_a_rank_sets_its_device_and_what_sharing_needs(
    rank: RankDevice, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    started: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(backend, "start_autograd", started.append)
    monkeypatch.setattr(os, "environ", {"PATH": "/bin"})
    rank.start()
    RankDevice().start()  # a CPU needs nothing
    assert chosen == started == [THIRD]
    assert os.environ == {"PATH": "/bin", **expected}


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(backend, "start_autograd", lambda device: None)
    monkeypatch.setattr(os, "environ", {"NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "1"})
    RankDevice(THIRD, "nccl", 8).start()
    assert os.environ == {"NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "1"}


@pytest.mark.parametrize("name", get_args(Backend))
def test_a_group_over_nccl_is_bound_to_its_device(
    name: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *words, **named: called.append((words, named))
    )
    nccl = SimpleNamespace(Options=NcclOptions)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    RankDevice(THIRD, name).join(1, 2, timedelta(minutes=5), init_method="file:///store")
    (((backend_called,), named),) = called
    assert backend_called == name
    assert named["device_id"] == (THIRD if name == "nccl" else None)
    options = named["pg_options"]
    assert name != "nccl" or options.config.max_ctas == FEW_CHANNELS
    assert name == "nccl" or options is None
    assert (named["rank"], named["world_size"]) == (1, 2)


def test_a_gpu_that_two_ranks_have_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["ncclInvalidUsage ... Duplicate GPU detected : rank 1 and rank 0", "ncclSystemError"]

    def fail(*words: object, **named: object) -> None:
        raise dist.DistBackendError(texts.pop(0))

    monkeypatch.setattr(dist, "init_process_group", fail)
    nccl = SimpleNamespace(Options=NcclOptions)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    with pytest.raises(FivefoldError, match=r"rank 1 shares its GPU .* choose --backend gloo"):
        RankDevice(THIRD, "nccl").join(1, 2, timedelta(minutes=5))
    with pytest.raises(dist.DistBackendError, match="ncclSystemError"):
        RankDevice(THIRD, "nccl").join(1, 2, timedelta(minutes=5))


# The library.


def test_the_version_is_the_one_of_the_loaded_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(name: str, mode: int) -> Any:
        assert name == "libnccl.so.2" and mode & os.RTLD_NOLOAD
        return SimpleNamespace(ncclGetVersion=lambda at: setattr(at._obj, "value", 23_007))

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert NcclLibrary.current() == NEW
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    assert NcclLibrary.current() == NcclLibrary((2, 30, 7))


def test_without_a_library_of_its_own_torch_knows_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(backend.nccl_of_torch, "version", lambda: (2, 28, 9))
    assert NcclLibrary.current().version == (2, 28, 9)  # nothing here has loaded the library
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert NcclLibrary.current().version is None


# Threads begin on GPU 0.


class OnThird(torch.Tensor):
    """A tensor of the host that says it is on the fourth GPU."""

    is_cuda = True
    device = THIRD


def test_a_snapshot_waits_for_the_gpu_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    chosen: list[tuple[torch.device, bool]] = []
    here = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda at: chosen.append((at, threading.get_ident() != here))
    )
    pinned: list[bool] = []

    def memory(num_bytes: int, pin: bool) -> Any:
        pinned.append(pin)
        return torch.empty(num_bytes, dtype=torch.uint8).numpy()

    monkeypatch.setattr(snapshot, "_memory", memory)
    checkpoints = Checkpoints(tmp_path, 1, None, THIRD)
    state = StateInMemory(torch.arange(6.0).as_subclass(OnThird))
    tensor = CheckpointTensor("model/w", (6,), torch.float32, (whole_box((6,)),), state)
    checkpoints.save([tensor], Facts(1), wait=True)
    assert waited == [THIRD] and pinned == [True]
    assert chosen == [(THIRD, True)], "the writer's thread takes the GPU of its rank"


def test_a_read_of_a_disk_is_in_order_with_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    stream, here = SimpleNamespace(device=THIRD), threading.get_ident()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: seen.append(device) or stream)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda at: seen.append((at, threading.get_ident() != here))
    )
    monkeypatch.setattr(torch.cuda, "stream", lambda given: seen.append(given) or nullcontext())
    target = torch.zeros(4).as_subclass(OnThird)
    found = flat_unit.reading(target, torch.ones(4)).wait()
    assert found.as_subclass(torch.Tensor).tolist() == [1.0] * 4
    assert seen == [THIRD, (THIRD, True), stream]


class NcclOptions:
    """What torch's options of a group take."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)


def test_urgent_communicators_come_first_and_messages_take_few_blocks() -> None:
    """On one GPU that ranks share, neither can be seen to be faster. What is of few bytes takes few
    channels too: totals of a step, and the number of tokens where gradients go over shards."""
    options = PlanOptions("tiny-moe", layout="dp=2 tp=2 pp=2 ep=2")
    made = communicators(Topology.of(resolve(options, small=True)))
    nccl = SimpleNamespace(Options=NcclOptions)
    with patch.object(dist, "ProcessGroupNCCL", nccl, create=True):
        found = {str(each): nccl_options(each) for each in made}
    first = {name for name, each in found.items() if each.is_high_priority_stream}
    few = {name for name, each in found.items() if each.config.max_ctas == FEW_CHANNELS}
    assert first == {"tp", "ep"}
    assert few == {"pp 0->1", "pp 1->0", "world", "dp-cp"}


def test_torch_does_not_warn_of_messages_that_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a pipeline printed that messages of a group wait for one another. torch reads
    whether it shall when it makes a group."""
    name, seen = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", list[str | None]()
    monkeypatch.setenv(name, "1")  # so that it is restored
    monkeypatch.delenv(name)
    topology = Topology.of(resolve(PlanOptions("tiny", layout="pp=2"), small=True))
    rank = SimpleNamespace(topology=topology, rank=0, backend="nccl", alone=False, _limit=None)
    nccl = SimpleNamespace(Options=NcclOptions)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "split_group", lambda **_: seen.append(os.environ.get(name)))
    for each in communicators(topology):
        if each.channels:
            Mesh._make(cast("Mesh", rank), each, (0, 1))
    assert seen == ["0", "0"]
