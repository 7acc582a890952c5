"""What a training starts with: its layout, devices, memory, plan and restarts."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fivefold.commands.job import GivenJob
from fivefold.commands.search import (
    NOT_SEARCHED,
    best_of,
    estimate_options,
    fixed_values,
    request_of,
)
from fivefold.core import PRECISIONS, FivefoldError, Machine, RankLost, counted
from fivefold.core import hardware as machines
from fivefold.core.layout import Partners
from fivefold.core.plan import Plan, PlanOptions, Recipe, resolve
from fivefold.cost.step import save_cost
from fivefold.launch import LauncherEnvironment, without_replica
from fivefold.records import PlannedStep, gpu_names

if TYPE_CHECKING:
    from fivefold.data import Source
    from fivefold.launch import HostKeeper, InheritedMemory, RankDevice
    from fivefold.planner import Estimate
    from fivefold.train import RunOptions, TrainSettings

# Keys that a search chooses; microbatches follow from the batch.
_CHOSEN = (
    *("layout", "zero", "gather", "sp", "context", "schedule", "chunks", "stage_layers"),
    *("microbatch_size", "recompute", "ep_nodes"),
)
_CALIBRATION = "2"  # seconds of measuring
_OTHER = "; --layout chooses another"


def with_layout(
    job: GivenJob, before: PlanOptions | None, device: str, launched: LauncherEnvironment | None
) -> tuple[PlanOptions, list[str]]:
    """The options with a layout if the user gave none, and why: that of the run that resumes, or
    one for all ranks of a launcher, or for all visible GPUs.

    The planner chooses it where the machine is known. Ranks of several hosts, which could find
    different GPUs, must choose the same: they take one from the plan or from data ranks alone.
    """
    options = job.options
    if not job.is_open:
        return options, []
    if before is not None and options.gpus is None:
        keys = {name: getattr(before, name) for name in _CHOSEN if name not in job.keys}
        why = [f"{before.layout}, as the run before{_OTHER}"]
        return replace(options, **keys), why if before.layout != options.layout else []
    from fivefold.launch import num_gpus

    visible = num_gpus() if device != "cpu" and launched is None else 1
    ranks = options.gpus or (visible if launched is None else launched.world)
    if ranks <= 1:
        return options, []
    whose = counted(ranks, "visible GPU" if ranks == visible else "rank")
    one_host = launched is None or launched.local_world == launched.world
    machine = options.machine or (machine_here() if one_host else None)
    data = replace(options, layout=f"dp={_data_ranks(options, ranks)}", gpus=None)
    if machine is None or any(name in job.keys for name in NOT_SEARCHED):
        return data, [f"{data.layout} for {whose}, as data ranks{_OTHER}"]
    batch = resolve(data).batch.sequences if options.batch is None else options.batch
    new_options = replace(options, gpus=ranks, batch=batch, machine=machine)
    keywords = estimate_options(0.05, options.train.kernels, None, None)
    fixed = {**fixed_values(job, None), "offload": options.train.offload_kind}
    plan = best_of(request_of(new_options, fixed, keywords, None), "tokens", 1).plans[0].plan
    why = f"{plan.layout} for {whose}, the planner's choice on {machine}{_OTHER}"
    return replace(plan.options, machine=options.machine), [why]


def _data_ranks(options: PlanOptions, most: int) -> int:
    """The most data ranks over which a given batch can be spread."""
    rows = options.microbatch_size or 1
    if options.batch is None or options.batch % rows:
        return most
    return max(dp for dp in range(1, most + 1) if options.batch // rows % dp == 0)


def machine_here() -> str | None:
    """The preset of this machine's GPUs, by the name that the driver gives them; None if there is
    none, or they differ."""
    names = {*gpu_names()}
    names_of_gpu = re.findall("[a-z0-9]+", names.pop().lower()) if len(names) == 1 else []
    if "pcie" in names_of_gpu:  # the presets have NVLink
        return None
    known = [name for name in machines.presets() if name in names_of_gpu]
    return "a100-40g" if known == ["a100"] and "40gb" in names_of_gpu else next(iter(known), None)


def device_of(plan: Plan, options: RunOptions, launched: LauncherEnvironment | None) -> RankDevice:
    """The device of the first rank, or of this one, and the backend of all; refused if these ranks
    cannot have it."""
    from fivefold.launch import (
        NcclLibrary,
        available_device,
        choose_backend,
        forked_device,
        launched_device,
        num_gpus,
    )

    gpus, nccl = num_gpus(), NcclLibrary.current()
    device = available_device(options.device, gpus)
    if launched is not None:
        return launched_device(device, options.backend, launched, gpus, nccl)
    world = plan.layout.world
    backend = choose_backend(options.backend, device, world, gpus, nccl)
    return forked_device(device, backend, 0, world)


def calibrated_cpu(report: Callable[[str], object]) -> Machine | None:
    """This machine's CPU as `fivefold calibrate` measures it. The file is kept in the user's cache,
    so that it is measured once. None where it cannot be measured or written."""
    import torch

    from fivefold import __version__
    from fivefold.calibrate import device_name, num_cores

    facts = device_name(torch.device("cpu")), num_cores(), torch.__version__, __version__
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fivefold"
    path, draft = (cache / f"cpu-{name}{end}.toml" for end in ("", f"-{os.getpid()}"))
    if not path.exists():
        report(f"measuring this CPU once, in a few seconds, to plan its steps: {path}")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            calibrate_cpu(draft)
            draft.replace(path)  # another start that measures too writes the same file
        except (OSError, subprocess.SubprocessError):
            return None
    try:
        return machines.load(path)
    except FivefoldError:
        path.unlink(missing_ok=True)  # a damaged file is measured again
        return None


def calibrate_cpu(path: Path) -> None:
    """Measure this machine's CPU into a machine file. Raises if that fails or takes a minute.

    It runs in a process of its own: some BLAS libraries deadlock in ranks that are forked from a
    process which has multiplied matrices."""
    args = ["calibrate", "--device", "cpu", "--ranks", "2", "--seconds", _CALIBRATION]
    command = [sys.executable, "-m", "fivefold", *args, "-o", str(path)]
    subprocess.run(command, capture_output=True, check=True, timeout=60)


def settings_of(
    plan: Plan,
    options: RunOptions,
    folder: Path,
    rank: RankDevice,
    report: Callable[[str], object] | None = None,
) -> TrainSettings:
    """What the options mean on these ranks: a dtype, and what the plan expects of a step. Without a
    machine, ranks on this host's CPU are planned for it; `report` says when it is measured."""
    from fivefold.train import TrainSettings
    from fivefold.train.callbacks import estimate_of

    device = rank.device.type
    dtype = options.dtype or PRECISIONS[plan.precision].dtype
    if options.dtype is None and device == "cpu" and dtype == "bfloat16":
        dtype = "float32"  # CPUs are slow at bfloat16, which is the default of every plan
    cpu = None
    if report is not None and device == "cpu" and plan.machine is None:
        cpu = calibrated_cpu(report)
    estimate = estimate_of(plan, plan.options.train, cpu)
    if estimate is not None:
        _require_limit(plan, estimate, cpu or plan.machine)
    return TrainSettings(
        recipe=plan.options.train,
        dtype=cast("Any", dtype),
        device=cast("Any", device),
        backend=rank.backend,
        options=options,
        folder=folder,
        planned=None if estimate is None else PlannedStep.of(estimate),
    )


