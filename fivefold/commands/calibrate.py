"""`fivefold calibrate`: measure this machine, and write a machine file with the result."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.commands.job import OnProgress, TaskProgress, above, asked_backend
from fivefold.commands.options import BackendOption, print_answer, shown_progress
from fivefold.core import FivefoldError, Machine, tables
from fivefold.core import hardware as machines
from fivefold.cost.hardware import (
    LINKS,
    MEMORY,
    Calibration,
    FittedConstant,
    MeasuredTimes,
    Sample,
    guess_base,
)
from fivefold.cost.hardware import calibrate as fit_constants
from fivefold.launch import LauncherEnvironment, read_torchrun
from fivefold.render import write_text

if TYPE_CHECKING:
    from fivefold.launch import Backend, RankDevice

Tick = Callable[[], None]

_OUTPUT = Path("machine.toml")
_MOST_RANKS = 64  # processes on one machine
_MOST_SECONDS = 120.0


def run(
    output: Annotated[
        Path | None,
        typer.Option("-o", help="Machine file to write (default machine.toml)."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="Preset for all other constants (default: by the GPU's name, or laptop)."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="CPU ranks between which rings are measured.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda (default: cuda if there is a GPU).")
    ] = None,
    backend: BackendOption = None,
    seconds: Annotated[float, typer.Option(help="Seconds to measure, at most 120.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine in two minutes: matmuls, attention, copies, launches and rings."""
    with shown_progress("calibrate") as on_progress:
        calibrated = calibrate(
            output=output,
            base=base,
            ranks=ranks,
            device=device,
            backend=backend,
            seconds=seconds,
            on_progress=on_progress,
        )
    if calibrated is not None:
        print_answer(calibrated, as_json)


@dataclass(frozen=True)
class CalibratedMachine:
    """A machine file, and the measured times that it comes from.

    `str()` is the text of `fivefold calibrate`, `to_json()` its JSON.
    """

    path: Path
    calibration: Calibration
    measured: MeasuredTimes
    source: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """What `fivefold calibrate --json` prints."""
        table = table_json(self.calibration, self.measured)
        return {"written": str(self.path), "seconds": self.seconds, **table}

    def __str__(self) -> str:
        lines = table_text(self.calibration, self.measured)
        head = f"{self.source}; base {self.calibration.base.name}"
        return "\n".join([head, "", *lines, "", f"{self.path} written in {self.seconds:.0f} s"])


def calibrate(
    *,
    output: str | Path | None = None,
    base: str | None = None,
    ranks: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    seconds: float = _MOST_SECONDS,
    on_progress: OnProgress | None = None,
) -> CalibratedMachine | None:
    """Measure this machine, and write a machine file with the result.

    Under torchrun the rings are measured between all its ranks; rank 0 writes the file, and the
    others return None.
    """
    began = time.perf_counter()
    preset = None if base is None else _preset(base)
    above("--seconds", seconds, 0.0)
    if seconds > _MOST_SECONDS:
        raise FivefoldError(f"--seconds {seconds:g}: give {_MOST_SECONDS:g} at most")
    if ranks is not None and not 1 <= ranks <= _MOST_RANKS:
        raise FivefoldError(f"--ranks {ranks}: give a number from 1 to {_MOST_RANKS}")
    if device not in (None, "cpu", "cuda"):
        raise FivefoldError(f"unknown --device {device!r}: choose from cpu, cuda")
    backend_choice = asked_backend(backend)
    target = _target(None if output is None else Path(output))
    torchrun = read_torchrun(os.environ)
    rank = _device(device, backend_choice, ranks, torchrun)
    if rank.device.type == "cpu":
        torchrun = None  # its ranks are forked here
    machine, notes = _base(preset, rank)
    dtype = "fp32" if rank.device.type == "cpu" else "bf16" if machine.peaks.bf16 else "fp16"
    machine.peak(dtype)  # refuses a base without one
    num_ranks = torchrun.world if torchrun else ranks or 1
    _require_one_domain(machine, num_ranks)
    start, is_first = time.perf_counter(), torchrun is None or torchrun.rank == 0

    def tick() -> None:
        if is_first and on_progress is not None:
            on_progress(TaskProgress(time.perf_counter() - start, seconds, "calibrate"))

    rings = _rings(num_ranks, rank, torchrun, seconds, tick)
    if not is_first:
        return None
    measured = _measured(machine, rank, dtype, began + seconds, tick, notes)
    if rings:
        measured = replace(measured, ranks=num_ranks, samples={**measured.samples, LINKS: rings})
    source = _source(measured)
    calibration = fit_constants(machine, measured, source)
    write_text(target, file_text(calibration, measured, source))
    machines.load(target)  # checks that the file can be read
    spent = time.perf_counter() - began
    return CalibratedMachine(target, calibration, measured, source, spent)


