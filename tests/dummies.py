"""A dummy of each kind of change that `docs/architecture.md` describes, as edits of the package.

`rows` reads the table of that page. `package_with_dummies` copies the package and adds all dummies
to the copy; an edit of a file that the dummy's row does not name is refused. `run_checks` calls
functions of a test module in a new process that imports the copy.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import fivefold
from tests.house import BESIDE

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
NEW = "NAME"  # stands for the name of a new thing in a path


class Edit(NamedTuple):
    """`new` replaces `old` wherever it is in a file; an empty `old` is the end of the file."""

    path: str  # from the root of the repository
    old: str
    new: str


def after(path: str, anchor: str, line: str) -> Edit:
    return Edit(path, anchor, f"{anchor}{line}")


def before(path: str, anchor: str, code: str) -> Edit:
    return Edit(path, anchor, f"{textwrap.dedent(code).strip()}\n\n\n{anchor}")


def appended(path: str, code: str) -> Edit:
    return Edit(path, "", f"\n\n{textwrap.dedent(code).strip()}\n")


def rows() -> dict[str, list[str]]:
    """The files of each change, as the table of the page lists them."""
    table = PAGE.read_text("utf-8").partition("| change | files |")[2]
    lines = re.findall(r"^\| (.+?) \| (.+) \|$", table, re.M)
    return {change: re.findall(r"`([^`]+/[^`]+|[^`/]+\.md)`", files) for change, files in lines}


OPTIMIZER = (
    after(
        "fivefold/core/plan/recipe.py",
        "OPTIMIZERS: dict[str, OptimizerKind] = {\n",
        '    "dummy": OptimizerKind("fivefold.optim.optimizer:dummy", {"sum": "sum"}, True),\n',
    ),
    appended(
        "fivefold/optim/optimizer.py",
        """
        def dummy(groups: ParameterGroups, lr: float, eps: float) -> torch.optim.Optimizer:
            return torch.optim.Adagrad(groups, lr=lr, eps=eps)
        """,
    ),
)
SCHEDULE = (
    before(
        "fivefold/core/schedule/catalog.py",
        "FAMILIES: tuple[Family, ...] = (",
        """
        def _dummy(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
            return replace(gpipe(num_ranks, num_microbatches), name="dummy")


        def _dummy_bubble(times: PipelineTimes) -> Array:
            return 2 * times.others


        DUMMY = Family(
            "dummy", _dummy, "it is a dummy", "gpipe", _dummy_bubble, all_in_flight,
            forwards_first=True,
        )
        """,
    ),
    after("fivefold/core/schedule/catalog.py", "    GPIPE,\n", "    DUMMY,\n"),
)
MODEL_FAMILY = (
    after("fivefold/core/model/hf_config.py",
          "FAMILIES: dict[str, Callable[[Config], Fields]] = {\n",
          '    "dummy": lambda config: _llama(config) | {"qk_norm": "head"},\n'),
    after("fivefold/huggingface/config_export.py", "WRITERS: dict[str, Writer] = {\n",
          '    "dummy": Writer("DummyModel", _biased, {"attention.q": "self_attn.dummy"}),\n'),
)  # fmt: skip
MACHINE = (Edit("fivefold/presets/machines/dummy.toml", "", 'base = "h100"\nmemory = 200e9\n'),)
STACK = (
    Edit(
        "fivefold/presets/stacks/dummy.toml",
        "",
        'base = "eager"\nwhat = "a dummy"\nsource = "none"\n[speed]\nfactor = 2.0\n',
    ),
    appended("fivefold/presets/rows.toml", '[families.dummy]\nsource = "dummy"\nstack = "dummy"\n'),
)
CONTEXT_KIND = (
    after("fivefold/core/layout/splits.py", "ContextKind = Literal[", '"dummy", '),
    after(
        "fivefold/core/layout/splits.py",
        '    "hybrid": ContextMethod(heads="some"),\n',
        '    "dummy": ContextMethod(heads="some", gathers=True),\n',
    ),
)
TRAINING_KEY = (
    after(
        "fivefold/core/plan/recipe.py",
        '    compile: Compile = "auto"\n',
        "    dummy: float = 1.0\n",
    ),
    Edit(
        "fivefold/train/loop.py",
        "set_lr(self.run.settings.recipe.lr_at(number))",
        "set_lr(self.run.settings.recipe.dummy * self.run.settings.recipe.lr_at(number))",
    ),
    Edit(
        "fivefold/train/loop.py",
        "lr=self.run.settings.recipe.lr_at(number)",
        "lr=self.run.settings.recipe.dummy * self.run.settings.recipe.lr_at(number)",
    ),
)
LEARN_PANEL = (
    Edit(
        "fivefold_page/learn/dummy.py",
        "",
        textwrap.dedent(
            '''
            """Learn: a dummy."""

            from fivefold_page import Params, View
            from fivefold_page.learn.lesson import Choice, chosen

            TITLE = "A dummy"
            CHOICES = {"size": Choice("Size", ("small", "large"), "small")}


            def view(params: Params) -> View:
                choices = chosen(CHOICES, params)
                says = f"The dummy is {choices['size']}."
                return {"choices": choices, "frames": [{"says": says}], "sentences": [says]}


            def text(view: View) -> list[str]:
                return view["sentences"]
            '''
        ),
    ),
    after("fivefold_page/learn/lessons.py", "    data,\n", "    dummy,\n"),
    after(
        "fivefold_page/learn/lessons.py",
        "LESSONS: dict[str, Lesson] = {\n",
        '    "dummy": dummy,\n',
    ),
    Edit("fivefold_page/static/learn_dummy.js", "", "// @ts-check\nexport function create() {}\n"),
)
EXPLORE_PANEL = (
    after(
        "fivefold_page/explore/explore.py",
        "# By the names of `--panel`, in the order of the page.\n",
        textwrap.dedent(
            """
            def _dummy_view(state: State) -> View:
                return {"gpus": state.gpus}


            def _dummy_text(found: View) -> list[str]:
                return [f"a dummy of {found['gpus']} GPUs"]


            """
        ).lstrip(),
    ),
    after(
        "fivefold_page/explore/explore.py",
        "PANELS: dict[str, ExplorePanel] = {\n",
        '    "dummy": ExplorePanel("Dummy", "A hint.", _dummy_text, _dummy_view),\n',
    ),
    Edit("fivefold_page/static/dummy.js", "", "// @ts-check\nexport function create() {}\n"),
)
COLLECTIVE = (
    Edit(
        "fivefold/parallel/tensor.py",
        "        x, labels_BS = arguments\n",
        """        x, labels_BS = arguments
        flag = x.new_zeros(8)
        start = partial(torch.distributed.broadcast, group_src=0, async_op=True)
        self.mesh.issue(
            AXIS, "broadcast", flag,
            lambda group: transport.in_place(flag, partial(start, group=group), group),
        ).wait()
""",
    ),
    after(
        "fivefold/parallel/tensor.py",
        "from fivefold.model.kernels import Fuse\n",
        "from fivefold.parallel import transport\n",
    ),
    after(
        "fivefold/cost/traffic/data_axis.py",
        "_SENT: dict[str, Callable[[int], float]] = {\n",
        '    "broadcast": lambda ranks: 1 - 1 / ranks,\n',
    ),
    after(
        "fivefold/cost/traffic/data_axis.py",
        "PAYLOADS: dict[tuple[str, str], str] = {\n",
        '    ("broadcast", "tp"): "a dummy",\n',
    ),
    after(
        "fivefold/cost/traffic/layers.py",
        "    wide = job.tokens * wide_size(job.itemsize)\n",
        "    flag = (8 * job.itemsize, job.tp, split * losses)\n"
        '    yield CountedCollective("tp", "broadcast", *flag)\n',
    ),
)
PRECISION = (
    after("fivefold/core/precision.py", "Precision = Literal[", '"fp64", '),
    after(
        "fivefold/core/precision.py",
        "PRECISIONS: dict[str, ComputePrecision] = {\n",
        '    "fp64": ComputePrecision("float64", "fp64"),\n'
        '    "fp4": ComputePrecision("bfloat16", "bf16"),\n',
    ),
    after(
        "fivefold/core/hardware.py",
        "    fp8: float | None = None\n",
        "    fp4: float | None = None\n",
    ),
)
COMMAND = (
    after(
        "fivefold/cli.py",
        "VERBS = {\n",
        '    "dummy": Verb("fivefold.commands.dummy", "Do nothing."),\n',
    ),
    Edit(
        "fivefold/commands/dummy.py",
        "",
        textwrap.dedent(
            '''
            """`fivefold dummy`."""

            import typer


            def run(times: int = 1) -> None:
                """Do nothing."""
                typer.echo("nothing " * times)
            '''
        ),
    ),
)
DUMMIES = {
    "an optimizer": OPTIMIZER,
    "a schedule": SCHEDULE,
    "a model family": MODEL_FAMILY,
    "a machine": MACHINE,
    "a stack of other people": STACK,
    "a context kind": CONTEXT_KIND,
    "a training key": TRAINING_KEY,
    "a page panel of Learn": LEARN_PANEL,
    "a page panel of Explore": EXPLORE_PANEL,
    "a collective": COLLECTIVE,
    "a precision": PRECISION,
    "a command": COMMAND,
}


def files_of(change: str) -> set[str]:
    """The files that the dummy of a change touches."""
    return {edit.path for edit in DUMMIES[change]}


def package_with_dummies(folder: Path) -> None:
    """Copy the packages into a folder, and add every dummy to the copy."""
    for name in ("fivefold", *BESIDE):
        # What is compiled already comes along, but not what somebody is about to write.
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    for edit in (edit for edits in DUMMIES.values() for edit in edits):
        path = folder / edit.path
        if not edit.old:
            path.write_text((path.read_text("utf-8") if path.exists() else "") + edit.new, "utf-8")
            continue
        text = path.read_text("utf-8")
        assert edit.old in text, f"{edit.path} has no {edit.old!r}"
        path.write_text(text.replace(edit.old, edit.new), "utf-8")


def run_checks(module: str, folder: Path) -> dict[str, str]:
    """The error of each check of a test module, "" if there is none; all in one new process."""
    package_with_dummies(folder)
    paths = os.pathsep.join(map(str, (folder, ROOT)))
    code = f"from tests import dummies; import {module} as checks; dummies.report(checks.CHECKS)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def report(checks: Mapping[str, Callable[[], None]]) -> None:
    """Run all checks in the new process, and print their errors as JSON."""
    assert Path(fivefold.__file__).is_relative_to(Path.cwd()), fivefold.__file__
    errors: dict[str, str] = {}
    for change, check in checks.items():
        try:
            check()
            errors[change] = ""
        except BaseException:
            errors[change] = traceback.format_exc()
    print(json.dumps(errors))
