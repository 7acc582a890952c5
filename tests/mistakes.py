"""Typical mistakes and what they are answered.

    python -m tests.mistakes > docs/mistakes.md

Every command is run; a test runs them too, and compares the page.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

from tests.commands import in_fork

HEAD = """# Typical mistakes

What somebody may type, and the answer: the rule that it breaks and the nearest way out. Each ends
with exit code 2, before any process starts and any file is written. With `--json` the answer is
JSON too, on standard output:
`{"schema_version": 1, "error": {"kind": "IllegalLayout", "message": "…", "exit_code": 2}}`.
Other exit codes: 0 all is well, 1 a comparison or a run failed, 70 an error of fivefold itself.
Made by `python -m tests.mistakes`.
"""
COMMANDS = """
plan lama-3.1-8b --gpus 8 --machine h100
plan llama-3.1-8b --gpus 8
plan llama-3.1-8b --gpus 0 --machine h100
plan llama-3.1-8b --gpus 8 --machine h1000
plan llama-3.1-8b --gpus eight --machine h100
plan llama-3.1-8b --seq 8x
plan meta-llama/Llama-3.1-8B
plan llama-3.1-8b --gpus 12 --machine h100 --layout "tp=8"
plan llama-3.1-8b --layout "tp=6"
plan llama-3.1-8b --layout "tp=2 xp=2"
plan llama-3.1-8b --layout "tp=two"
plan llama-3.1-8b --layout "ep=8"
plan llama-3.1-8b --layout "pp=40"
plan llama-3.1-8b --zero 4
plan llama-3.1-8b --machine h100 --gpus 8 --set fix=tp=3
plan llama-3.1-8b --machine h100 --gpus 8 --set objective=speed
plan llama-3.1-8b --set what_if=gpus=2x
plan llama-3.1-8b --set hidden_size=8192
plan llama-3.1-8b --set layers=many
plan llama-3.1-8b --recompute some
plan mixtral-8x7b --layout "dp=2 ep=16"
plan nowhere/config.json --layout dp=1
schedule 2f2b --stages 4 --microbatches 8
schedule interleaved --stages 4 --microbatches 6 --chunks 2
schedule dualpipe --stages 3 --microbatches 8
schedule 1f1b --stages 0 --microbatches 8
verify tiny --layout "tp=16"
verify tiny --layout "tp=3"
verify tiny --layout "cp=2" --context spiral
verify tiny --dtype int8
verify tiny --device gpu
verify tiny --batch-invariant
verify tiny --set optimizer=sgdm
train tiny --set learning_rate=1e-3
train tiny --set lr=fast
train tiny --set lr=1e-3x
train tiny --epochs 3
train tiny --set steps=-5
train tiny --set log=tensorbord
train tiny --set data=nowhere
train tiny --layout "dp=2" --batch 3
rehearse llama-3.1-8b --layout "tp=3"
generate nowhere --prompt Hello
export nowhere out
import nowhere -o run
tokens nowhere -o tokens
observe nowhere
launch slrum plan.toml
launch slurm llama-3.1-8b
launch torchrun nowhere.toml
launch torchrun plan.toml --partition gpu
"""
CELL = 400  # characters of an answer


def commands() -> list[str]:
    return COMMANDS.strip().splitlines()


def answer(command: str, folder: Path) -> tuple[int, str, str]:
    """The exit code, and what goes to standard output and to standard error."""
    done = in_fork(shlex.split(command), folder)
    return done.returncode, done.stdout, done.stderr


def page() -> str:
    """The table."""
    lines = [HEAD, "| `fivefold` … | answer |", "|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for command in commands():
            _, _, said = answer(command, Path(folder))
            words = " ".join(said.removeprefix("fivefold: ").split())
            short = words if len(words) <= CELL else words[:CELL].rsplit(" ", 1)[0] + " …"
            lines.append(f"| `{command}` | {short.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
