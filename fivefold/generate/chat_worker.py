"""The process that runs a chat template: a job in JSON on standard input, its text on standard
output. It imports nothing of this package, and opens no file once the template runs."""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from importlib import import_module
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_BYTES = 1 << 30  # of memory
_MOST_TEXT = 4 << 20  # characters


def main(seconds: int) -> None:
    """Render one job."""
    import_module("jinja2.debug")  # Jinja loads it at the first error, when no file can be opened
    job = json.loads(sys.stdin.buffer.read())
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    added: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(added)
    environment.filters["tojson"] = _to_json
    environment.from_string("{{ 'a' }}").render()  # loads what Jinja and Python load late
    # Its streams are open already: no other file can be.
    limits = {
        resource.RLIMIT_NOFILE: 3,
        resource.RLIMIT_AS: _MOST_BYTES,
        resource.RLIMIT_FSIZE: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # the first is a signal
    print(json.dumps(_rendered(environment, job)))


def _rendered(environment: ImmutableSandboxedEnvironment, job: dict[str, Any]) -> dict[str, str]:
    try:
        text = environment.from_string(job["template"]).render(
            messages=job["messages"], add_generation_prompt=True, **job["variables"]
        )
    except TemplateError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except MemoryError:
        return {"error": f"it needs more than {_MOST_BYTES >> 20} MiB"}
    except Exception as error:  # whatever a template calls
        return {"error": f"{type(error).__name__}: {error}"}
    if len(text) > _MOST_TEXT:
        return {"error": f"it made more than {_MOST_TEXT:,} characters"}
    return {"text": text}


def _refuse(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


if __name__ == "__main__":
    main(int(sys.argv[1]))
