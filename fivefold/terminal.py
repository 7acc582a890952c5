"""What a terminal shows: the help of a verb in panels, and long lines wrapped; and what is left of
output when its reader has gone."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Generator, Iterable
from typing import Any, TextIO

from typer.core import TyperCommand

MOST_USED_PANEL, ADVANCED = "Most used", "Advanced"
KEYS_PANEL = "Keys of --set, beside those of plan, training and model"
OWN_KEYS_PANEL = "Keys of --set"
# The five options of each verb that people need first; those of others are the first five.
MOST_USED = {
    "calibrate": "o base ranks device seconds",
    "eval": "tasks limit layout dtype out",
    "generate": "prompt file max-tokens temperature layout",
    "launch": "o out gpus-per-node partition time",
    "observe": "machine gpus layout html text",
    "plan": "machine gpus batch layout o",
    "rehearse": "layout machine rank microbatches device",
    "schedule": "stages microbatches chunks times svg",
    "serve": "port layout replicas host api-key-file",
    "tokens": "o tokenizer column chat check",
    "train": "layout steps out resume set",
    "verify": "layout zero schedule dtype steps",
}
PANELS = {
    "Job": "machine gpus batch seq microbatches microbatch-size packed precision set",
    "Layout": "layout zero schedule context recompute fp8",
    "Run": "steps seed dtype device resume until check compile",
    "Questions": "compare sweep table run tokens",
    "Serving": "serve prompt output concurrency emit",
    "Sampling": "top-k top-p seed stop chat",
    "Requests": "name max-queue max-running max-batch-tokens drain-seconds api-key",
    "Documents": "pairs dedup min-chars max-chars min-tokens max-tokens end",
    "Output": "o out html text panel svg trace page json help",
}
_WIDEST = 30  # characters of an option beside its help
_FEW = 7  # options, with --json and --help, that need no panels
_LEAST_WIDTH = 20
_CONTINUED = "    "
_LABEL = re.compile(r"\S+ {2,}|\s*- ")  # before the text of a line
_BAR = re.compile(r"█+$")


class PanelCommand(TyperCommand):
    """A verb whose help shows its five most used options first, and the rest in panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then one section for each panel."""
        arguments: list[tuple[str, str]] = []
        options: dict[str, tuple[str, str]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                arguments.append(record)
            else:
                options[long_name(param.opts)] = record
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        width = min(max(len(first) for first, _ in options.values()), _WIDEST)
        for title, names in panels(self.name or "", options).items():
            with formatter.section(title):
                rows = [options[name] for name in names]
                formatter.write_dl([(first.ljust(width), help) for first, help in rows])
        keys = getattr(self.callback, "set_keys", {})
        if keys:
            of_plan = "schedule" in options  # a command without a plan has no other keys
            with formatter.section(KEYS_PANEL if of_plan else OWN_KEYS_PANEL):
                formatter.write_dl([(key.ljust(width), entry.help) for key, entry in keys.items()])


def long_name(names: Iterable[str], dashes: bool = False) -> str:
    """The longest name of an option."""
    name = max(names, key=len)
    return name if dashes else name.lstrip("-")


def panels(verb: str, options: Iterable[str]) -> dict[str, list[str]]:
    """The options of each panel of a verb's help; every option is in one."""
    left = list(options)
    if len(left) <= _FEW:
        return {"Options": left}
    first = MOST_USED[verb].split() if verb in MOST_USED else left[:5]
    groups = {MOST_USED_PANEL: [name for name in first if name in left]}
    left = [name for name in left if name not in groups[MOST_USED_PANEL]]
    for title, names in PANELS.items():
        if title == "Output":
            continue
        chosen = [name for name in left if name in names.split()]
        if len(chosen) > 1 or title == "Job":
            groups[title] = chosen
            left = [name for name in left if name not in chosen]
    output = [name for name in left if name in PANELS["Output"].split()]
    groups[ADVANCED] = [name for name in left if name not in output]
    groups["Output"] = output
    return {title: names for title, names in groups.items() if names}


class WrappedStream:
    """A stream to a terminal: lines that are longer than it go on, indented, in the next one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write; text with escape sequences or carriage returns as it is."""
        if "\x1b" in text or "\r" in text:
            return self._stream.write(text)
        self._stream.write(wrapped(text, shutil.get_terminal_size().columns))
        return len(text)


class UnreadStream:
    """A stream that drops its text once nobody can read it: the pipe is closed, or the terminal
    is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropping(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            discard(self._stream)


@contextlib.contextmanager
def outliving_readers() -> Generator[None]:
    """Drop output that nobody reads: neither `head` nor a terminal that is closed ends the block,
    nor a process that it forks."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and UnreadStream(stream) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def discard(stream: TextIO) -> None:
    """Drop buffered output and what follows; otherwise Python reports an error when it exits."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def wrapped(text: str, width: int) -> str:
    """The text with lines of at most `width` characters, cut between words where possible."""
    lines = text.split("\n")
    return "\n".join(_wrapped_line(line, width) if len(line) > width else line for line in lines)


def _wrapped_line(line: str, width: int) -> str:
    """A line in several; it goes on under its text where a label is in front of that."""
    if width < _LEAST_WIDTH:
        return line
    if (bar := _BAR.search(line)) and bar.start() < width:
        return line[:width]
    label = _LABEL.match(line)
    column = label.end() if label else len(line) - len(line.lstrip(" ")) + len(_CONTINUED)
    if column > width // 2:
        column = len(_CONTINUED)
    cut = textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * column,
        break_on_hyphens=False,
    )
    return "\n".join(cut)
