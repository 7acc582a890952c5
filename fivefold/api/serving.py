"""A model behind the OpenAI API: what `fivefold serve` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fivefold.api.checks import above, checkpoint_step, positive
from fivefold.api.generating import model_options, open_weights
from fivefold.core import BadFile, FivefoldError
from fivefold.core.plan import problems as kv_problems
from fivefold.generate import ModelOptions, ModelSetup, TextModel, find_model, set_up

_LAST_PORT = 65_535
_LEAST_KEY = 8  # characters
INSTALL = "pip install 'fivefold[serve]'"


def serve(
    source: str | Path,
    *,
    layout: str = "dp=1",
    replicas: int = 1,
    prefill: str | None = None,
    prefill_replicas: int = 1,
    restarts: int = 3,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: Sequence[str] = (),
    api_key_file: str | Path | None = None,
    name: str | None = None,
    max_queue: int = 1024,
    max_running: int = 256,
    max_batch_tokens: int | None = None,
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
    """Serve a run or a Hugging Face folder until a signal ends it; returns the exit code. `prefill`
    is the layout of engines for prompts alone, and `layout` then that of those that go on."""
    options: dict[str, Any] = {
        "host": host,
        "port": _port(port),
        "keys": (*map(_checked, api_keys), *_keys(api_key_file)),
        "replicas": int(above("replicas", replicas, 0)),
        "prefill_replicas": _of_prefill(prefill_replicas, prefill),
        "restarts": int(above("restarts", restarts, -1)),
        "max_queue": int(above("max-queue", max_queue, 0)),
        "max_running": int(above("max-running", max_running, 0)),
        "max_batch_tokens": _batch_tokens(max_batch_tokens),
        "cache_gb": None if cache_gb is None else positive("cache-gb", cache_gb),
        "drain_s": positive("drain-seconds", drain_seconds),
    }
    settings: dict[str, Any] = {"layout": layout, "tokenizer": tokenizer}
    settings["batch_invariant"] = batch_invariant
    runs = model_options(dtype, device, cache_gb or 1.0, **settings)
    asked_step = checkpoint_step(step)
    model = find_model(Path(source), asked_step)
    running = _running()
    served = running.ServeOptions(name or Path(source).resolve().name, **options)
    opened = partial(open_weights, model, asked_step)
    setup = set_up(model, runs, opened)
    first = None if prefill is None else _prompts_of(model, replace(runs, layout=prefill), opened)
    if served.replicas > 1 or first is not None:
        setup = _beside_others(setup)
    server = running.ModelServer(setup, served, on_ready, log, on_warning, first)
    try:
        return server.run()
    except running.ServeLost as lost:
        on_warning(str(lost))
        return 1


def _running() -> Any:
    try:
        from fivefold.serve import server as running
    except ModuleNotFoundError as error:
        raise FivefoldError(f"serving needs the h11 library ({error}): {INSTALL}") from error
    return running


def _batch_tokens(given: int | None) -> int | None:
    return None if given is None else int(above("max-batch-tokens", given, 0))


def _port(port: int) -> int:
    if not 0 <= port <= _LAST_PORT:
        raise FivefoldError(f"--port {port}: give a number from 0 to {_LAST_PORT}")
    return port


def _of_prefill(replicas: int, prefill: str | None) -> int:
    """The engines for prompts; refuses a number without their layout."""
    if prefill is None and replicas != 1:
        raise FivefoldError(
            f"--prefill-replicas {replicas} needs --prefill LAYOUT; for engines that do all of a "
            "request use --replicas"
        )
    return int(above("prefill-replicas", replicas, 0))


def _prompts_of(model: TextModel, runs: ModelOptions, opened: Any) -> ModelSetup:
    """The engines that compute prompts alone; refuses a model whose cache cannot travel."""
    if problems := list(kv_problems(model.shape)):
        raise BadFile(f"--prefill {runs.layout!r}", problems)
    return _beside_others(set_up(model, runs, opened))


def _beside_others(setup: ModelSetup) -> ModelSetup:
    """With the backend of ranks on the GPUs that each engine has."""
    from fivefold.launch import NcclLibrary, choose_backend, num_gpus

    world, library = setup.plan.layout.world, NcclLibrary.current()
    return replace(setup, backend=choose_backend(None, setup.device, world, num_gpus(), library))


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
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise BadFile(str(file), ["it has no key; write one on each line"])
    return list(map(_checked, keys))
