"""A model behind the OpenAI API: what `fivefold serve` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fivefold.api.checks import above, checkpoint_step, positive
from fivefold.api.generating import model_options, open_weights
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.generate.text_model import find_model, set_up

_LAST_PORT = 65_535
_LEAST_KEY = 8  # characters
INSTALL = "pip install 'fivefold[serve]'"


def serve(
    source: str | Path,
    *,
    layout: str = "dp=1",
    replicas: int = 1,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: Sequence[str] = (),
    api_key_file: str | Path | None = None,
    name: str | None = None,
    max_queue: int = 1024,
    max_running: int = 256,
    max_batch_tokens: int = 512,
    cache_gb: float | None = None,
    drain_seconds: float = 60.0,
    dtype: str | None = None,
    device: str = "auto",
    tokenizer: str | None = None,
    batch_invariant: bool = False,
    step: str | int | None = None,
    on_ready: Callable[[str], None] = lambda address: None,
    log: Callable[[str], None] = lambda line: None,
    on_warning: Callable[[str], None] = lambda why: None,
) -> int:
    """Serve a run or a Hugging Face folder until a signal ends it; returns the exit code."""
    if not 0 <= port <= _LAST_PORT:
        raise FivefoldError(f"--port {port}: give a number from 0 to {_LAST_PORT}")
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "keys": (*map(_checked, api_keys), *_keys(api_key_file)),
        "replicas": int(above("replicas", replicas, 0)),
        "max_queue": int(above("max-queue", max_queue, 0)),
        "max_running": int(above("max-running", max_running, 0)),
        "max_batch_tokens": int(above("max-batch-tokens", max_batch_tokens, 0)),
        "cache_gb": None if cache_gb is None else positive("cache-gb", cache_gb),
        "drain_s": positive("drain-seconds", drain_seconds),
    }
    how: dict[str, Any] = {"layout": layout, "tokenizer": tokenizer}
    how["batch_invariant"] = batch_invariant
    runs = model_options(dtype, device, cache_gb or 1.0, **how)
    model, asked_step = find_model(Path(source)), checkpoint_step(step)
    try:
        from fivefold.serve.running import ModelServer, ServeLost, ServeOptions
    except ModuleNotFoundError as error:
        raise FivefoldError(f"serving needs the h11 library ({error}): {INSTALL}") from error
    served = ServeOptions(name or Path(source).resolve().name, **options)
    setup = set_up(model, runs, partial(open_weights, model, asked_step))
    if served.replicas > 1:
        setup = replace(setup, backend=_shared_backend(setup.device, setup.plan.layout.world))
    server = ModelServer(setup, served, on_ready, log, on_warning)
    try:
        return server.run()
    except ServeLost as lost:
        on_warning(str(lost))
        return 1


def _shared_backend(device: str, world: int) -> Any:
    """Of ranks on the GPUs that each replica has."""
    from fivefold.launch.backend import NcclLibrary, choose_backend, num_gpus

    return choose_backend(None, device, world, num_gpus(), NcclLibrary.here())


def _checked(key: str) -> str:
    if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise FivefoldError(
            f"an API key has at least {_LEAST_KEY} letters, digits or signs and no space: give "
            "another one"
        )
    return key


def _keys(file: str | Path | None) -> list[str]:
    """The keys of a file, one on each line; lines with # are comments."""
    if file is None:
        return []
    try:
        lines = Path(file).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(str(file), [f"{error}; give a file with a key on each line"]) from error
    keys = [each.strip() for each in lines if each.strip() and not each.startswith("#")]
    if not keys:
        raise BadFile(str(file), ["it has no key; write one on each line"])
    return list(map(_checked, keys))
