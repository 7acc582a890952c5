"""The device of a rank, and the backend of its collectives.

NCCL, where every rank has its own GPU. Before 2.30 NCCL refuses ranks that share a GPU; since then
it accepts them if the environment has NCCL_MULTI_RANK_GPU_ENABLE=1. Otherwise gloo, which moves the
tensors of a GPU through pinned host memory.

`choose_backend` decides for ranks that are forked here, before any is started, and `forked_device`
gives each its GPU. `launched_device` does both for a rank that a launcher started. Only
`RankDevice.start` initializes CUDA: a process that has done so cannot fork GPU ranks.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch.cuda import nccl as nccl_of_torch

from fivefold.core import FivefoldError, counted
from fivefold.core.layout import FEW_CHANNELS
from fivefold.launch.launcher import LauncherEnvironment

Backend = Literal["nccl", "gloo"]
CPU = torch.device("cpu")
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHARES_SINCE = (2, 30, 0)
_LAZY = "TORCH_GLOO_LAZY_INIT"
_PROBE = 10.0  # seconds for a matmul in a fork
_MANY = 5  # ranks on one GPU, each of which should take few of its thread blocks
_WAYS_OUT = "choose --backend gloo, or start at most one rank per GPU"


def num_gpus() -> int:
    """The number of GPUs of this machine, counted by the driver's library (NVML).

    CUDA could count them too, but a process that has initialized CUDA cannot fork GPU ranks.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # also for later calls by torch
    return torch.cuda.device_count()


@dataclass(frozen=True)
class NcclLibrary:
    """The NCCL of this process: its version, None if torch has none, and whether the environment
    permits ranks to share a GPU."""

    version: tuple[int, int, int] | None
    may_share: bool = False

    @classmethod
    def current(cls) -> NcclLibrary:
        """The library that this process has loaded."""
        version = _loaded_version() if dist.is_nccl_available() else None
        return cls(version, os.environ.get(SHARING) == "1")

    def __str__(self) -> str:
        return "NCCL " + ".".join(map(str, self.version or ()))

    def require(self, ranks: int, gpus: int) -> None:
        """Raise if so many ranks on so many GPUs cannot use it."""
        if self.version is None:
            raise FivefoldError(
                "--backend nccl: this torch has no NCCL; install a torch for CUDA, or choose "
                "--backend gloo"
            )
        if ranks <= gpus:
            return
        crowd = f"{counted(ranks, 'rank')} on {counted(gpus, 'GPU')}"
        if not self.may_share:
            raise FivefoldError(
                f"{crowd}: NCCL refuses ranks that share a GPU; set {SHARING}=1 with NCCL 2.30 or "
                f"newer, {_WAYS_OUT}"
            )
        if self.version < _SHARES_SINCE:
            raise FivefoldError(
                f"{crowd}: {self} cannot share a GPU, even with {SHARING}=1; load NCCL 2.30 or "
                f"newer (LD_PRELOAD=/path/to/libnccl.so.2), {_WAYS_OUT}"
            )


def _loaded_version() -> tuple[int, int, int]:
    """The version of the library that torch calls.

    torch only knows the one it was built with, and LD_PRELOAD may have replaced it.
    """
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # it is part of torch's own library
        major, minor, patch, *_ = nccl_of_torch.version()
        return major, minor, patch
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def start_autograd(device: torch.device) -> None:
    """Create a CUDA context in autograd's thread, which lacks one before torch launches a kernel in
    it: cuBLAS warns if it is first, in a stage whose backward begins with a matmul."""
    seed = torch.ones((), device=device, requires_grad=True)
    (seed * seed).backward()


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank, the backend of its collectives, and how many ranks share the device."""

    device: torch.device = CPU
    backend: Backend = "gloo"
    sharers: int = 1

    def start(self) -> None:
        """Make the device the current one of this thread, before any kernel."""
        if self.device.type != "cuda":
            if _is_arm():
                # Small matmuls take oneDNN 5 to 28 times as long as BLAS there (Neoverse N1, torch
                # 2.13), and it is no faster for large ones.
                torch.backends.mkldnn.enabled = False
            return
        if self.backend == "nccl" and self.sharers > 1:
            # The settings under which 2, 4 and 8 ranks were seen to share one GPU.
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            if self.sharers >= _MANY:
                os.environ.setdefault("NCCL_MAX_CTAS", "1")
        torch.cuda.set_device(self.device)
        start_autograd(self.device)

    def join(
        self,
        rank: int,
        world: int,
        timeout: timedelta,
        store: dist.Store | None = None,
        init_method: str | None = None,
    ) -> None:
        """Create the process group of all ranks; over NCCL it is bound to the device, and has few
        channels: numbers of a step go over it, and other groups split from it have their own."""
        options = None
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = FEW_CHANNELS
            options._timeout = timeout
        try:
            dist.init_process_group(
                self.backend,
                init_method=init_method,
                store=store,
                rank=rank,
                world_size=world,
                timeout=timeout,
                device_id=self.device if self.backend == "nccl" else None,
                pg_options=options,
            )
        except dist.DistBackendError as error:
            if "Duplicate GPU" not in str(error):
                raise
            raise FivefoldError(
                f"rank {rank} shares its GPU with another rank, which NCCL refuses: set "
                f"{SHARING}=1 with NCCL 2.30 or newer, {_WAYS_OUT}"
            ) from error

    def describe(self) -> str:
        """Describe the backend, for the notes of a run on GPUs."""
        nccl = NcclLibrary.current()
        shared = f"; {self.sharers} ranks share a GPU" if self.sharers > 1 else ""
        if self.backend == "nccl":
            return f"collectives go over {nccl}{shared}"
        if self.sharers > 1 and not nccl.may_share:
            shared += f", which NCCL refuses without {SHARING}=1"
        return f"collectives go through pinned host memory over gloo{shared}"


def lazy_group(timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks that connects two of them at their first message.

    Otherwise each rank would read the addresses of all and have a socket for each: a job of N ranks
    reads its store N² times, and at `ulimit -n 1024` ends near 1,000 ranks.
    """
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"  # torch reads it for every group
    try:
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    finally:
        if before is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = before