def _preset(name: str) -> Machine:
    """The machine of a preset; only a preset can be a base."""
    if name.lower() not in machines.presets():
        known = ", ".join(machines.presets())
        raise FivefoldError(f"unknown --base {name!r}: choose from {known}")
    return machines.load(name.lower())


def _target(output: Path | None) -> Path:
    """The file to write, checked before two minutes of measurement."""
    if output is None and _OUTPUT.exists():
        raise FivefoldError(f"{_OUTPUT} exists: say -o {_OUTPUT} to write over it, or another name")
    target = output or _OUTPUT
    if target.suffix != ".toml":
        raise FivefoldError(f"-o {target}: give a name that ends in .toml, as --machine wants it")
    if not target.parent.is_dir():
        raise FivefoldError(f"cannot write {target}: give a path in a folder that exists")
    return target


def _device(
    name: str | None,
    backend: Backend | None,
    ranks: int | None,
    torchrun: LauncherEnvironment | None,
) -> RankDevice:
    """The device of this rank and the backend; refuses what is not available."""
    from fivefold.launch import (
        NcclLibrary,
        choose_backend,
        forked_device,
        launched_device,
        num_gpus,
    )

    gpus = num_gpus()
    if name == "cuda" and not gpus:
        raise FivefoldError("--device cuda: no GPU is seen here; use --device cpu")
    chosen = name or ("cuda" if gpus else "cpu")
    if chosen == "cpu" and torchrun is not None and torchrun.world > 1:
        raise FivefoldError("torchrun is for GPUs: measure the rings of CPUs with --ranks")
    if chosen == "cuda" and ranks not in (None, torchrun.world if torchrun else 1):
        raise FivefoldError(
            f"--ranks {ranks} on GPUs needs a process each: start it with torchrun "
            f"--nproc_per_node {ranks} -m fivefold calibrate"
        )
    if torchrun is not None and chosen == "cuda":
        return launched_device(chosen, backend, torchrun, gpus, NcclLibrary.current())
    agreed = choose_backend(backend, chosen, 1, gpus, NcclLibrary.current())
    return forked_device(chosen, agreed, 0, 1)


def _base(preset: Machine | None, rank: RankDevice) -> tuple[Machine, list[str]]:
    """The base preset, and notes if it was guessed or if the links are not those of a machine."""
    notes: list[str] = []
    if rank.sharers > 1:
        notes.append(f"{rank.describe()}: the times of rings are not those of links")
    if preset is not None:
        return preset, notes
    if rank.device.type == "cpu":
        return machines.load("laptop"), notes
    import torch

    properties = torch.cuda.get_device_properties(rank.device)
    name = guess_base(properties.name, properties.total_memory)
    note = f"base {name} was guessed from {properties.name!r}; if it is another, say --base"
    return machines.load(name), [*notes, note]


def _require_one_domain(base: Machine, ranks: int) -> None:
    """Refuse rings over several tiers: their times could not be assigned to one tier."""
    tier = base.tiers[0]
    if tier.size is not None and ranks > tier.size:
        raise FivefoldError(
            f"{ranks} ranks are more than one {tier.name} domain of {base.name} holds: start "
            f"{tier.size} at most"
        )


def _rings(
    ranks: int,
    rank: RankDevice,
    torchrun: LauncherEnvironment | None,
    seconds: float,
    tick: Tick,
) -> list[Sample]:
    """Times of rings; none for a single rank."""
    if ranks == 1:
        return []
    from fivefold.calibrate import RINGS_SHARE, forked_rings, launched_rings
    from fivefold.core import RankLost

    share = RINGS_SHARE * seconds
    if torchrun is not None:
        return launched_rings(torchrun, rank, share)
    try:
        return forked_rings(ranks, share, tick)
    except RankLost as error:
        raise FivefoldError(f"the ranks cannot be measured: {error}; give fewer --ranks") from error


