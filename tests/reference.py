"""The reference: pages made of options, keys, presets and answers.

    python -m tests.reference

writes docs/reference-*.md and the tables of docs/compared.md; a test compares them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from fivefold import cli
from fivefold.core import hardware as machine
from fivefold.core import tables
from fivefold.core.errors import JSON_SCHEMA
from fivefold.core.model import presets as models
from fivefold.core.model import shape
from fivefold.core.model.shape import Mla, Moe, Rope, Shape
from fivefold.core.plan.great_runs import plan_keys
from fivefold.core.plan.plan import PlanOptions
from fivefold.core.plan.recipe import Recipe
from fivefold.terminal import long_name, panels
from fivefold_page.learn import trainers
from tests.json_answers import answers

DOCS = Path(__file__).parents[1] / "docs"
MADE = "Made by `make reference`."
HEADS = {
    "commands": f"""# Commands

Every command and every option, as `fivefold COMMAND -h` shows them. Options that take pairs need
no quotes: `--layout dp=2 tp=2`. {MADE}

""",
    "completion": """`fivefold --install-completion` sets up completion with Tab for the shell in
use (bash, zsh, fish, PowerShell): verbs, options, models, machines, schedules and degrees.
`--show-completion` prints its script, `--version` the version.

""",
    "keys": f"""# Keys

A plan file has these keys, `--set` takes them all.
[Training](training.md) explains them. {MADE}
""",
    "model keys": """Keys with a dot belong to experts (`moe`), latent attention (`mla`) and rotary
positions (`rope`); `none` unsets one.

""",
    "machines": f"""# Machines

Presets for `--machine`; a TOML file with `base = "h100"` changes some of their numbers
([values](values.md)). Sources of all numbers are in `fivefold/presets/machines`. {MADE}

""",
    "models": f"""# Models

Presets for `MODEL`; any Hugging Face `config.json` of a known family works too, and `--set` changes
keys. Sources are in `fivefold/presets/models`. {MADE}

""",
    "json": f"""# JSON

With `--json` a command prints one JSON object on standard output, and nothing else there.
`schema_version` is {JSON_SCHEMA}: it rises if a key goes or changes its meaning; new keys do not
raise it. Types are those of JSON; `?` may be null. `tokens --info` and `--check` print an array of
objects, one for each folder. {MADE}

A failure is an object too, with the same text on standard error:

```json
{{"schema_version": {JSON_SCHEMA}, "error": {{"kind": "UnknownName", "message": "…",
 "exit_code": 2}}}}
```

`kind` is the class of the error: FivefoldError and its kinds, or UsageError for an option that is
unknown, missing or misspelt, exit code 2; InternalError, 70. A rank that is lost gives
`{{"passed": false, "error": "lost rank 3 at …"}}` and exit code 1.
""",
}
_EXIT_CODES = {
    0: "all is well",
    1: "a comparison or a run failed",
    2: "the input cannot be used; nothing was written",
    70: "an error of fivefold itself",
}


def cell(text: object) -> str:
    """A text in a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(*rows: tuple[object, ...]) -> Iterator[str]:
    """A table; the first row is its head."""
    head, *rest = rows
    yield f"| {' | '.join(map(cell, head))} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(map(cell, row))} |" for row in rest)


def commands() -> Iterator[str]:
    """Every verb with its arguments and options, in the panels of its help."""
    yield from HEADS["commands"].splitlines()
    yield from table(
        ("command", "what it does"),
        *((f"[`{name}`](#{name})", verb.help) for name, verb in cli.VERBS.items()),
    )
    yield ""
    yield from HEADS["completion"].splitlines()
    yield from table(
        ("exit code", "meaning"), *((code, meaning) for code, meaning in _EXIT_CODES.items())
    )
    for name, verb in cli.VERBS.items():
        yield from ("", f"## {name}", "", verb.help, "")
        yield from _verb(name)


def _verb(name: str) -> Iterator[str]:
    group: Any = typer.main.get_command(cli.build(name))
    command = group.commands[name]
    context = command.make_context(name, [], resilient_parsing=True)
    parameters = command.params
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = {long_name(each.opts): each for each in parameters if each not in arguments}
    if arguments:  # --help is the same everywhere
        records = [each.get_help_record(context) for each in arguments]
        rows = [(f"`{first.split(' <')[0]}`", meaning) for first, meaning in records]
        yield from table(("argument", "meaning"), *rows)
    for title, names in panels(name, [*options, "help"]).items():
        own = [options[one] for one in names if one in options]
        if not own:
            continue
        yield ""
        rows = [_option(*one.get_help_record(context)) for one in own]
        yield from table((title.lower(), "type", "meaning"), *rows)
    if keys := cli.own_keys(name):
        yield ""
        rows = [(f"`{key}`", entry.help) for key, entry in keys.items()]
        yield from table(("key of `--set`", "meaning"), *rows)


def _option(names: str, meaning: str) -> tuple[str, str, str]:
    """A row of `-o, --output <path>` and its help."""
    names, _, kind = names.partition(" <")
    shown = ", ".join(f"`{one}`" for one in names.split(", "))
    kind = kind.removesuffix(">").replace("list[", "several ").rstrip("]")
    return shown, kind, meaning


