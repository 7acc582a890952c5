"""`fivefold eval`: tasks of lm-eval on a run or a model."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.commands.job import above, checkpoint_step
from fivefold.commands.options import json_text, model_options, open_weights, write_texts
from fivefold.core import BadFile, FivefoldError, UnknownName
from fivefold.generate import DTYPES, ModelSetup, find_model, set_up

if TYPE_CHECKING:
    from fivefold.generate import TaskModel, TextPiece, TextRequest, WrittenText

_INSTALL = "fivefold eval needs the lm-eval package: pip install 'fivefold[eval]'"
_NO_METRIC = ("alias", "name", "sample_len", "sample_count")


def run(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|DIR", help="A run folder, or a Hugging Face folder.")
    ],
    tasks: Annotated[
        str | None, typer.Option(help="Tasks or groups of lm-eval, separated by commas.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of samples of a task.")] = None,
    layout: Annotated[
        str, typer.Option(help='Degrees of ranks, as in "tp=2 pp=2"; dp are replicas.')
    ] = "dp=1",
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)} (default: float32, bfloat16 on GPUs).")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder with YAML files of tasks of your own.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question (default: the task's).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json, or bytes (default: the folder's).")
    ] = None,
    cache_gb: Annotated[float, typer.Option(help="Maximum GB of the KV cache on a rank.")] = 1.0,
    step: Annotated[str | None, typer.Option(help="Step of the run's checkpoint, or best.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the results to.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Evaluate a model on tasks."""
    began = time.perf_counter()
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if not names:
        raise FivefoldError("no task is given: name some, as in --tasks hellaswag,arc_easy")
    if limit is not None:
        above("--limit", limit, 0)
    if num_fewshot is not None:
        above("--num-fewshot", num_fewshot, -1)
    runs = model_options(dtype, device, cache_gb, layout=layout, tokenizer=tokenizer)
    _check_folders(include_path, out)
    chosen = checkpoint_step(step)
    model = find_model(source, chosen)
    manager, task_names = _find_tasks(names, include_path)
    setup = set_up(model, runs, partial(open_weights, model, chosen))
    task_model = task_model_of(setup)
    results = _evaluate(task_model, manager, task_names, limit, num_fewshot)
    table = {
        "model": str(source),
        "layout": str(setup.plan.layout),
        "dtype": setup.dtype,
        "limit": limit,
        "tasks": _tasks_table(results),
        "truncated_contexts": task_model.num_truncated,
        "seconds": round(time.perf_counter() - began, 3),
    }
    if out is not None:
        _write_table(out, table)
    typer.echo(json_text(table) if as_json else _text(table))


def _check_folders(include_path: Path | None, out: Path | None) -> None:
    """Refuse places that are not there before hours of work."""
    if include_path is not None and not include_path.is_dir():
        raise BadFile(str(include_path), ["is no folder: give one with YAML files of tasks"])
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise BadFile(str(out), ["is a folder, or in none: give --out FILE in one that exists"])


def _write_table(out: Path, table: Mapping[str, Any]) -> None:
    """All of it, or nothing."""
    staging_path = out.with_name(f".{out.name}.tmp")
    try:
        staging_path.write_text(json_text(table, indent=2) + "\n", "utf-8")
        staging_path.replace(out)
    except OSError as error:
        staging_path.unlink(missing_ok=True)
        raise BadFile(str(out), [f"{error.strerror}; give another file with --out"]) from error


def _find_tasks(names: Sequence[str], include_path: Path | None) -> tuple[Any, list[str]]:
    """The package's reader of tasks, and the tasks that the names mean. The thousands of its own
    are read only if they are needed."""
    try:
        reader = import_module("lm_eval.tasks").TaskManager
    except ImportError as error:
        missing = "" if error.name in ("lm_eval", None) else f" ({error.name} is missing)"
        raise FivefoldError(_INSTALL + missing) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if include_path is not None:
        manager = reader(include_path=str(include_path), include_defaults=False)
        if set(names) <= set(manager.all_subtasks):
            return manager, list(names)
    manager = reader(include_path=include_path and str(include_path))
    task_names: list[str] = []
    for name in names:
        meant = manager.match_tasks([name])
        if not meant:
            raise UnknownTask(name, manager.all_tasks)
        task_names += [task_name for task_name in meant if task_name not in task_names]
    return manager, task_names


