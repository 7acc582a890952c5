"""A training run as lines: its head, each step, and its end."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fivefold.core import counted
from fivefold.core.plan import Plan, Recipe
from fivefold.records import GIB, SHOWN_SHARE, STEPS, PlannedStep, StepRecord, Summary
from fivefold.render.text import rough_duration, thousands

_CATEGORIES = ("weights", "gradients", "optimizer", "padding", "total")
_FIRST, _COLUMN = 34, 14


def run_head(
    plan: Plan, recipe: Recipe, dtype: str, corpus: str, planned: PlannedStep | None
) -> str:
    """The lines before the first step: what is about to run."""
    layout = plan.layout
    masks = "document masks" if plan.packed else "no document masks"
    lines = [
        f"{plan.shape.name} on {layout}, ZeRO-{layout.zero}, {plan.schedule.name}, {dtype}: "
        f"{counted(layout.world, 'rank')}, {counted(recipe.steps, 'step')} of {recipe.optimizer}",
        f"{plan.batch}",
        f"{corpus}; {masks}",
    ]
    if planned is not None:
        lines.append(
            f"planned: {duration(planned.step_s)} a step, {thousands(planned.tokens_per_s)} tok/s, "
            f"{thousands(planned.tokens_per_s / layout.world)} a GPU, MFU {planned.mfu:.1%}, "
            f"{planned.memory_gib:.1f} GiB"
        )
    if planned is not None and recipe.dpo_beta:
        lines.append("note: planned without the forward that scores the pairs of a step")
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def step_line(record: StepRecord, steps: int, eta: float | None = None) -> str:
    """One step, as users paste it into bug reports; unknown values are left out."""
    planned = record.planned
    parts = [
        f"step {record.step}/{steps}",
        f"loss {record.loss:.4f}",
        f"norm {record.norm:.2f}",
        f"lr {record.lr:.1e}",
        "no time" if record.elapsed is None else duration(record.elapsed),
    ]
    if record.tokens_per_s is not None:
        beside = "" if planned is None else f" (plan {thousands(planned.tokens_per_s)})"
        parts.append(f"{thousands(record.tokens_per_s)} tok/s{beside}")
    if record.mfu is not None:
        beside = "" if planned is None else f" (plan {100 * planned.mfu:.1f})"
        parts.append(f"MFU {record.mfu:.1%}{beside}")
    if record.memory_gib is not None:
        beside = "" if planned is None else f" (plan {planned.memory_gib:.1f})"
        parts.append(f"mem {record.memory_gib:.1f} GiB{beside}")
    if (pairs := record.preference) is not None:
        known = ((name, pairs.get(name)) for name in ("accuracy", "margin"))
        parts += [f"{name} {value:.3f}" for name, value in known if value is not None]
    if eta is not None and record.step < steps:
        parts.append(f"eta {rough_duration(eta)}")
    if record.fullest is not None:
        parts.append(f"fullest expert {record.fullest:.1f}x")
    if record.eval_loss is not None:
        parts.append(_evaluated(record))
    parts += [
        f"{part['words']}: {part['share']:.0%} of the step"
        for part in record.slow or []
        if part["share"] >= SHOWN_SHARE
    ]
    if record.skipped is not None:
        parts.append(f"skipped ({record.skipped})")
    return " | ".join(parts)


def _evaluated(record: StepRecord) -> str:
    """The losses of evaluation sets; without names if there is one."""
    losses = {name: result["loss"] for name, result in (record.evals or {}).items()}
    if len(losses) < 2:
        return f"eval {record.eval_loss:.4f}"
    known = ((name, loss) for name, loss in losses.items() if loss is not None)
    return "eval " + ", ".join(f"{name} {loss:.4f}" for name, loss in known)


def duration(seconds: float) -> str:
    """The time of a step.

    >>> duration(0.4123), duration(12.34)
    ('412 ms', '12.3 s')
    """
    return f"{seconds * 1e3:.0f} ms" if seconds < 9.9995 else f"{seconds:.1f} s"


def summary_text(summary: Summary) -> str:
    """The whole run: losses, where the time went, planned and measured speed."""
    return "\n".join([*_outcome_lines(summary), "", *_time_lines(summary), *_rate_lines(summary)])


def _outcome_lines(summary: Summary) -> Iterator[str]:
    parts = [counted(summary.num_steps, "step"), f"{summary.num_tokens:,} tokens"]
    if summary.last_loss is not None:
        parts.append(
            f"loss {summary.last_loss:.4f} (best {summary.best_loss:.4f} at step "
            f"{summary.best_step})"
        )
    if summary.eval_loss is not None:
        parts.append(f"eval {summary.eval_loss:.4f} (best {summary.best_eval_loss:.4f})")
    yield " | ".join(parts)
    proven = f", {counted(summary.num_proven, 'step')} ran twice with equal bits"
    yield (
        f"{summary.num_skipped} skipped, {summary.num_lost} lost to "
        f"{counted(summary.num_restarts, 'restart')}, "
        f"{counted(summary.num_checkpoints, 'checkpoint')} kept{proven * bool(summary.num_proven)}"
    )
    if summary.num_untimed:
        yield f"{counted(summary.num_untimed, 'step')} without a time, of which no rate is computed"


def _time_lines(summary: Summary) -> Iterator[str]:
    yield (
        f"goodput {summary.goodput:.1%}: {summary.spent[STEPS]:.1f} s of {summary.wall_s:.1f} s "
        "went to steps that count"
    )
    times = [
        f"{name} {seconds:.1f} s"
        for name, seconds in summary.spent.items()
        if name != STEPS and seconds >= 0.05
    ]
    if times:
        yield "the rest: " + ", ".join(times)


def _rate_lines(summary: Summary) -> Iterator[str]:
    """Planned and measured speed; empty if no step was measured."""
    planned, world = summary.planned, summary.world
    total, per_gpu = summary.tokens_per_s, summary.tokens_per_s_per_gpu
    if total is None or per_gpu is None or world is None or summary.step_s is None:
        return
    yield ""
    yield _row("median of the steps", "planned", "measured")
    share = planned and thousands(planned.tokens_per_s / world)
    yield _row("step", planned and duration(planned.step_s), duration(summary.step_s))
    yield _row("tok/s", planned and thousands(planned.tokens_per_s), thousands(total.median))
    yield _row("tok/s/GPU", share, thousands(per_gpu.median))
    if summary.mfu is not None:
        yield _row("MFU", planned and f"{planned.mfu:.1%}", f"{summary.mfu:.1%}")
    if summary.memory_gib is not None:
        expected = planned and f"{planned.memory_gib:.1f} GiB"
        yield _row("memory, at most", expected, f"{summary.memory_gib:.1f} GiB")
    yield f"over all steps: {thousands(total.mean)} tok/s, {thousands(per_gpu.mean)} tok/s/GPU"


def _row(first: str, *cells: str | None) -> str:
    return f"{first:<{_FIRST}}" + "".join(f" {cell or '–':>{_COLUMN - 1}}" for cell in cells)


def out_of_memory(
    where: str,
    expected: Mapping[str, float],
    allocated: Mapping[str, float],
    nearest: str | None,
    snapshot: str | None = None,
) -> str:
    """Why a rank ended: planned and allocated bytes by category.

    `nearest`: a layout that fits, with its memory; `snapshot`: the file that shows the memory.
    """
    lines = [f"out of memory at {where}", _row("GiB", "planned", "allocated")]
    pair = (expected, allocated)
    for name in dict.fromkeys([*expected, *allocated]):
        sizes = (memory.get(name) for memory in pair)
        lines.append(_row(name, *(None if size is None else f"{size / GIB:.1f}" for size in sizes)))
    lines.append(_row("total", *(f"{sum(memory.values()) / GIB:.1f}" for memory in pair)))
    none = "no layout of as many GPUs fits: take more of them, or a smaller model"
    lines.append(none if nearest is None else f"nearest layout that fits: {nearest}")
    if snapshot is not None:
        lines.append(f"the memory as it was: {snapshot} (open it at pytorch.org/memory_viz)")
    return "\n".join(lines)


def run_tail(table: Mapping[str, Any]) -> Iterator[str]:
    """The lines after the last step: memory, traffic, and the check if there was one."""
    if table["traffic"] is None:
        yield "no step was left to run"
        return
    if table["stopped"]:
        yield "asked to stop: a checkpoint is written, and --resume goes on after it"
    if table["memory"] is not None:
        yield from ("", *_memory_lines(table["memory"], table["world"]))
    yield from ("", *_traffic_lines(table["traffic"]))
    if table["check"] is None:
        yield f"\ndone in {table['seconds']:.1f} s"
        return
    yield from ("", *_check_lines(table))
    verdict = "PASS" if table["check"]["passed"] else "FAIL"
    yield f"{verdict} in {table['seconds']:.1f} s"


def _memory_lines(memory: Mapping[str, Any], world: int) -> Iterator[str]:
    """Planned and measured bytes of the fullest rank."""
    yield _row(f"bytes of rank {memory['rank']}, the fullest", "planned", "measured")
    for name in _CATEGORIES:
        word = "optimizer states" if name == "optimizer" else name
        planned, measured = memory["planned"][name], memory["measured"][name]
        mark = "" if planned == measured else "   differs"
        yield _row(word, f"{planned:,}", f"{measured:,}") + mark
    yield (
        f"{memory['ranks_as_planned']} of {counted(world, 'rank')} hold what was planned, to the "
        "byte"
    )


def _traffic_lines(traffic: Mapping[str, Any]) -> Iterator[str]:
    """Planned and measured traffic of all ranks on each axis in one step."""
    axes = sorted({*traffic["planned"], *traffic["measured"]})
    if not axes:
        yield "collectives: none planned, none measured"
        return
    start = _row(f"moved in step {traffic['step']}, all ranks", "bytes planned", "measured")
    yield f"{start}{'calls planned':>15}{'measured':>10}"
    none = {"calls": 0, "bytes": 0}
    for axis in axes:
        planned, measured = (traffic[name].get(axis, none) for name in ("planned", "measured"))
        sizes = _row(axis, f"{planned['bytes']:,}", f"{measured['bytes']:,}")
        yield f"{sizes}{planned['calls']:>15,}{measured['calls']:>10,}"
    yield "every step as planned" if traffic["match"] else "this step differs from the plan"


def _check_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """The losses compared with those of one process."""
    check, steps = table["check"], table["check"]["steps"]
    if table["stopped"]:
        yield f"compared: {counted(steps, 'step')} that both had run when they were asked to stop"
    last = table["steps"][steps - 1]["loss"]
    yield f"loss of step {steps}: {last:.9f}; one process: {check['loss']:.9f}"
    spread, beside = check["spread"], ""
    if spread is not None:
        beside = (
            f" (3 times the spread {spread:.1e} of two runs of one process that sum in another "
            "order, at least 2e-06)"
        )
    yield (
        f"largest difference of {counted(steps, 'step')}: {check['difference']:.1e} nats, allowed "
        f"{check['allowed']:.1e}{beside}"
    )
    if (gradients := check["gradients"]) is not None:
        compared = f"gradients of {counted(gradients['steps'], 'step')}"
        yield (
            f"{compared}: nearest to its limit is {gradients['tensor']} in step "
            f"{gradients['step']}, off by {gradients['difference']:.1e} of its norm, allowed "
            f"{gradients['allowed']:.1e}"
        )
    elif check["flips"]:
        yield "gradients: not compared, because tokens of the first step had other experts"
    if check["routed"]:
        yield (
            f"routing flips: {check['flips']:,} of {check['routed']:,} (tokens times layers whose "
            "experts differ from those of one process)"
        )
    if (gap := check["tie_gap"]) is not None:
        yield (
            "with the experts of the ranks one process gives the losses above; their scores are at "
            f"most {gap:.1e} below those of its own choice, allowed {check['allowed']:.1e}"
        )


_MOST_LINES = 2000  # that wait: some hundred kilobytes
Echo = Callable[[str, bool], None]
"""Prints a line, on standard error if the second argument is true."""


class LinePrinter:
    """A thread that prints; it starts with the first line, after ranks were forked."""

    def __init__(self, echo: Echo, most: int = _MOST_LINES) -> None:
        self.echo, self.dropped = echo, 0
        self.lines: queue.Queue[tuple[str, bool] | None] = queue.Queue(most)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def print_line(self, line: str, err: bool = False) -> None:
        """Print it soon, or drop it; raises what went wrong with an earlier line."""
        self._raise()
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="fivefold-print", daemon=True)
            self.thread.start()
        try:
            self.lines.put_nowait((line, err))
        except queue.Full:
            self.dropped += 1

    def close(self, seconds: float | None = None) -> None:
        """Wait until all lines are printed, at most so many seconds if given."""
        if self.thread is not None:
            with contextlib.suppress(queue.Full):
                self.lines.put(None, timeout=seconds)
            self.thread.join(seconds)
            self.thread = None
        self._raise()

    def _run(self) -> None:
        try:
            while (message := self.lines.get()) is not None:
                self.echo(*message)
                if self.dropped and self.lines.empty():
                    self._say_dropped()
            self._say_dropped()
        except BaseException as error:
            self.error = error
            while self.lines.get() is not None:  # nobody waits for room
                pass

    def _say_dropped(self) -> None:
        number, self.dropped = self.dropped, 0
        if number:
            lines = counted(number, "line")
            self.echo(f"fivefold: {lines} not printed, because nobody read the output", True)

    def _raise(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