def _require_limit(plan: Plan, estimate: Estimate, machine: Machine | None) -> None:
    """Refuse a `hang_after` that a planned step or save would exceed."""
    hang_after = plan.options.train.hang_after
    phases = {"a step": estimate.step}
    if machine is not None:
        phases["a save"] = save_cost(plan, machine, "disk").write
    phase, seconds = max(phases.items(), key=lambda item: item[1])
    if 0 < hang_after < seconds:
        raise FivefoldError(
            f"hang_after = {hang_after:g} seconds, and {phase} is planned to take {seconds:.3g}: "
            "give more than that, or 0 for never"
        )


def noted(plan: Plan, rank: RankDevice) -> Plan:
    """The plan with a note on how collectives travel between GPUs."""
    if rank.device.type == "cpu" or plan.layout.world == 1:
        return plan
    return replace(plan, notes=(*plan.notes, rank.describe()))


def plan_facts(plan: Plan) -> dict[str, object]:
    """Facts of a start, for --json too."""
    return {
        "model": plan.shape.name,
        "layout": str(plan.layout),
        "world": plan.layout.world,
        "zero": plan.layout.zero,
        "schedule": plan.schedule.name,
    }


def start_facts(plan: Plan, source: Source) -> dict[str, object]:
    """Facts of this start for `run.json`."""
    tokenizer = source.tokenizer
    return {**plan_facts(plan), "tokenizer": None if tokenizer is None else asdict(tokenizer)}


@dataclass(frozen=True)
class RestartedRun:
    """A rank was lost, and all ranks start again with this plan."""

    lost: RankLost
    number: int
    most: int
    plan: Plan

    def __str__(self) -> str:
        note = f"; {self.plan.notes[-1]}" if self.plan.notes else ""
        return f"{self.lost.reason}\nrestart {self.number} of {self.most}{note}"


def require_restarts(options: RunOptions, plan: Plan, launched: LauncherEnvironment | None) -> None:
    """Refuse restarts that nobody could make."""
    if options.restarts < 0:
        raise FivefoldError(f"restarts {options.restarts}: 0 or more")
    if options.shrink and not options.restarts:
        raise FivefoldError("--shrink leaves a replica out at a restart: give --restarts too")
    if options.restarts and launched is not None:
        raise FivefoldError(
            "--restarts: these ranks were started by a launcher, which restarts them itself; "
            "give torchrun --max-restarts"
        )
    if options.restarts and options.check:
        raise FivefoldError("--check compares one start with one process: leave --restarts out")
    if options.shrink:
        without_replica(plan)


def copy_domain(recipe: Recipe, world: int, launched: LauncherEnvironment | None) -> int:
    """The ranks of a failure domain, 0 if one host keeps all copies; refused if a failure would
    lose a rank and its partner."""
    per_host = world if launched is None else launched.local_world or 1
    even = per_host < world and world % per_host == 0
    domain = recipe.copy_domain or (per_host if even and recipe.copy_every else 0)
    return Partners.checked(world, domain, per_host).domain


@contextmanager
def host_keeper(
    recipe: Recipe, launched: LauncherEnvironment, folder: Path
) -> Generator[HostKeeper | None]:
    """The keeper of copies on the host of a launched rank; it ends with a run that ends well."""
    from fivefold.launch import HostKeeper

    if not recipe.copy_every:
        yield None
        return
    share = None
    if launched.local_world != launched.world:
        share = (launched.local_rank, launched.local_world or 1)
    keeper = HostKeeper(folder, os.getppid(), share)
    yield keeper
    keeper.end()


@contextmanager
def kept_memory(recipe: Recipe, world: int) -> Generator[InheritedMemory | None]:
    """Memory of this process for the copies of ranks that it forks; None without copies."""
    from fivefold.launch import InheritedMemory

    if not recipe.copy_every:
        yield None
        return
    memory = InheritedMemory.create(world)
    try:
        yield memory
    finally:
        memory.close()
