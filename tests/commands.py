"""A `fivefold` command in a fork of the test worker, which has imported torch already.

A command of its own process pays seconds for its imports; a fork pays nothing, and leaves no state
behind: what it changes, and the threads it starts, end with it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from fivefold.cli import main

torch.set_num_threads(1)  # a fork after parallel work would hang
NARROW = {"COLUMNS": "80"}  # drawings are as wide as their terminal


def in_new_process(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a person does."""
    command, narrow = [sys.executable, "-m", "fivefold", *words], {**os.environ, **NARROW}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=narrow)


def in_fork(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder; what it printed and its exit code."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_run, args=(words, folder, out.fileno(), err.fileno()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            process.start()
        process.join()
        printed = [stream.seek(0) or stream.read() for stream in (out, err)]
    return subprocess.CompletedProcess(words, process.exitcode or 0, *printed)


def _run(words: list[str], folder: Path, *streams: int) -> None:
    """The life of the fork; it ends with the SystemExit of the command."""
    os.chdir(folder)
    os.environ.update(NARROW)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    main(words)
