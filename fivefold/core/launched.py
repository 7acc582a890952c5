"""Where a process stands that a launcher started, read from what the launcher left in the
environment.

torchrun and the Kubernetes PyTorchJob set `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`;
`srun` sets `SLURM_PROCID` and its like, from which the meeting point is worked out: the first host
of the job, and a port that follows from the job's number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from fivefold.core.errors import BadFile, FivefoldError

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below those that Linux gives away by itself
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_JOB_ID")


@dataclass(frozen=True)
class Launched:
    """One of `world` processes that a launcher started, and where they meet."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    host: str
    port: int
    restarts: int = 0  # how often the launcher has started all of them again
    hosted: bool = False  # the launcher keeps the store at the meeting point, not rank 0


def here(environment: Mapping[str, str]) -> Launched | None:
    """What the environment says; None where no launcher has started this process."""
    if any(name in environment for name in _TORCHRUN[:2]):
        return _checked(_by_torchrun(environment))
    # A shell inside of an allocation has the job's variables; only a task of srun has its step's.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _checked(_by_slurm(environment))
    return None


def hosts(text: str) -> Iterator[str]:
    """The hosts of a Slurm list, in order.

    >>> list(hosts("login,node[08-10,12]-ib"))
    ['login', 'node08-ib', 'node09-ib', 'node10-ib', 'node12-ib']
    """
    if not re.fullmatch(r"([^,\[\]]|\[[\d,-]+\])+(,([^,\[\]]|\[[\d,-]+\])+)*", text):
        raise FivefoldError(
            f"cannot read the list of hosts {text!r}: expected a form such as node[001-004,7]; "
            "set MASTER_ADDR to the first host"
        )
    for pattern in re.split(r",(?![^\[]*\])", text):
        yield from _expanded(pattern)


def _expanded(pattern: str) -> Iterator[str]:
    head, bracket, rest = pattern.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = rest.partition("]")
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        for number in range(int(first), int(last if dash else first) + 1):
            for behind in _expanded(tail):
                yield f"{head}{number:0{len(first)}}{behind}"


def _by_torchrun(environment: Mapping[str, str]) -> Launched:
    _present(environment, _TORCHRUN, "torchrun or a PyTorchJob", "start it with torchrun")
    number = partial(_number, environment)
    return Launched(
        "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "environment",
        number("RANK"),
        number("WORLD_SIZE"),
        number("LOCAL_RANK", "0"),
        environment["MASTER_ADDR"],
        number("MASTER_PORT"),
        number("TORCHELASTIC_RESTART_COUNT", "0"),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _by_slurm(environment: Mapping[str, str]) -> Launched:
    _present(environment, _SLURM, "srun", "start it with srun, inside of a job")
    number = partial(_number, environment)
    first = environment.get("MASTER_ADDR") or next(hosts(environment["SLURM_JOB_NODELIST"]))
    derived = _FIRST_PORT + number("SLURM_JOB_ID") % _NUM_PORTS
    return Launched(
        "srun",
        number("SLURM_PROCID"),
        number("SLURM_NTASKS"),
        number("SLURM_LOCALID"),
        first,
        number("MASTER_PORT", str(derived)),
        number("SLURM_RESTART_COUNT", "0"),
    )


def _present(
    environment: Mapping[str, str], names: tuple[str, ...], launcher: str, way_out: str
) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        found = next(name for name in names if name in environment)
        raise BadFile(
            "the environment",
            [
                f"{found} is set, as {launcher} would, but not {', '.join(missing)}: {way_out}, or "
                f"unset {found} to start the ranks on this machine"
            ],
        )


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment[name] if default is None else environment.get(name, default)
    if not re.fullmatch(r"\d+", text):
        raise BadFile("the environment", [f"{name} is {text!r}: it must be a whole number"])
    return int(text)


def _checked(launched: Launched) -> Launched:
    if launched.rank >= launched.world:
        raise BadFile(
            "the environment",
            [
                f"rank {launched.rank} of {launched.world}: ranks count from 0, so the highest is "
                f"{launched.world - 1}; RANK and WORLD_SIZE, or Slurm's like, must come from one "
                "launcher"
            ],
        )
    return launched
