"""Completion with Tab: what a shell sends, and which words can follow.

Typer writes the scripts (`fivefold --install-completion`) and completes verbs, options and single
values. Values of several pairs are completed here: shells cut them at spaces and at `=`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable

ASKS = "_FIVEFOLD_COMPLETE"  # set by the script of a shell
AXES = ("dp", "tp", "pp", "cp", "ep", "etp")
DEGREES = ("1", "2", "4", "8", "16", "32", "64", "128")
_CUT = ("-", "'", '"')


def starting_with(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What Typer calls to complete a value: the names that begin like it."""

    def complete(incomplete: str) -> list[str]:
        return [each for each in names() if each.startswith(incomplete)]

    return complete


def typed_words() -> list[str] | None:
    """The words of a shell that asks what can follow, the last of them unfinished; else None."""
    kind = os.environ.get(ASKS, "")
    if not kind.startswith("complete_"):
        return None
    if kind != "complete_bash":
        text = os.environ.get("_TYPER_COMPLETE_ARGS", "")
        return [*_split(text)[1:], *([""] if text.endswith(" ") else [])]
    last = int(os.environ.get("COMP_CWORD", "0"))
    words = _split(os.environ.get("COMP_WORDS", ""))[: last + 1]
    return joined([*words, ""][1 : last + 1])


def joined(words: list[str]) -> list[str]:
    """Words of bash, which cuts `dp=2` into three, as they were typed."""
    found: list[str] = []
    for word in words:
        if found and (word == "=" or found[-1].endswith("=")) and not word.startswith(_CUT):
            found[-1] += word
        else:
            found.append(word)
    return found


def degrees_after(words: list[str], options: Collection[str]) -> list[str] | None:
    """Degrees that can follow if the last word is a pair of one of the options; else None."""
    for word in reversed(words[:-1]):
        if word in options:
            break
        if "=" not in word or word.startswith(_CUT):
            return None
    else:
        return None
    *before, last = words[-1].split(" ")
    key, equals, degree = last.partition("=")
    taken = {pair.partition("=")[0] for word in [*words[:-1], *before] for pair in word.split()}
    if equals:
        found = [f"{key}={each}" for each in DEGREES if key in AXES and each.startswith(degree)]
    else:
        found = [f"{each}=2" for each in AXES if each.startswith(key) and each not in taken]
    return [" ".join([*before, each]) for each in found]


def answer(found: list[str]) -> str:
    """The words as the shell that asks wants them."""
    kind = os.environ.get(ASKS, "")
    if kind == "complete_bash":
        last = int(os.environ.get("COMP_CWORD", "0"))
        near = _split(os.environ.get("COMP_WORDS", ""))[max(last - 1, 0) : last + 1]
        if "=" in near:  # bash replaces only what comes after it
            found = [each.partition("=")[2] for each in found]
        return "\n".join(found)
    if kind == "complete_zsh":
        return "_arguments '*: :((" + "\n".join(f'"{each}"' for each in found) + "))'"
    return "\n".join(found)


def pass_on(words: list[str]) -> None:
    """Give Typer the words as they were typed."""
    os.environ["COMP_WORDS"] = shlex.join(["fivefold", *words])
    os.environ["COMP_CWORD"] = str(len(words))
    last = "" if words[-1:] == [""] else shlex.quote(words[-1])
    os.environ["_TYPER_COMPLETE_ARGS"] = f"{shlex.join(['fivefold', *words[:-1]])} {last}"


def _split(text: str) -> list[str]:
    """Words of a shell, also where a quote is not closed yet."""
    split = shlex.shlex(text, posix=True)
    split.whitespace_split, split.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(split)
    except ValueError:
        words.append(split.token)
    return words
