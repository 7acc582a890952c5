"""A plan and how it is to start, as values: which nodes, which ranks, and a script with reasons.

`LaunchRequest` is what a user says; `job_of` derives the rest from the plan and refuses what cannot
run. `torchrun.py`, `slurm.py` and `kubernetes.py` write a `LaunchJob` as text, in which every line
follows its reason. What comes from the plan or the user is quoted for the shell, or has only
characters that need no quotes. Ranks find one another as `launcher.py` reads it. Nothing here loads
torch.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

from fivefold.core import FivefoldError, Machine, UnknownName, bullets, counted
from fivefold.core.plan import Plan

Target = Literal["slurm", "torchrun", "kubernetes"]
TARGETS: tuple[Target, ...] = get_args(Target)
_FILES: dict[Target, str] = {
    "slurm": "train.sbatch",
    "torchrun": "train.sh",
    "kubernetes": "train.yaml",
}
USUAL_GPUS = 8  # of a node, if the plan has no machine
_USUAL_CPUS = 8  # of a GPU
_SMOKE_STEPS = 20
_MOST_SECONDS = 65_535  # of Slurm's --signal
_WIDTH = 96
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_LABEL = r"[a-z]([a-z0-9-]*[a-z0-9])?"  # of DNS, for a Service
_LABEL_LENGTH = 63
_SLURM_NAMES = r"[A-Za-z0-9_][A-Za-z0-9_.,@/-]*"
_HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?"
_IMAGE = r"[a-z0-9][A-Za-z0-9._/-]*(:[A-Za-z0-9_][A-Za-z0-9._-]*)?(@[a-z0-9]+:[a-f0-9]+)?"
_TIME = r"(\d+)|(\d+):(\d+)|(\d+):(\d+):(\d+)|(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?"


@dataclass(frozen=True)
class LaunchRequest:
    """Options of a launch. None follows from the plan, or is left out."""

    plan: str  # the path of the plan file
    out: str | None = None
    name: str | None = None
    gpus_per_node: int | None = None
    cpus: int | None = None
    restarts: int = 3
    grace: int = 300
    partition: str | None = None
    account: str | None = None
    time: str = "24:00:00"
    master: str | None = None
    image: str | None = None
    claim: str = "runs"
    smoke: bool = False  # a short test of the cluster, for which the defaults of `[train]` do
    file: str | None = None  # where the script is written


@dataclass(frozen=True)
class LaunchJob:
    """A resolved launch: `nodes` with the same number of ranks."""

    target: Target
    request: LaunchRequest
    name: str
    out: str
    nodes: int
    per_node: int
    cpus: int
    device: str | None  # None if the plan has no machine: train takes GPUs where it sees them
    file: str  # the script as a word of a command

    @property
    def train(self) -> str:
        """Arguments of `fivefold train` after the plan and the run folder."""
        device = "" if self.device is None else f" --device {self.device}"
        return f"{device} --steps {_SMOKE_STEPS}" if self.request.smoke else device

    @property
    def start(self) -> str:
        """Command that submits the script."""
        if self.target == "slurm":
            return f"sbatch {self.file}"
        if self.target == "kubernetes":
            return f"kubectl apply -f {self.file}"
        if self.nodes == 1 or self.request.master is not None:
            return f"bash {self.file}"
        return f"MASTER_ADDR=FIRST_NODE bash {self.file}"

    def head(self, plan: Plan, note: str) -> list[str]:
        """First comment of a script: its content, how it was generated, and how to start it."""
        kind = "rank" if self.device == "cpu" else "GPU"
        size = f"{counted(self.nodes, 'node')} with {counted(self.per_node, kind)} each"
        ranks = f"{plan.shape.name} in {plan.layout}: {counted(plan.layout.world, 'rank')}, {size}."
        origin = f"Made by `fivefold launch {self.target}` from {one_line(self.request.plan)}"
        again = f"{ranks} {origin}: make it again when the plan changes."
        return [*comment(again), "#", *comment(f"    {self.start}"), "#", *comment(note), ""]


class Reasoned(NamedTuple):
    """A line of a script with its reason."""

    why: str
    text: str


def comment(text: str, indent: str = "") -> list[str]:
    """Format a text as comment lines."""
    head = f"{indent}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=head)


def explained(lines: Iterable[Reasoned | str], indent: str = "") -> Iterator[str]:
    """Format lines, each after its reason; a line without one continues the previous."""
    for line in lines:
        if isinstance(line, Reasoned):
            yield from comment(line.why, indent)
            yield from textwrap.indent(line.text, indent).splitlines()
        else:
            yield f"{indent}{line}".rstrip()


def one_line(text: str) -> str:
    """Escape a text that is not printable, so that it stays within its comment."""
    return text if text.isprintable() else ascii(text)


def known_target(name: str) -> Target:
    """Validate the target."""
    if name not in TARGETS:
        raise UnknownName("target", name, TARGETS)
    return name


def job_of(target: Target, plan: Plan, request: LaunchRequest) -> LaunchJob:
    """Resolve a launch request; raises with every violated rule."""
    device, problems = _device(plan.machine, target), list[str]()
    per_node = _per_node(plan, request.gpus_per_node, device, problems)
    nodes = plan.layout.world // per_node
    name = _usual_name(target, plan) if request.name is None else request.name
    problems += _bad_words(target, request, name, nodes)
    problems += _bad_numbers(target, request)
    if nodes > 1 and not request.smoke:
        problems += _defaults(plan, nodes)
    if problems:
        raise FivefoldError(bullets(f"cannot write a script for {target}:", problems))
    cpus = request.cpus or (1 if device == "cpu" else _USUAL_CPUS)
    # A run of its own: the real job would resume from the checkpoint of the test.
    usual_out = f"runs/{name}-smoke" if request.smoke else f"runs/{name}"
    out = usual_out if request.out is None else request.out
    file = one_line(shlex.quote(request.file or _FILES[target]))
    return LaunchJob(target, request, name, out, nodes, per_node, cpus, device, file)


def _defaults(plan: Plan, nodes: int) -> Iterator[str]:
    """Defaults of `[train]` that would waste the GPUs of several nodes. The learning rate is not
    among them: its default may be meant."""
    for key, (default, line) in plan.options.train.still_yours().items():
        if key != "lr":
            yield (
                f"{key} has its default ({default}), which is for a first try and not for "
                f"{counted(nodes, 'node')}: write {line.split('  #')[0]} under [train] of the "
                "plan, or add --smoke for a short test"
            )


def _device(machine: Machine | None, target: Target) -> str | None:
    """Where ranks of this machine run."""
    if machine is None:
        return None
    if re.search(r"\bTPU\b", machine.chip):
        raise FivefoldError(
            f"{machine.name} is for estimates ({machine.chip}), and train runs on NVIDIA GPUs or "
            "CPUs: plan on another machine, with --machine"
        )
    if not re.search(r"\bCPU\b", machine.chip) and machine.tiers[0].link.name != "loopback":
        return "cuda"
    if target != "torchrun":
        raise FivefoldError(
            f"{machine.name} has CPUs ({machine.chip}), and {target} asks for nodes with GPUs: "
            "choose torchrun, or plan on a machine with GPUs"
        )
    return "cpu"


def _per_node(plan: Plan, per_node: int | None, device: str | None, problems: list[str]) -> int:
    """Ranks on each node, all nodes alike: as asked, or as the machine has GPUs."""
    world, machine = plan.layout.world, plan.machine
    most = world if device == "cpu" else machine.gpus_per_node if machine else USUAL_GPUS
    chosen = min(most, world) if per_node is None else per_node
    if chosen < 1:
        problems.append(f"--gpus-per-node {chosen}: a node has at least 1")
        return 1
    if machine is not None and device == "cuda" and chosen > most:
        problems.append(
            f"--gpus-per-node {chosen}: a node of {machine.name} has {most}; give at most {most}, "
            "or plan on another machine"
        )
    elif world % chosen:
        fits = max(divisor for divisor in range(1, min(chosen, world) + 1) if world % divisor == 0)
        problems.append(
            f"{counted(world, 'rank')} ({plan.layout}) do not fill nodes of {chosen}: give "
            f"--gpus-per-node {fits}, or plan for a multiple of {chosen} ranks"
        )
    return chosen


def _usual_name(target: Target, plan: Plan) -> str:
    """The model's name, in the characters that the target allows."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.shape.name).strip("-._") or "fivefold"
    if target != "kubernetes":
        return name
    name = re.sub(r"[^a-z0-9]+", "-", name.lower())[:50].strip("-")
    return name if re.match("[a-z]", name) else f"fivefold-{name}"