class UnknownTask(UnknownName):
    """A task that is in no file; the nearest ones are named, and never all of them."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__("task", name, known)
        if "did you mean" not in str(self):
            hint = "list all with `lm-eval ls tasks`, or give the folder of yours by --include-path"
            self.args = (f"unknown task {name!r}: {hint}",)


def task_model_of(setup: ModelSetup) -> TaskModel:
    from fivefold.generate import TaskModel, prefix_token

    def write(requests: list[TextRequest]) -> Mapping[str, WrittenText]:
        written: dict[str, WrittenText] = {}

        def on_piece(piece: TextPiece) -> None:
            if piece.written is not None:
                written[piece.id] = piece.written

        write_texts(setup.task(requests), "score" if scores(requests) else "generate", on_piece)
        return written

    def scores(requests: list[TextRequest]) -> bool:
        return bool(requests[0].request.targets)

    shape, folder = setup.plan.shape, setup.model.folder
    prefix = prefix_token(folder, setup.codec, setup.ends, shape.vocab)
    return TaskModel(setup.codec, shape.vocab, shape.max_seq, prefix, setup.ends, write)


def _evaluate(
    model: TaskModel, manager: Any, tasks: list[str], limit: int | None, num_fewshot: int | None
) -> dict[str, Any]:
    """The package's results. What fails before the model is asked is a task that cannot be read."""
    evaluate = import_module("lm_eval").simple_evaluate
    try:
        with redirect_stdout(sys.stderr):
            return evaluate(
                model=harness_model(model),
                tasks=tasks,
                num_fewshot=num_fewshot,
                limit=limit,
                task_manager=manager,
                log_samples=False,
                torch_random_seed=None,
            )
    except (FivefoldError, typer.Exit):
        raise
    except Exception as error:
        if model.num_calls:
            raise
        text = f"{type(error).__name__}: {error}"
        rule = f"lm-eval cannot prepare {', '.join(tasks)}: {text}"
        hint = "check the task's YAML file, and that its dataset is on this machine"
        raise FivefoldError(f"{rule}; {hint}") from error


def harness_model(model: TaskModel) -> Any:
    """The model as the package knows models."""
    base: Any = import_module("lm_eval.api.model").LM

    class HarnessModel(base):  # type: ignore[misc]
        """Questions in the package's objects, whose `args` are plain values."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            scored = model.loglikelihood([request.args for request in requests])
            return [(answer.logprob, answer.is_greedy) for answer in scored]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return model.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return model.generate_until([request.args for request in requests])

    return HarnessModel()


def _tasks_table(results: Mapping[str, Any]) -> dict[str, Any]:
    """Each task's metrics with their standard errors, and its number of samples."""
    counts, shots = results.get("n-samples", {}), results.get("n-shot", {})
    return {
        name: {
            "metrics": _metrics(row),
            "samples": counts.get(name, {}).get("effective"),
            "num_fewshot": shots.get(name),
        }
        for name, row in results["results"].items()
    }


def _metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """By name; a metric of filtered answers has the filter's name after a comma."""
    metrics: dict[str, Any] = {}
    for key, value in row.items():
        metric, _, kind = key.partition(",")
        if key in _NO_METRIC or metric.endswith("_stderr"):
            continue
        stderr = row.get(f"{metric}_stderr,{kind}")
        number = stderr if isinstance(stderr, int | float) else None
        metrics[metric if kind in ("", "none") else key] = {"value": value, "stderr": number}
    return metrics


def _text(table: Mapping[str, Any]) -> str:
    """The results as lines."""
    rows = [("task", "metric", "value", "stderr", "samples")]
    for name, task in table["tasks"].items():
        count = "" if task["samples"] is None else f"{task['samples']:,}"
        for metric, result in task["metrics"].items():
            shown = [_number(result["value"]), _number(result["stderr"])]
            rows.append((name, metric, shown[0], shown[1], count))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    about = f"{table['model']} · {table['layout']} · {table['dtype']} · {table['seconds']:.1f} s"
    if table["truncated_contexts"]:
        about += f" · {table['truncated_contexts']:,} contexts cut from the left"
    return "\n".join([*lines, about])


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "" if value is None else str(value)
