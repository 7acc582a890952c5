"""What the API of Kubernetes 1.31 allows, for the fields that our manifests have.

Written from the API reference (v1 ConfigMap, v1 Service, batch/v1 Job and what they contain). As in
`kubectl apply --dry-run=server --validate=strict`, an unknown field is an error, and so is a value
of another type, a name that DNS does not have, or a reference to what is not there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Check = Callable[[Any, str], Iterator[str]]
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # RFC 1123
LABEL_1035 = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # of Services
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?"
LABEL_KEY = rf"({SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"


def text(pattern: str = r"(?s).*", most: int = 1 << 20) -> Check:
    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, str):
            yield f"{where} is {value!r}: a text is expected"
        elif not re.fullmatch(pattern, value) or len(value) > most:
            yield f"{where} is {value!r}: it must match {pattern} and have at most {most} letters"

    return check


def number(low: int, high: int = 2**31 - 1) -> Check:
    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            yield f"{where} is {value!r}: a whole number from {low} to {high} is expected"

    return check


def flag(value: Any, where: str) -> Iterator[str]:
    if not isinstance(value, bool):
        yield f"{where} is {value!r}: true or false is expected"


def quantity(value: Any, where: str) -> Iterator[str]:
    """Of CPUs, memory or devices: a number, or a text with a unit."""
    if isinstance(value, bool) or not re.fullmatch(QUANTITY, str(value)):
        yield f"{where} is {value!r}: no quantity"


def items(inner: Check) -> Check:
    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, list) or not value:
            yield f"{where} is {value!r}: a list is expected"
            return
        for place, each in enumerate(value):
            yield from inner(each, f"{where}[{place}]")

    return check


def named(inner: Check, key: str = LABEL_KEY) -> Check:
    """A table with keys of the user's own."""

    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, dict) or not value:
            yield f"{where} is {value!r}: a table is expected"
            return
        for name, each in value.items():
            yield from text(key, 253)(name, f"{where}, the key")
            yield from inner(each, f"{where}.{name}")

    return check


def table(required: dict[str, Check], optional: dict[str, Check] | None = None) -> Check:
    known = {**required, **(optional or {})}

    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where} is {value!r}: a table is expected"
            return
        yield from (f"{where}.{name} is missing" for name in required.keys() - value.keys())
        yield from (f"{where}.{name} is not known" for name in value.keys() - known.keys())
        for name in known.keys() & value.keys():
            yield from known[name](value[name], f"{where}.{name}")

    return check


def one(*allowed: str) -> Check:
    return text("|".join(map(re.escape, allowed)))


NAME, LABELS = text(SUBDOMAIN, 253), named(text(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", 63))
PORT_NAME = text(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]*[a-z0-9])?", 15)
PATH = text(r"/[^:\0]*")
CONTAINER = table(
    {"name": text(LABEL, 63), "image": text(r"\S+")},
    {
        "command": items(text()),
        "workingDir": PATH,
        "env": items(table({"name": text(r"[A-Za-z_][A-Za-z0-9_]*")}, {"value": text()})),
        "resources": table({}, {"requests": named(quantity), "limits": named(quantity)}),
        "volumeMounts": items(table({"name": text(LABEL, 63), "mountPath": PATH})),
    },
)
VOLUME = table(
    {"name": text(LABEL, 63)},
    {
        "configMap": table({"name": NAME}),
        "persistentVolumeClaim": table({"claimName": NAME}),
        "emptyDir": table({}, {"medium": one("", "Memory"), "sizeLimit": quantity}),
    },
)
POD = table(
    {"containers": items(CONTAINER), "restartPolicy": one("Never", "OnFailure")},
    {
        "subdomain": text(LABEL, 63),
        "terminationGracePeriodSeconds": number(0, 2**63 - 1),
        "volumes": items(VOLUME),
    },
)
RULE = table(
    {"action": one("FailJob", "FailIndex", "Ignore", "Count")},
    {
        "onExitCodes": table(
            {"operator": one("In", "NotIn"), "values": items(number(1, 255))},
            {"containerName": text(LABEL, 63)},
        ),
        "onPodConditions": items(table({"type": text(), "status": one("True", "False")})),
    },
)
KINDS = {
    ("v1", "ConfigMap"): {"metadata": table({"name": NAME}), "data": named(text(), r"[-._\w]+")},
    ("v1", "Service"): {
        "metadata": table({"name": text(LABEL_1035, 63)}),
        "spec": table(
            {"ports": items(table({"port": number(1, 65535)}, {"name": PORT_NAME}))},
            {"clusterIP": one("None"), "selector": LABELS, "publishNotReadyAddresses": flag},
        ),
    },
    ("batch/v1", "Job"): {
        "metadata": table({"name": text(LABEL, 63)}),
        "spec": table(
            {"template": table({"spec": POD}, {"metadata": table({}, {"labels": LABELS})})},
            {
                "completionMode": one("Indexed", "NonIndexed"),
                "completions": number(1),
                "parallelism": number(1),
                "backoffLimit": number(0),
                "podFailurePolicy": table({"rules": items(RULE)}),
            },
        ),
    },
}


def problems(documents: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a manifest."""
    found: list[str] = []
    for each in documents:
        kind = (each.get("apiVersion"), each.get("kind"))
        if kind not in KINDS:
            found.append(f"{kind} is not known")
            continue
        kinds: dict[str, Check] = {"apiVersion": text(), "kind": text(), **KINDS[kind]}
        found += table(kinds)(each, str(kind[1]))
    return found or list(_references({each["kind"]: each for each in documents}))


def _references(documents: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Rules that join fields and documents."""
    job, name = documents["Job"]["spec"], documents["Job"]["metadata"]["name"]
    pod, labels = job["template"]["spec"], job["template"].get("metadata", {}).get("labels", {})
    volumes = {each["name"] for each in pod["volumes"]}
    for container in pod["containers"]:
        mounted = {each["name"] for each in container.get("volumeMounts", [])}
        yield from (f"volume {each} is not there" for each in mounted - volumes)
        requests, limits = (container["resources"].get(key, {}) for key in ("requests", "limits"))
        for device in (requests.keys() | limits.keys()) - {"cpu", "memory"}:
            if device not in limits or requests.get(device, limits[device]) != limits[device]:
                yield f"{device} needs a limit, and requests equal to it"
    maps = {each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each}
    if maps - {documents.get("ConfigMap", {}).get("metadata", {}).get("name")}:
        yield f"ConfigMap {maps} is not there"
    if job.get("completionMode") == "Indexed":
        if "completions" not in job:
            yield "an indexed Job needs completions"
        elif len(f"{name}-{job['completions'] - 1}") > 63:
            yield f"the hostname of the last pod of {name} is too long"
    if "podFailurePolicy" in job:
        names = {each["name"] for each in pod["containers"]}
        codes = [rule.get("onExitCodes", {}) for rule in job["podFailurePolicy"]["rules"]]
        if any(each.get("containerName", next(iter(names))) not in names for each in codes):
            yield "podFailurePolicy names a container that is not there"
        if pod["restartPolicy"] != "Never":
            yield "podFailurePolicy needs restartPolicy Never"
    service = documents.get("Service")
    if pod.get("subdomain") != (service and service["metadata"]["name"]):
        yield "subdomain is not the Service"
    if service and not service["spec"]["selector"].items() <= labels.items():
        yield "the Service selects other pods"