def _bad_words(target: Target, request: LaunchRequest, name: str, nodes: int) -> Iterator[str]:
    """Words that a script cannot have, or not without quotes."""
    if target == "kubernetes":
        most = _LABEL_LENGTH - len(f"-{nodes - 1}")  # pods add their number
        if not re.fullmatch(_LABEL, name) or len(name) > most:
            yield (
                f"--name {name!r}: it is a name in DNS; use at most {most} of a-z, 0-9 and -, with "
                "a letter first"
            )
        if request.image is None:
            yield "--image is missing: give one with fivefold, such as fivefold:0.1.0"
    elif not re.fullmatch(_NAME, name):
        yield f"--name {name!r}: use letters, digits, ., _ and -, with a letter or digit first"
    rules = {
        "partition": (_SLURM_NAMES, "letters, digits, _, - and commas"),
        "account": (_SLURM_NAMES, "letters, digits, _ and -"),
        "master": (_HOST, "HOST or HOST:PORT, as in node1:29400"),
        "image": (_IMAGE, "NAME:TAG, as in fivefold:0.1.0"),
        "claim": (_LABEL, "the name of a PersistentVolumeClaim: a-z, 0-9 and -"),
    }
    for option, (rule, hint) in rules.items():
        value = cast("str | None", getattr(request, option))
        if value is not None and not re.fullmatch(rule, value):
            yield f"--{option} {value!r}: give {hint}"
    for option in ("plan", "out"):
        value = cast("str | None", getattr(request, option))
        if value is not None and (not value.isprintable() or not value.strip()):
            yield f"{option} {value!r}: give a path that can be printed"


