"""Accept the product on a GPU: whole journeys through the command line, at the commit that lands.

    python -m tests.gpu.accept [JOURNEY ...]

A journey is a user's way through several commands, each in a fresh process, from an empty kernel
cache, with the defaults that a user gets (`tests/gpu/journeys.py`). Several ranks share the GPU
over NCCL, under MPS. Every exit code, every printed number and everything on stderr is checked. All
journeys together write `docs/accepted-gpu.md` and `benchmarks/data/accepted-gpu.json`, with the
tree of `fivefold/` as git names it; it must be that of a commit. Named journeys are run and
printed, and nothing is written. Exit code 1: a journey failed. 2: it cannot begin.

A journey that failed is tried once more (`attempts 2` of the record, with what was wrong before):
others beside it or a busy host may be the cause. `--again` does so for the record of this tree,
where a machine was lent for too short a time.

`--cpu` runs the journeys with small models on CPU ranks: a test of the journeys, not of the
product.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tests.gpu.journey import Failure, Journey, SharedGpu, Trip

ROOT = Path(__file__).parents[2]
CARRY = ROOT / "carry"
ENV, PACKED, NCCL, TREE = CARRY / "env", CARRY / "env.tar.xz", CARRY / "nccl.xz", CARRY / "tree"
PACKAGE = "fivefold"
RECORD = ROOT / "benchmarks" / "data" / "accepted-gpu.json"
PAGE = ROOT / "docs" / "accepted-gpu.md"
# Jobs beside one another do not know how many ranks share the GPU: each takes the least of it.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
MOST_RANKS = 22  # that wait for one another on the GPU at a time
MOST_SECONDS = 480


class Refused(Exception):
    """Why nothing can be accepted here."""


def tree_of_files(folder: Path) -> str:
    """The id that git gives to the tree of a folder: of all its files but those it ignores."""
    entries: list[tuple[bytes, bytes, bytes]] = []
    for path in folder.iterdir():
        if path.name == "__pycache__" or path.suffix in (".pyc", ".egg-info"):
            continue
        name = path.name.encode()
        if path.is_dir():
            if any(each.is_file() for each in path.rglob("*") if "__pycache__" not in each.parts):
                content = bytes.fromhex(tree_of_files(path))  # git knows no empty folders
                entries.append((name + b"/", b"40000 " + name, content))
        else:
            mode = b"100755 " if os.access(path, os.X_OK) else b"100644 "
            entries.append((name, mode + name, _git_hash(b"blob", path.read_bytes())))
    return _git_hash(
        b"tree", b"".join(head + b"\0" + content for _, head, content in sorted(entries))
    ).hex()


def _git_hash(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content).digest()


def tree_of_commit(root: Path) -> str:
    """The tree of the package, if a commit has it: HEAD, or the one that `make device-env` noted
    before a copy was made, whose `.git` may be missing or older.

    Refused where the files are no commit's: nobody could run again what was accepted.
    """
    files, noted = tree_of_files(root / PACKAGE), root / TREE.relative_to(ROOT)
    commits = {noted.read_text("utf-8").strip()} if noted.exists() else set[str]()
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", f"HEAD:{PACKAGE}"]
        commits.add(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    if files not in commits:
        raise Refused(
            f"{PACKAGE}/ is not that of a commit (its files are {files}, commits have "
            f"{', '.join(commits) or 'none'}): commit, and `make device-env` before it is copied"
        )
    return files


@dataclass(frozen=True)
class Machine:
    """The GPU, and the environment in which its processes run."""

    device: str
    environment: dict[str, str]
    facts: dict[str, str]


def machine_of(device: str, folder: Path) -> Machine:
    """Prepare what processes of journeys import and load; raises where it cannot be."""
    paths = [str(ROOT)]
    if not ENV.exists() and PACKED.exists():
        with tarfile.open(PACKED) as archive:
            archive.extractall(CARRY, filter="data")
    if ENV.exists() and sys.version_info[:2] == (3, 12):
        paths.append(str(ENV))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        return Machine(device, environment | {"CUDA_VISIBLE_DEVICES": ""}, _facts(environment))
    environment |= SHARING
    facts = _facts(environment)
    if facts["gpu"] == "none":
        raise Refused("there is no GPU: --cpu tries the journeys themselves")
    if tuple(map(int, facts["nccl"].split(".")[:2])) < (2, 30):
        if not NCCL.exists():
            raise Refused(f"NCCL {facts['nccl']} refuses ranks that share a GPU: `make device-env`")
        library = folder / "libnccl.so.2"
        library.write_bytes(lzma.decompress(NCCL.read_bytes()))
        environment["LD_PRELOAD"] = str(library)
        facts = _facts(environment)
    return Machine(device, environment, facts)


def _facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Versions of torch and NCCL, and the name of the GPU, by a process that may use it."""
    code = (
        "import json, torch\n"
        "from fivefold.launch.backend import NcclLibrary\n"
        "gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'\n"
        "nccl = '.'.join(map(str, NcclLibrary.current().version or (0, 0)))\n"
        "print(json.dumps({'torch': torch.__version__, 'nccl': nccl, 'gpu': gpu}))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"fivefold cannot be imported: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def shared_gpu(machine: Machine, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of ranks that run on one GPU at the same time: NVIDIA's MPS is started and
    ended. Without it ranks take turns of milliseconds."""
    if machine.device == "cpu":
        yield machine.environment
        return
    pipe, log = (Path(tempfile.mkdtemp(prefix=name, dir=folder)) for name in ("mps-", "log-"))
    places = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    control = {**os.environ, **places}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=control, check=True)
    try:
        yield machine.environment | places
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit", text=True, env=control)


def travel(
    journey: Journey, machine: Machine, environment: dict[str, str], gpu: SharedGpu, until: float
) -> dict[str, Any]:
    """One journey, in a folder of its own: its line of the record."""
    caches = {f"{name}_CACHE_DIR": None for name in ("TORCHINDUCTOR", "TRITON")}
    clean = {key: value for key, value in environment.items() if key not in caches}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"fivefold-{journey.name}-") as name:
        clean["CUDA_CACHE_PATH"] = clean["TMPDIR"] = name
        trip = Trip(Path(name), clean, machine.device, gpu, until)
        try:
            journey.go(trip)
            wrong = None
        except Failure as error:
            wrong = str(error)
        except Exception:  # a journey that cannot be judged has not passed
            wrong = traceback.format_exc()
        finally:
            trip.end_processes()
    seconds = round(time.monotonic() - began, 1)
    line = {"name": journey.name, "passed": wrong is None, "seconds": seconds, **trip.notes}
    line["commands"] = trip.seconds
    if wrong is not None:
        line["wrong"] = wrong[-4000:]
    verdict = "pass" if wrong is None else "FAIL"
    print(f"{verdict}  {seconds:6.1f} s  {journey.name} {trip.notes} {trip.seconds}", flush=True)
    if wrong is not None:
        print(f"{wrong[-4000:]}\n", flush=True)
    return line


def accept(
    journeys: Sequence[Journey], machine: Machine, folder: Path, until: float, attempts: int = 2
) -> list[dict[str, Any]]:
    """All journeys: those that measure time alone and first, the others side by side.

    When a client of MPS fails, its server ends all of them. So only ranks of one layout are
    clients. A host that others share can be too slow for one measurement. So what has failed is
    tried once more, one journey at a time.
    """
    gpu = SharedGpu(MOST_RANKS if machine.device == "cuda" else 8)

    def run(journey: Journey, shared: dict[str, str]) -> dict[str, Any]:
        environment = shared if journey.together else machine.environment
        return travel(journey, machine, environment, gpu, until)

    alone = [each for each in journeys if each.alone]
    lines = {each.name: run(each, machine.environment) for each in alone}
    beside = [each for each in journeys if not each.alone]
    with shared_gpu(machine, folder) as shared, ThreadPoolExecutor(len(journeys)) as pool:
        for line in pool.map(lambda each: run(each, shared), beside):
            lines[line["name"]] = line
    for journey in [journey for journey in journeys if not lines[journey.name]["passed"]]:
        if time.monotonic() >= until or attempts < 2:
            break
        if journey.together:
            with shared_gpu(machine, folder) as shared:
                line = run(journey, shared)
        else:
            line = run(journey, machine.environment)
        lines[journey.name] = second_attempt(lines[journey.name], line)
    return [lines[each.name] for each in journeys]


def second_attempt(first: Mapping[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """The line of a journey that failed before."""
    return line | {"attempts": first.get("attempts", 1) + 1, "first": first["wrong"]}


def joined(record: Mapping[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A record in which the journeys that had failed were tried once more, on the same tree."""
    again = {line["name"]: line for line in lines}
    journeys = [
        second_attempt(line, again[line["name"]]) if line["name"] in again else line
        for line in record["journeys"]
    ]
    seconds = round(record["seconds"] + sum(line["seconds"] for line in lines))
    return {**record, "seconds": seconds, "runs": record.get("runs", 1) + 1, "journeys": journeys}


def recorded(tree: str, facts: Mapping[str, str]) -> dict[str, Any]:
    """The record that `--again` goes on with."""
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    ours = {"tree": tree, **facts}
    if other := [key for key, value in ours.items() if record.get(key) != value]:
        raise Refused(f"the record has another {', '.join(other)}: run all journeys")
    return record


def page_of(record: Mapping[str, Any]) -> str:
    """The record as a page of docs."""
    rows = []
    for each in record["journeys"]:
        seen = [f"{key} {value}" for key, value in each.items() if key not in KEYS]
        for key, before in (("first", "at first: "), ("wrong", "")):
            if key in each:
                seen.append(before + " ".join(each[key].split()).replace("|", "")[:200])
        verdict = "pass" if each["passed"] else "FAIL"
        rows.append(f"| {each['name']} | {verdict} | {each['seconds']:.0f} | {'; '.join(seen)} |")
    runs = JOINED.format(**record) if "runs" in record else ""
    return "\n".join([HEAD.format(**record, joined=runs), *rows, ""])


JOINED = "- Joined from {runs} runs (`--again`): the first one ended with exit code 1.\n"
KEYS = ("name", "passed", "seconds", "commands", "wrong", "first")
HEAD = """# Accepted on a GPU

`make accept-gpu` drives whole journeys through the command line, in fresh processes, from an empty
kernel cache, with the defaults that a user gets. It checks every exit code, every printed number
and everything on stderr, and ends with 1 if a journey fails. `make device-env` prepares what a GPU
machine lacks on which nothing can be installed.

- tree of `fivefold/`: `{tree}` (`git rev-parse HEAD:fivefold`)
- {gpu}, torch {torch}, NCCL {nccl}, {date}, {seconds} s in all. Ranks of a layout share the one GPU
  over NCCL, under MPS; `kill` runs without MPS. Times are those of journeys side by side, and say
  nothing about speed; only `planned` runs alone. One that fails is tried once more by itself
  (`attempts 2`): a client of MPS that fails takes all others with it, and a host that others use
  too can be too slow for a measurement. What was wrong at first stays in the record.
{joined}
| journey | | s | what was seen |
|---|---|---|---|"""


def main(words: Sequence[str] | None = None) -> int:
    """Run all journeys or those that are named, and record all of them."""
    from tests.gpu.journeys import JOURNEYS

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("journeys", nargs="*", metavar="JOURNEY", help=", ".join(JOURNEYS))
    parser.add_argument("--cpu", action="store_true", help="small models on CPU ranks")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="for all of them")
    parser.add_argument("--again", action="store_true", help="what failed in the record, once more")
    options = parser.parse_args(words)
    unknown = [name for name in options.journeys if name not in JOURNEYS]
    began = time.monotonic()
    try:
        if unknown:
            raise Refused(f"no journey {', '.join(unknown)}: there are {', '.join(JOURNEYS)}")
        if options.again and (options.journeys or options.cpu):
            raise Refused("--again is for the record: leave names and --cpu out")
        records = not options.journeys and not options.cpu
        tree = tree_of_commit(ROOT) if records else tree_of_files(ROOT / PACKAGE)
        names = options.journeys or [name for name in JOURNEYS if not JOURNEYS[name].extra]
        with tempfile.TemporaryDirectory(prefix="fivefold-accept-") as name:
            machine = machine_of("cpu" if options.cpu else "cuda", Path(name))
            if options.again:
                former = recorded(tree, machine.facts)
                names = [line["name"] for line in former["journeys"] if not line["passed"]]
            chosen = [journey for name, journey in JOURNEYS.items() if name in names]
            attempts = 1 if options.again else 2
            lines = accept(chosen, machine, Path(name), began + options.seconds, attempts)
    except Refused as error:
        print(f"accept: {error}", file=sys.stderr)
        return 2
    seconds = round(time.monotonic() - began)
    record = {"tree": tree, "date": date.today().isoformat(), **machine.facts, "seconds": seconds}
    record["journeys"] = lines
    if options.again:
        record = joined(former, lines)
    if records:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        PAGE.write_text(page_of(record), "utf-8")
    lines = record["journeys"]
    failed = [line["name"] for line in lines if not line["passed"]]
    passed, seconds = len(lines) - len(failed), record["seconds"]
    print(f"{passed} of {len(lines)} journeys in {seconds} s, tree {tree}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
