"""`fivefold eval`: tasks of lm-eval on a run or a model."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.commands.job import OnProgress, TaskProgress, above, checkpoint_step, warn_caller
from fivefold.commands.options import (
    CacheOption,
    DeviceOption,
    KvKey,
    ModelLayoutOption,
    ServedPrecisionOption,
    SourceArgument,
    StepOption,
    TokenizerOption,
    exit_on_lost_rank,
    json_text,
    model_options,
    model_path,
    open_weights,
    print_answer,
    shown_progress,
    warn,
    with_set_keys,
)
from fivefold.core import BadFile, FivefoldError, RankLost, UnknownName
from fivefold.core.layout import Layout
from fivefold.generate import DTYPES, ModelSetup, find_model, set_up

if TYPE_CHECKING:
    from fivefold.generate import TaskModel, Tell, TextPiece, TextRequest, WrittenText

_INSTALL = "fivefold eval needs the lm-eval package: pip install 'fivefold[eval]'"
_NO_METRIC = ("alias", "name", "sample_len", "sample_count")


@with_set_keys
def run(
    source: SourceArgument,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks or groups of lm-eval, separated by commas.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of samples of a task.")] = None,
    layout: ModelLayoutOption = "dp=1",
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)} (default: float32, bfloat16 on GPUs).")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder with YAML files of tasks of your own.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question (default: the task's).")
    ] = None,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    cache_gb: CacheOption = 1.0,
    precision: ServedPrecisionOption = None,
    step: StepOption = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the results to.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    kv: KvKey = None,
) -> None:
    """Evaluate a model on tasks."""
    with exit_on_lost_rank(), shown_progress("evaluate") as on_progress:
        evaluated = evaluate(
            source,
            tasks or "",
            limit=limit,
            layout=layout,
            dtype=dtype,
            include_path=include_path,
            num_fewshot=num_fewshot,
            device=device,
            tokenizer=tokenizer,
            cache_gb=cache_gb,
            precision=precision,
            step=step,
            out=out,
            kv=kv,
            on_progress=on_progress,
            on_warning=warn,
        )
    print_answer(evaluated, as_json)


@dataclass(frozen=True)
class EvaluatedTasks:
    """The metrics of a model on tasks of lm-eval, by task.

    `str()` is the text of `fivefold eval`, `to_json()` its JSON.
    """

    model: str
    layout: str
    dtype: str
    precision: str | None
    kv: str | None
    limit: int | None
    tasks: Mapping[str, Any]
    truncated_contexts: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """What `fivefold eval --json` prints."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        rows = [("task", "metric", "value", "stderr", "samples")]
        for name, task in self.tasks.items():
            count = "" if task["samples"] is None else f"{task['samples']:,}"
            for metric, result in task["metrics"].items():
                shown = [_number(result["value"]), _number(result["stderr"])]
                rows.append((name, metric, shown[0], shown[1], count))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        numbers = self.dtype + (", weights in fp8" if self.precision == "fp8" else "")
        numbers += ", keys and values in fp8" if self.kv == "fp8" else ""
        about = f"{self.model} · {self.layout} · {numbers} · {self.seconds:.1f} s"
        if self.truncated_contexts:
            about += f" · {self.truncated_contexts:,} contexts cut from the left"
        return "\n".join([*lines, about])


def evaluate(
    source: Any,
    tasks: str | Sequence[str],
    *,
    limit: int | None = None,
    layout: str | Layout = "dp=1",
    dtype: str | None = None,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    device: str = "auto",
    tokenizer: str | Path | None = None,
    cache_gb: float = 1.0,
    precision: str | None = None,
    step: str | int | None = None,
    out: str | Path | None = None,
    kv: str | None = None,
    on_progress: OnProgress | None = None,
    on_warning: Tell | None = None,
) -> EvaluatedTasks:
    """Evaluate a run, or the folder of a Hugging Face model, on tasks of lm-eval.

    `tasks` are names in a list, or between commas. With `out` the results are written as JSON.
    `kv` "fp8" keeps keys and values in a byte a number.
    """
    began = time.perf_counter()
    listed = tasks.split(",") if isinstance(tasks, str) else tasks
    names = [name.strip() for name in listed if name.strip()]
    if not names:
        raise FivefoldError("no task is given: name some, as in --tasks hellaswag,arc_easy")
    if limit is not None:
        above("--limit", limit, 0)
    if num_fewshot is not None:
        above("--num-fewshot", num_fewshot, -1)
    runs = model_options(
        *(dtype, device, cache_gb),
        layout=layout,
        tokenizer=tokenizer,
        precision=precision,
        kv=kv,
    )
    folder = None if include_path is None else Path(include_path)
    file = None if out is None else Path(out)
    # Refuse places that are not there before hours of work.
    if folder is not None and not folder.is_dir():
        raise BadFile(str(folder), ["is no folder: give one with YAML files of tasks"])
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise BadFile(str(file), ["is a folder, or in none: give --out FILE in one that exists"])
    chosen = checkpoint_step(step)
    path = model_path(source)
    model = find_model(path, chosen)
    manager, task_names = _find_tasks(names, folder)
    setup = set_up(model, runs, partial(open_weights, model, chosen))
    task_model = task_model_of(setup, on_progress, on_warning or warn_caller)
    results = _evaluate(task_model, manager, task_names, limit, num_fewshot)
    evaluated = EvaluatedTasks(
        str(path),
        str(setup.plan.layout),
        setup.dtype,
        precision,
        kv,
        limit,
        _tasks_table(results),
        task_model.num_truncated,
        round(time.perf_counter() - began, 3),
    )
    if file is not None:
        # All of it, or nothing.
        table = evaluated.to_json()
        staging_path = file.with_name(f".{file.name}.tmp")
        try:
            staging_path.write_text(json_text(table, indent=2) + "\n", "utf-8")
            staging_path.replace(file)
        except OSError as error:
            staging_path.unlink(missing_ok=True)
            raise BadFile(str(file), [f"{error.strerror}; give another file with --out"]) from error
    return evaluated


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


def task_model_of(
    setup: ModelSetup, on_progress: OnProgress | None = None, on_warning: Tell = warn_caller
) -> TaskModel:
    """The model as tasks ask it: scores of texts, and completions."""
    from fivefold.generate import TaskModel, prefix_token, run_ranks

    def write(requests: list[TextRequest]) -> Mapping[str, WrittenText]:
        written: dict[str, WrittenText] = {}
        title = "score" if requests[0].request.targets else "generate"

        def on_piece(piece: TextPiece) -> None:
            if piece.written is not None:
                written[piece.id] = piece.written
                if on_progress is not None:
                    on_progress(TaskProgress(len(written), len(requests), title))

        run_ranks(setup.task(requests), on_piece, on_warning)
        return written

    shape, folder = setup.plan.shape, setup.model.folder
    prefix = prefix_token(folder, setup.codec, setup.ends, shape.vocab)
    return TaskModel(setup.codec, shape.vocab, shape.max_seq, prefix, setup.ends, write)


def _evaluate(
    model: TaskModel, manager: Any, tasks: list[str], limit: int | None, num_fewshot: int | None
) -> dict[str, Any]:
    """The package's results. What fails before the model is asked is a task that cannot be read."""
    simple_evaluate = import_module("lm_eval").simple_evaluate
    try:
        with redirect_stdout(sys.stderr):
            return simple_evaluate(
                model=harness_model(model),
                tasks=tasks,
                num_fewshot=num_fewshot,
                limit=limit,
                task_manager=manager,
                log_samples=False,
                torch_random_seed=None,
            )
    except (FivefoldError, RankLost):
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


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "" if value is None else str(value)
