"""Where a launched process stands."""

from __future__ import annotations

import pytest
import torch

from fivefold.core.errors import FivefoldError
from fivefold.launch.backend import RankDevice
from fivefold.launch.launcher import LauncherEnvironment, hosts, read_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "3",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
}


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[001-003,7]", ["node001", "node002", "node003", "node7"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("login,r[1-2]c[3,5]-ib", ["login", "r1c3-ib", "r1c5-ib", "r2c3-ib", "r2c5-ib"]),
        ("ip-10-0-0-1,ip-10-0-0-[2-3]", ["ip-10-0-0-1", "ip-10-0-0-2", "ip-10-0-0-3"]),
    ],
)
def test_hosts_of_a_slurm_list(text: str, expected: list[str]) -> None:
    assert list(hosts(text)) == expected


@pytest.mark.parametrize("text", ["", "node[1-", "node]1[", "a,,b", "n[x-y]"])
def test_a_list_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(FivefoldError, match="MASTER_ADDR"):
        list(hosts(text))


def test_nobody_launched_this() -> None:
    assert read_environment({"PATH": "/bin", "MASTER_ADDR": "left over"}) is None
    # A shell inside of an allocation is no task of the job.
    assert read_environment(without(SRUN, "SLURM_STEP_ID")) is None


def test_torchrun() -> None:
    assert read_environment(TORCHRUN) == LauncherEnvironment(5, 8, 1, "node7", 29500, hosted=True)


def test_a_pytorchjob_sets_no_local_rank() -> None:
    names = [name for name in TORCHRUN if name.startswith("TORCHELASTIC")]
    found = read_environment(without(TORCHRUN, "LOCAL_RANK", *names))
    assert found == LauncherEnvironment(5, 8, 0, "node7", 29500)


def test_srun_derives_where_to_meet() -> None:
    assert read_environment(SRUN) == LauncherEnvironment(3, 16, 3, "gpu007", 24567)
    chosen = read_environment({**SRUN, "MASTER_ADDR": "other", "MASTER_PORT": "1"})
    assert chosen is not None and (chosen.host, chosen.port) == ("other", 1)


def test_torchrun_inside_of_a_slurm_job_comes_first() -> None:
    assert read_environment({**SRUN, **TORCHRUN}) == read_environment(TORCHRUN)


def test_torchrun_counts_the_ranks_of_a_host() -> None:
    found = read_environment({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"})
    assert found is not None and found.local_world == 4
    with pytest.raises(FivefoldError, match="LOCAL_WORLD_SIZE is 'all': it must be a whole number"):
        read_environment({**TORCHRUN, "LOCAL_WORLD_SIZE": "all"})


@pytest.mark.parametrize(
    ("tasks", "host", "expected"),
    [
        ("8", "0", 8),
        ("8(x2)", "1", 8),
        ("2(x3),1", "2", 2),
        ("2(x3),1", "3", 1),
        ("2(x3),1", "4", None),
        ("8(x2)", "", None),
        ("many", "0", None),
    ],
)
def test_srun_counts_the_tasks_of_a_host(tasks: str, host: str, expected: int | None) -> None:
    said = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": host}
    found = read_environment({**SRUN, **said})
    assert found is not None and found.local_world == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, True),
        ({"SLURM_GPUS_PER_TASK": "h100:2", "CUDA_VISIBLE_DEVICES": "0,1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "3"}, True),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"}, True),
        ({"SLURM_STEP_GPUS": "3"}, True),
        ({"SLURM_STEP_GPUS": "3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, False),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, False),
        ({}, False),
    ],
)
def test_a_gpu_for_each_task(said: dict[str, str], expected: bool) -> None:
    found = read_environment({**SRUN, **said})
    assert found is not None and found.own_gpu is expected


def test_a_gpu_of_torchrun_itself_is_not_one_of_its_ranks() -> None:
    """A Slurm task with eight GPUs may be torchrun, which starts eight ranks."""
    found = read_environment({**SRUN, **TORCHRUN, "SLURM_GPUS_PER_TASK": "8"})
    assert found is not None and not found.own_gpu


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_is_named(missing: str) -> None:
    with pytest.raises(FivefoldError, match=rf"but not {missing}: .*torchrun"):
        read_environment(without(TORCHRUN, missing))


def test_half_of_slurm_is_named() -> None:
    with pytest.raises(FivefoldError, match=r"but not SLURM_NTASKS, SLURM_JOB_ID: .*srun"):
        read_environment(without(SRUN, "SLURM_NTASKS", "SLURM_JOB_ID"))


def test_numbers_are_checked() -> None:
    with pytest.raises(FivefoldError, match="RANK is 'two': it must be a whole number"):
        read_environment({**TORCHRUN, "RANK": "two"})
    with pytest.raises(FivefoldError, match=r"rank 8 of 8: .* the highest is 7"):
        read_environment({**TORCHRUN, "RANK": "8"})


@pytest.mark.parametrize(("machine", "stays"), [("aarch64", False), ("x86_64", True)])
def test_a_rank_on_arm_multiplies_by_blas(
    monkeypatch: pytest.MonkeyPatch, machine: str, stays: bool
) -> None:
    before = torch.backends.mkldnn.enabled
    monkeypatch.setattr("platform.machine", lambda: machine)
    try:
        torch.backends.mkldnn.enabled = True
        RankDevice().start()
        assert torch.backends.mkldnn.enabled is stays
    finally:
        torch.backends.mkldnn.enabled = before
