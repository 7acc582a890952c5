"""A manifest for `kubectl apply`: a Job with one pod for each node, and torchrun in each pod.

Nothing has to be installed in the cluster beside the driver of its GPUs: an indexed Job numbers its
pods, and a Service without an address gives them names. The plan travels in a ConfigMap. Everything
else that it names lies on a volume that all pods share, and so does the run.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

from fivefold.core import FivefoldError
from fivefold.core.plan import Plan, with_paths
from fivefold.launch.scripts.script import LaunchJob, Reasoned, comment, explained, waiting
from fivefold.launch.scripts.torchrun import PORT, command_lines, settings

VOLUME = "/shared"  # where pods see the volume
_PLAN = "/plan"  # and the plan
_AGAIN = 75  # EX_TEMPFAIL of sysexits.h
_SPARE_SECONDS = 30  # of a pod after its ranks had their time to stop
_IS_DONE = (
    "import json, sys; "
    'last = json.load(open(sys.argv[1]))["starts"][-1]; '
    'sys.exit(last.get("ended", {}).get("why") != "done")'
)


class Because(NamedTuple):
    """A value in a manifest with its reason."""

    why: str
    value: Any


def kubernetes_manifest(plan: Plan, job: LaunchJob) -> str:
    """Manifest of a job: its plan, names of its pods, and the pods."""
    note = (
        f"Before that, copy what the plan names (data, a model) to the volume of the claim "
        f"{job.request.claim}. A run that exists is resumed. Steps: kubectl logs -f job/{job.name}"
    )
    head = job.head(plan, note)
    documents = [_plan(plan, job), *([_names(job)] if job.nodes > 1 else []), _job(plan, job)]
    texts = ["\n".join(_yaml(document)) for document in documents]
    return "\n".join(head) + "\n" + "\n---\n".join(texts) + "\n"


def _plan(plan: Plan, job: LaunchJob) -> dict[str, Any]:
    """The plan as a file of the pods."""
    moved = replace(plan, options=with_paths(plan.options, on_volume))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-plan"},
        "data": Because(
            f"The plan; relative paths in it are now in {VOLUME}, the volume of the pods.",
            {"plan.toml": moved.to_toml()},
        ),
    }


def on_volume(path: str) -> str:
    """Path inside the pods: relative paths are on the volume.

    >>> on_volume("tokens/web"), on_volume("/data/web")
    ('/shared/tokens/web', '/data/web')
    """
    target = posixpath.normpath(posixpath.join(VOLUME, path))
    if not posixpath.isabs(path) and posixpath.commonpath([VOLUME, target]) != VOLUME:
        raise FivefoldError(
            f"{path} lies outside of this folder, and pods see only what is on their volume: call "
            "launch in a folder that holds it, or give the path that pods see, from /"
        )
    return target


def _names(job: LaunchJob) -> dict[str, Any]:
    """Names of pods: NAME-0.NAME and so on."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": Because(
                "No address of its own: it lists the pods by name, and ranks meet at the first.",
                "None",
            ),
            "selector": {"app": job.name},
            "publishNotReadyAddresses": Because(
                "Pods look for one another before any is ready.", True
            ),
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(plan: Plan, job: LaunchJob) -> dict[str, Any]:
    request = job.request
    failures = [
        Because(
            "An evicted pod is replaced, and is no failure.",
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
        ),
        Because(
            "Nor is a pod whose ranks stopped because another one was evicted: see the end of the "
            "script.",
            {
                "action": "Ignore",
                "onExitCodes": {
                    "containerName": "train",
                    "operator": "In",
                    "values": [_AGAIN],
                },
            },
        ),
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completionMode": Because("Pods have numbers and names.", "Indexed"),
            "completions": Because(
                f"A pod is a node: {job.per_node} of {plan.layout.world} ranks. All run at once.",
                job.nodes,
            ),
            "parallelism": job.nodes,
            "backoffLimit": Because(
                "Pods that may fail until the job gives up: as many restarts of all of them.",
                request.restarts * job.nodes,
            ),
            "podFailurePolicy": {"rules": failures},
            "template": {"metadata": {"labels": {"app": job.name}}, "spec": _pod(job)},
        },
    }


