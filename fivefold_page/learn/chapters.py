"""The path through Learn: chapters in order, each a question, from one GPU to five dimensions.

    view(name) -> {"name", "question", "number", "total", "paragraphs", "analogy", "commands",
                   "panel", "start", "before", "after"}

A chapter has a few paragraphs, an analogy, a panel of Learn to play with, and commands that do the
same for real. Every number of the prose is computed when the chapter is asked for. Texts are lists
of parts, in which the first use of each word of the glossary is marked (`glossary.linked`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from fivefold.core import UnknownName
from fivefold.render import wrapped
from fivefold_page import Params, View
from fivefold_page.learn import chapters_model, chapters_states, chapters_together
from fivefold_page.learn.glossary import linked

_PLACES = ("chapter", "panel", "frame")  # keys of an address that are no choices of a panel


@dataclass(frozen=True)
class Chapter:
    """A question, its answer, and the panel that shows it, with the choices that it opens with."""

    question: str
    prose: Callable[[], list[str]]
    analogy: str
    panel: str
    commands: tuple[str, ...]
    start: Mapping[str, str] = field(default_factory=dict[str, str])


# In the order of the path. One chapter of each panel opens it with its defaults: `chapter_of`.
CHAPTERS: dict[str, Chapter] = {
    "one-gpu": Chapter(
        "Why does one GPU not suffice?",
        chapters_states.one_gpu,
        "One cook in one kitchen is asked for a banquet: the ingredients do not fit on the "
        "shelves, and the night has too few hours.",
        "device",
        ("fivefold plan llama-3.1-70b --layout dp=1 --machine h100",),
    ),
    "collectives": Chapter(
        "How do GPUs share what they computed?",
        chapters_states.collectives,
        "Cooks in separate kitchens only talk by telephone, at fixed points of the recipe. A call "
        "begins when all of them have picked up, and who needs its result waits for it.",
        "collectives",
        ("fivefold verify tiny --layout dp=2",),
    ),
    "data": Chapter(
        "What if the batch is split?",
        chapters_states.data,
        "Every kitchen has the same cookbook and gets a share of the orders. At the end of the "
        "evening all report how each dish turned out, average the reports, and write the same "
        "corrections into their books.",
        "data",
        ("fivefold verify tiny --layout dp=4 --zero 0",),
        {"model": "llama-3.1-8b", "zero": "0"},
    ),
    "zero": Chapter(
        "What if the optimizer's memory is split?",
        chapters_states.zero,
        "The kitchens still cook different orders, but keep only one volume of the cookbook each. "
        "For every dish they copy the page from the kitchen that has it, cook, and throw the copy "
        "away.",
        "data",
        ("fivefold verify tiny --layout dp=4 --zero 3",),
    ),
    "tensor": Chapter(
        "What if every matrix is split?",
        chapters_model.tensor,
        "A pot is too large for one stove, so that several cooks make the same dish, each a part "
        "of its ingredients in a pot of their own. Before the next step of the recipe they must "
        "pour everything together.",
        "tensor",
        ("fivefold verify tiny --layout tp=2 --set sp=false",),
        {"sp": "off"},
    ),
    "sequence": Chapter(
        "Who keeps what lies between the matrices?",
        chapters_model.sequence,
        "Between two shared pots the dish is on plates. Each of the cooks seasons only the plates "
        "on their side, instead of every cook seasoning a full copy of all plates.",
        "tensor",
        ("fivefold verify tiny --layout tp=2",),
    ),
    "pipeline": Chapter(
        "What if the layers are split?",
        chapters_model.pipeline,
        "Starter, main course and dessert have a station each, and every table's order passes from "
        "one to the next. With one table all but one station idle; with many tables they idle only "
        "when the kitchen opens and when it closes.",
        "pipeline",
        (
            "fivefold schedule zb-v --stages 4 --microbatches 8",
            "fivefold verify tiny --layout pp=2 --schedule zb-h1",
        ),
    ),
    "context": Chapter(
        "What if one sequence is too long?",
        chapters_model.context,
        "One order slip is as long as a scroll and is cut into strips, one for each cook. A line "
        "may refer to any line above it, so that notes about all strips go around the table until "
        "each cook has read those that came before.",
        "context",
        ("fivefold verify tiny --layout cp=2 --context zigzag",),
    ),
    "expert": Chapter(
        "What if the model has experts?",
        chapters_model.expert,
        "Specialists for fish, pastry and sauces work in different kitchens. A waiter sends each "
        "ingredient to the two that suit it best and brings it back; if all want fish, the fish "
        "cook keeps everybody waiting.",
        "expert",
        ('fivefold verify tiny-moe --layout "dp=2 ep=2"',),
    ),
    "five": Chapter(
        "What if all five are used at once?",
        chapters_together.five,
        "A chain of restaurants: branches share the orders (data), each has stations in a row "
        "(pipeline), at a station several cooks share a pot (tensor), long slips are cut "
        "(context), and specialists serve several branches (expert).",
        "landscape",
        ('fivefold verify tiny-moe --layout "dp=2 tp=2 pp=2 cp=2 ep=2"',),
    ),
    "layer": Chapter(
        "What happens inside one layer?",
        chapters_together.layer,
        "Follow one plate through one station: who holds it, who is called before the next step, "
        "and how much is carried, on the way in and on the way back.",
        "layer",
        ('fivefold rehearse tiny-moe --layout "dp=2 tp=2 pp=2 cp=2 ep=2" --rank 0',),
    ),
    "choose": Chapter(
        "How do you choose?",
        chapters_together.choose,
        "A caterer first asks what fits into the rooms, then who has to talk to whom all evening, "
        "and puts those at the same table.",
        "compare",
        (
            "fivefold plan llama-3.1-70b --machine h100 --batch 128 "
            '--layout "dp=4 tp=4 pp=4" --zero 1 --recompute selective',
            "fivefold plan llama-3.1-70b --machine h100 --batch 128 --gpus 64",
        ),
    ),
    "serving": Chapter(
        "How does a trained model answer?",
        chapters_together.serving_answers,
        "Reading an order takes one look, however long it is; then the dishes leave the kitchen "
        "one by one, and for each the cook walks past all shelves. A cook who walks anyway can "
        "carry plates for thirty tables, as long as the notes of all of them fit on the board.",
        "serving",
        ("fivefold plan llama-3.1-70b --serve --machine h100 --gpus 8 --concurrency 32",),
    ),
    "trainers": Chapter(
        "What can other trainers run?",
        chapters_together.other_trainers,
        "Other kitchens have other ovens: one has fed thousands of tables, one fits on a cart. Ask "
        "which of your dishes they can cook, and taste one before you book.",
        "trainers",
        ('fivefold plan llama-3.1-70b --layout "tp=8 pp=4" --machine h100 --set stack=torchtitan',),
    ),
}


def chapter_of(panel: str) -> str | None:
    """The chapter that opens a panel with its defaults; None if no chapter does."""
    return next(
        (n for n, chapter in CHAPTERS.items() if chapter.panel == panel and not chapter.start), None
    )


def contents() -> list[View]:
    """The path as the page's scripts need it."""
    return [
        {
            "name": name,
            "question": chapter.question,
            "panel": chapter.panel,
            "start": dict(chapter.start),
        }
        for name, chapter in CHAPTERS.items()
    ]