def keys() -> Iterator[str]:
    """Keys of a plan, of training and of a model: types and defaults from the code."""
    documented = _documented()
    yield from HEADS["keys"].splitlines()
    for title, kind, names in (
        ("Plan", PlanOptions, ["model", *plan_keys()]),
        ("Training, under [train]", Recipe, [each.name for each in dataclasses.fields(Recipe)]),
    ):
        yield from ("", f"## {title}", "")
        hints, fields = (
            tables.types_of(kind),
            {each.name: each for each in dataclasses.fields(kind)},
        )
        rows = [
            (f"`{name}`", f"`{_type(hints[name])}`", documented[name], _default(fields[name]))
            for name in names
        ]
        yield from table(("key", "type", "meaning", "default"), *rows)
    yield from ("", "## Model, under [set]", "")
    yield from HEADS["model keys"].splitlines()
    rows = [row for part, kind in _MODEL.items() for row in _model_rows(part, kind)]
    yield from table(("key", "type", "meaning"), *rows)


_MODEL: dict[str, type] = {"": Shape, "moe.": Moe, "mla.": Mla, "rope.": Rope}


def _documented() -> dict[str, str]:
    """Meanings of keys, from the tables of docs/training.md."""
    found: dict[str, str] = {}
    for line in (DOCS / "training.md").read_text("utf-8").splitlines():
        if row := re.match(r"\| (`[a-z0-9_]+`(?:, `[a-z0-9_]+`)*) \| (.*) \| [^|]* \|$", line):
            for name in re.findall(r"`(\w+)`", row[1]):
                found.setdefault(name, re.sub(r"\(#", "(training.md#", row[2]))
    return found


def _type(hint: object) -> str:
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"(typing\.|collections\.abc\.)|\bNoneType\b", "", text)
    return re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace("'", ""), text).strip()


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is dataclasses.MISSING else "empty"
    if field.default is None:
        return "derived"
    return f"`{field.default}`" if field.default != "" else "empty"


def _model_rows(part: str, kind: type) -> Iterator[tuple[str, str, str]]:
    """Fields of a class with the comments that stand beside them."""
    lines = inspect.getsource(kind).splitlines()
    hints, known = tables.types_of(kind), models.keys()
    for node in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            _, _, comment = lines[node.lineno - 1].partition("  # ")
            if f"{part}{name}" in known:
                yield f"`{part}{name}`", f"`{_type(hints[name])}`", comment


def machines() -> Iterator[str]:
    """Every machine preset in numbers."""
    yield from HEADS["machines"].splitlines()
    rows: list[tuple[object, ...]] = []
    for name in machine.presets():
        one = machine.load(name)
        peak = one.peaks.bf16 or one.peaks.fp16 or one.peaks.fp32 or 0
        tiers = ", ".join(
            f"{tier.name} {tier.bandwidth / 1e9:,.4g} GB/s"
            + (f" for {tier.size:,}" if tier.size else "")
            for tier in one.tiers
        )
        memory = f"{one.memory / 2**30:,.1f} GiB"
        rows.append(
            (f"`{name}`", one.chip, one.gpus_per_node, memory, f"{peak / 1e12:,.4g}", tiers)
        )
    head = ("machine", "chip", "GPUs in a node", "memory", "peak TFLOP/s", "links, one way")
    yield from table(head, *rows)
    yield ""
    yield "The peak is dense bf16; fp16 or fp32 where the chip has no bf16."


def presets() -> Iterator[str]:
    """Every model preset in numbers."""
    yield from HEADS["models"].splitlines()
    rows: list[tuple[object, ...]] = []
    for name in models.presets():
        one = models.load(name)
        total, active = (getattr(shape.parameters(one), kind) for kind in ("total", "active"))
        experts = f"{one.moe.experts}, {one.moe.top_k} a token" if one.moe else ""
        heads = f"{one.heads}/{one.kv_heads}"
        sizes = (_billions(total), _billions(active) if one.moe else "", one.layers, one.width)
        rows.append((f"`{name}`", *sizes, heads, experts, f"{one.vocab:,}", f"{one.max_seq:,}"))
    head = ("model", "parameters", "active", "layers", "width", "heads/KV", "experts")
    yield from table((*head, "vocabulary", "longest sequence"), *rows)


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def json_page() -> Iterator[str]:
    """Every key of every answer."""
    yield from HEADS["json"].splitlines()
    for answer in answers():
        yield from ("", f"## {answer.title}", "")
        if answer.example:
            yield from ("```text", f"fivefold {answer.example}", "```", "")
        rows = [(f"`{key.name}`", key.type, key.meaning) for key in answer.keys]
        yield from table(("key", "type", "meaning"), *rows)


def compared() -> Iterator[str]:
    """The tables of other trainers inside their page, whose prose stays."""
    head, rest = (DOCS / "compared.md").read_text("utf-8").rstrip().split("\n|", 1)
    known = trainers.trainers()
    yield head
    yield from table(
        ("", "read at", "date"), *((one.name, one.source, one.date) for one in known.values())
    )
    yield ""
    columns = (trainers.OWN, *known)
    names = (trainers.OWN, *(one.name for one in known.values()))
    rows = ((row["name"], *(row[key] for key in columns)) for row in trainers.rows())
    yield from table(("", *names), *rows)
    yield ""
    yield "## " + rest.split("\n## ", 1)[1]


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "reference-commands.md": commands,
    "reference-keys.md": keys,
    "reference-machines.md": machines,
    "reference-models.md": presets,
    "reference-json.md": json_page,
    "compared.md": compared,
}


def text(name: str) -> str:
    """A page."""
    return "\n".join(PAGES[name]()) + "\n"


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(text(page), "utf-8")