def _bad_numbers(target: Target, request: LaunchRequest) -> Iterator[str]:
    if request.cpus is not None and not 1 <= request.cpus <= 1024:
        yield f"--cpus {request.cpus}: give 1 to 1024 cores of each rank"
    if not 0 <= request.restarts <= 1000:
        yield f"--restarts {request.restarts}: give 0 to 1000"
    if not 1 <= request.grace <= _MOST_SECONDS:
        yield f"--grace {request.grace}: give 1 to {_MOST_SECONDS} seconds"
    if target != "slurm":
        return
    seconds = slurm_seconds(request.time)
    if seconds is None:
        yield f"--time {request.time!r}: give minutes, HH:MM:SS or DAYS-HH:MM:SS"
    elif seconds <= request.grace:
        yield (
            f"--time {request.time} is not longer than --grace, the {request.grace} s in which a "
            "checkpoint is written: give more time"
        )


def slurm_seconds(text: str) -> int | None:
    """Parse a Slurm time limit to seconds; None if it is invalid.

    >>> slurm_seconds("90"), slurm_seconds("1-12"), slurm_seconds("00:10:00"), slurm_seconds("1h")
    (5400, 129600, 600, None)
    """
    match = re.fullmatch(_TIME, text, re.ASCII)
    if match is None:
        return None
    minutes, m2, s2, h3, m3, s3, days, h4, m4, s4 = (int(group or 0) for group in match.groups())
    in_minutes = minutes + m2 + m3 + m4 + 60 * (h3 + h4 + 24 * days)
    return 60 * in_minutes + s2 + s3 + s4


def paths(job: LaunchJob) -> list[Reasoned]:
    """Quoted paths of a script: plan and run folder."""
    return [
        Reasoned(
            "The plan, from the folder in which this script is started.",
            f"plan={shlex.quote(job.request.plan)}",
        ),
        Reasoned(
            "The folder of the run, which all nodes share: metrics, checkpoints, the plan as run.",
            f"run={shlex.quote(job.out)}",
        ),
    ]


def waiting(process: str) -> list[Reasoned | str]:
    """Script lines that wait for the last background process, also after signals."""
    return [
        Reasoned(
            f"bash hears a signal only while it waits. A signal ends `wait`, but not {process}: "
            "then wait again.",
            "code=0\n"
            "wait $! || code=$?\n"
            "while kill -0 $! 2> /dev/null; do\n"
            "    code=0\n"
            "    wait $! || code=$?\n"
            "done",
        )
    ]