def choose_backend(
    backend_option: Backend | None, device: str, ranks: int, gpus: int, nccl: NcclLibrary
) -> Backend:
    """Choose the backend of ranks on one machine; raises if it is not available."""
    if device == "cpu":
        if backend_option == "nccl":
            raise FivefoldError(
                "--backend nccl is for GPUs, and these ranks are on CPUs: use --device cuda, or "
                "leave --backend out"
            )
        return "gloo"
    chosen = backend_option or ("nccl" if ranks <= gpus or nccl.may_share else "gloo")
    if chosen == "nccl" and (backend_option or ranks > 1):
        nccl.require(ranks, gpus)
    return chosen


def available_device(device: str, gpus: int) -> str:
    """Resolve `auto` to a kind of device; raises if the kind is not available."""
    if device == "cuda" and not gpus:
        raise FivefoldError("--device cuda: this machine has no GPU; use --device cpu")
    return device if device != "auto" else "cuda" if gpus else "cpu"


def forked_device(device: str, backend: Backend, rank: int, world: int) -> RankDevice:
    """Device of a forked rank: GPUs are assigned round-robin, also to processes after the last
    rank."""
    if device == "cpu":
        return RankDevice()
    gpus = num_gpus()
    return RankDevice(torch.device("cuda", rank % gpus), backend, -(-world // gpus))


def launched_device(
    device: str,
    backend_option: Backend | None,
    launched: LauncherEnvironment,
    gpus: int,
    nccl: NcclLibrary,
) -> RankDevice:
    """The device of a rank that a launcher started on a host with so many visible GPUs.

    The default is NCCL, whatever this host has: ranks of all hosts need the same backend.
    """
    ranks = max(launched.local_world or 1, launched.local_rank + 1)
    if launched.own_gpu and not nccl.may_share:
        ranks = min(ranks, gpus)  # tasks beside this one have other GPUs
    if launched.world > 1 and device == "cuda":
        backend_option = backend_option or "nccl"
    backend = choose_backend(backend_option, device, ranks, gpus, nccl)
    if device == "cpu":
        return RankDevice()
    return RankDevice(
        torch.device("cuda", launched.local_rank % gpus), backend, max(1, -(-ranks // gpus))
    )


def require_forkable() -> None:
    """Refuse to fork ranks from a process whose GPU, process group or kind they cannot inherit.

    Threads that torch has started for arithmetic are an obstacle on ARM only: its matmuls go on to
    wait for them. Elsewhere ranks compute with one thread.
    """
    remedy = "call it from a process that has not, such as a restarted kernel or a script"
    if "fork" not in multiprocessing.get_all_start_methods():
        raise FivefoldError("ranks are forked, which this system cannot: use Linux or macOS")
    if torch.cuda.is_initialized():
        raise FivefoldError(f"this process has used a GPU, and forked ranks could not: {remedy}")
    if dist.is_available() and dist.is_initialized():
        raise FivefoldError(
            f"this process has a process group, and forked ranks would have it too: {remedy}, or "
            "destroy it first"
        )
    if multiprocessing.current_process().daemon:
        raise FivefoldError(
            "a daemonic process may not fork ranks: call it from the process that started it"
        )
    if _is_arm() and torch.get_num_threads() > 1 and not _multiplies_in_fork():
        raise FivefoldError(
            "this process has multiplied matrices with several threads, and on ARM forked ranks "
            f"would wait for these: {remedy}, or set OMP_NUM_THREADS=1 before torch is imported"
        )


def _is_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def _multiplies_in_fork() -> bool:
    """Whether a fork of this process can multiply matrices."""
    process = multiprocessing.get_context("fork").Process(target=_multiply, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        process.start()
    process.join(_PROBE)
    process.kill()
    process.join()
    return process.exitcode == 0


def _multiply() -> None:
    torch.set_num_threads(1)
    torch.ones(256, 256).mm(torch.ones(256, 256))