def _measured(
    base: Machine, rank: RankDevice, dtype: str, until: float, tick: Tick, notes: list[str]
) -> MeasuredTimes:
    """Measure one device."""
    import torch

    from fivefold.calibrate import Bench, device_name, layer_host_seconds, num_cores

    if rank.device.type == "cpu":
        torch.set_num_threads(1)  # a rank is one process on one core
    rank.start()
    device = rank.device
    bench = Bench(device, dtype, until, tick, notes)
    try:
        samples = bench.measure(fp8="fp8" in base.peaks.known())
    except torch.OutOfMemoryError as error:
        raise FivefoldError(
            "the GPU has too little free memory; several GiB are needed: end what else runs on it"
        ) from error
    times = MeasuredTimes(device_name(device), dtype, samples, bench.launch(), notes=bench.notes)
    if device.type == "cuda":
        return times
    return replace(times, host=layer_host_seconds(), cores=num_cores())


def _source(measured: MeasuredTimes) -> str:
    """The source of the numbers, for the file."""
    import torch

    ranks = f", {measured.ranks} ranks" if measured.ranks > 1 else ""
    return (
        f"Measured by fivefold calibrate on {datetime.date.today().isoformat()}: "
        f"{measured.device} in {measured.dtype}, torch {torch.__version__}{ranks}"
    )


# What is written and printed.


def file_text(calibration: Calibration, measured: MeasuredTimes, source: str) -> str:
    """The machine file: comments with the errors of the fits, then the table."""
    lines = [
        f"{source}.",
        "Constants that are not here are those of the base.",
        "Errors of the fits, relative to the measured times:",
        *(f"  {row.key}: {_errors(row)}" for row in calibration.rows if row.rate is not None),
        f"Launch floor, not a constant: {_seconds(measured.launch)} per small kernel.",
        *(f"Note: {note}." for note in calibration.notes),
    ]
    comments = "\n".join(f"# {line}" for line in lines)
    return f"{comments}\n\n{tables.to_toml(calibration.table)}"


def table_text(calibration: Calibration, measured: MeasuredTimes) -> Iterator[str]:
    """The constants of the base and the measured ones, with their errors on the measured times."""
    head = f"{'constant':<15}{'planned':>10}{'measured':>10}{'rate':>16}"
    yield f"{head}{'error':>9}{'worst':>8}{'of planned':>12}{'sizes':>7}"
    for row in calibration.rows:
        shown = f"{row.key:<15}{_value(row, row.planned):>10}{_value(row, row.measured):>10}"
        if row.rate is None:
            yield shown
            continue
        yield (
            f"{shown}{_rate(row.key, row.rate):>16}{row.residuals.median:>9.1%}"
            f"{row.residuals.worst:>8.1%}{row.planned_residuals.median:>12.1%}"
            f"{row.residuals.num_samples:>7}"
        )
    floor = _seconds(measured.launch)
    yield f"{'launch floor':<15}{'':>10}{floor:>10}  per small kernel; not a constant"
    yield from (f"note: {note}" for note in calibration.notes)


def table_json(calibration: Calibration, measured: MeasuredTimes) -> dict[str, Any]:
    """The table as JSON, with every sample."""
    return {
        "base": calibration.base.name,
        "device": measured.device,
        "dtype": measured.dtype,
        "ranks": measured.ranks,
        "constants": {row.key: _row(row) for row in calibration.rows},
        "launch_s": measured.launch,
        "samples": {
            key: [sample._asdict() for sample in samples]
            for key, samples in measured.samples.items()
        },
        "machine": calibration.table,
        "notes": calibration.notes,
    }


def _row(row: FittedConstant) -> dict[str, Any]:
    return {
        "planned": row.planned,
        "measured": row.measured,
        "rate": row.rate,
        "error": row.residuals._asdict(),
        "planned_error": row.planned_residuals._asdict(),
    }


def _errors(row: FittedConstant) -> str:
    errors = row.residuals
    return f"median {errors.median:.1%}, worst {errors.worst:.1%} of {errors.num_samples} sizes"


def _value(row: FittedConstant, value: float) -> str:
    return f"{value:.3g}" if row.rate is not None else _seconds(value)


def _seconds(value: float) -> str:
    return f"{value * 1e6:.3g} us"


def _rate(key: str, rate: float) -> str:
    if key in (MEMORY, LINKS):
        return f"{rate / 1e9:,.4g} GB/s"
    return f"{rate / 1e12:,.3g} TFLOP/s"