def questions(
    params: Params, panel: str | None, panels: Collection[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """What an address of Learn shows: a panel, a chapter with its panel, or the whole path."""
    choices = {name: value for name, value in params.items() if name not in _PLACES}
    panel = panel or params.get("panel")
    if "chapter" in params:
        chapter = view(params["chapter"])
        if panel is None:
            yield f"chapter/{chapter['name']}", {}
        panel = panel or chapter["panel"]
        if panel == chapter["panel"]:
            choices = {**chapter["start"], **choices}
    if panel is not None and panel not in panels:
        raise UnknownName("panel", panel, panels)
    for name in panels if panel is None else [panel]:
        if panel is None:
            path = (chapter_name for chapter_name, entry in CHAPTERS.items() if entry.panel == name)
            yield from ((f"chapter/{chapter_name}", {}) for chapter_name in path)
        yield f"learn/{name}", choices


@cache
def view(name: str) -> View:
    """One chapter with its numbers, and its neighbours on the path."""
    if name not in CHAPTERS:
        raise UnknownName("chapter", name, CHAPTERS)
    names, chapter, seen = list(CHAPTERS), CHAPTERS[name], set[str]()
    index = names.index(name)
    return {
        "name": name,
        "question": chapter.question,
        "number": index + 1,
        "total": len(names),
        "paragraphs": [linked(paragraph, seen) for paragraph in chapter.prose()],
        "analogy": linked(chapter.analogy, seen),
        "commands": list(chapter.commands),
        "panel": chapter.panel,
        "start": dict(chapter.start),
        "before": names[index - 1] if index else None,
        "after": names[index + 1] if index + 1 < len(names) else None,
    }


def text(view: View) -> list[str]:
    """The same for a terminal."""
    prose = [line for paragraph in view["paragraphs"] for line in (*wrapped(plain(paragraph)), "")]
    return [
        f"Chapter {view['number']} of {view['total']}: {view['question']}",
        "",
        *prose,
        *wrapped(f"In a kitchen: {plain(view['analogy'])}"),
        "",
        "For real:",
        *(f"  {command}" for command in view["commands"]),
    ]


def plain(parts: list[View]) -> str:
    """A linked text without its links."""
    return "".join(part["text"] for part in parts)