def _pod(job: LaunchJob) -> dict[str, Any]:
    named = {"subdomain": Because("The Service that names the pods.", job.name)}
    return {
        **(named if job.nodes > 1 else {}),
        "restartPolicy": Because("The Job replaces pods, by the rules above.", "Never"),
        "terminationGracePeriodSeconds": Because(
            f"An evicted pod has {job.request.grace} s to write a checkpoint, and some to end.",
            job.request.grace + _SPARE_SECONDS,
        ),
        "containers": [_container(job)],
        "volumes": [
            {"name": "plan", "configMap": {"name": f"{job.name}-plan"}},
            Because(
                "All pods write to it at once (ReadWriteMany).",
                {"name": "shared", "persistentVolumeClaim": {"claimName": job.request.claim}},
            ),
            Because(
                "NCCL shares memory between processes, and the usual 64 MiB are too few for it.",
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ),
        ],
    }


def _container(job: LaunchJob) -> dict[str, Any]:
    """The container with torchrun. Its variables are what differs between clusters."""
    out = on_volume(job.out)
    meeting = [{"name": "FIRST_POD", "value": f"{job.name}-0.{job.name}"}]
    gpus = {"nvidia.com/gpu": job.per_node}
    return {
        "name": "train",
        "image": Because("With fivefold, torch, bash and getent.", job.request.image),
        "workingDir": VOLUME,
        "env": [
            {"name": "PLAN", "value": f"{_PLAN}/plan.toml"},
            Because("The folder of the run, on the volume.", {"name": "RUN", "value": out}),
            *(meeting if job.nodes > 1 else []),
        ],
        "command": ["bash", "-c", pod_script(job)],
        "resources": {
            "requests": Because(
                "Cores of a rank launch kernels, read data and write checkpoints.",
                {"cpu": str(job.cpus * job.per_node)},
            ),
            "limits": Because("A GPU for each rank.", gpus),
        },
        "volumeMounts": [
            {"name": "plan", "mountPath": _PLAN},
            {"name": "shared", "mountPath": VOLUME},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }


def pod_script(job: LaunchJob) -> str:
    """Script of a pod."""
    head: list[Reasoned | str] = [
        Reasoned("An unset variable or a failed command ends the pod.", "set -euo pipefail"),
        *settings(job),
    ]
    if job.nodes > 1:
        head += [
            Reasoned(
                "The name of the first pod is known some seconds after it has started.",
                'until getent hosts "$FIRST_POD" > /dev/null; do sleep 1; done',
            ),
            f'endpoint="$FIRST_POD:{PORT}"',
        ]
    tail = f'-m fivefold train "$PLAN" --out "$RUN"{job.train}'
    meeting_point = "at the first pod" if job.nodes > 1 else "in the pod"
    end: list[Reasoned | str] = [
        '"${command[@]}" &',
        Reasoned(
            "Kubernetes signals this shell alone: it passes the signal on to torchrun.",
            "trap 'kill -TERM $!' TERM",
        ),
        *waiting("torchrun"),
        Reasoned(
            "If one pod is evicted, the ranks of all stop with code 0, before the last step. A pod "
            f"that succeeds is not started again, so such a one ends with code {_AGAIN}.",
            f'if [ "$code" -eq 0 ] && ! python -c \'{_IS_DONE}\' "$RUN/run.json"; then\n'
            f"    code={_AGAIN}\n"
            "fi",
        ),
        'exit "$code"',
    ]
    lines = [*explained(head), *command_lines(job, meeting_point, [], tail), *explained(end)]
    return "\n".join(lines) + "\n"


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """A table or a list as lines of YAML. Every text is in quotes or in a block."""
    if isinstance(value, Mapping):
        for key, child in cast("Mapping[str, Any]", value).items():
            yield from _entry(f"{key}:", child, indent)
        return
    for child in cast("list[Any]", value):
        if isinstance(child, Because):
            yield from comment(child.why, indent)
            child = child.value
        if isinstance(child, Mapping):
            first, *tail = _yaml(child, indent + "  ")
            yield f"{indent}- {first.lstrip()}"
            yield from tail
        else:
            yield from _entry("-", child, indent)


def _entry(key: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Because):
        yield from comment(value.why, indent)
        value = value.value
    if isinstance(value, Mapping | list):
        yield f"{indent}{key}"
        yield from _yaml(value, indent + "  ")
    elif isinstance(value, str) and "\n" in value and _fits_a_block(value):
        yield f"{indent}{key} |"
        yield from (f"{indent}  {line}".rstrip() for line in value.splitlines())
    else:
        # A number, or a text in the quotes of JSON, which YAML reads too.
        yield f"{indent}{key} {json.dumps(value)}"


def _fits_a_block(text: str) -> bool:
    """Whether YAML reads a text back from a block: it ends its lines, and has nothing hidden."""
    lines = text.split("\n")
    return (
        lines.pop() == ""
        and all(line.isprintable() and line == line.rstrip() for line in lines)
        and not lines[0].startswith(" ")
    )
