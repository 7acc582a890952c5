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
        return [name for name in names() if name.startswith(incomplete)]

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
    args = _split(os.environ.get("COMP_WORDS", ""))[: last + 1]
    return joined([*args, ""][1 : last + 1])


def joined(args: list[str]) -> list[str]:
    """Words of bash, which cuts `dp=2` into three, as they were typed."""
    args_joined: list[str] = []
    for word in args:
        if (
            args_joined
            and (word == "=" or args_joined[-1].endswith("="))
            and not word.startswith(_CUT)
        ):
            args_joined[-1] += word
        else:
            args_joined.append(word)
    return args_joined


def degrees_after(args: list[str], options: Collection[str]) -> list[str] | None:
    """Degrees that can follow if the last word is a pair of one of the options; else None."""
    for word in reversed(args[:-1]):
        if word in options:
            break
        if "=" not in word or word.startswith(_CUT):
            return None
    else:
        return None
    *before, last = args[-1].split(" ")
    key, equals, degree = last.partition("=")
    taken = {pair.partition("=")[0] for word in [*args[:-1], *before] for pair in word.split()}
    if equals:
        pairs = [f"{key}={value}" for value in DEGREES if key in AXES and value.startswith(degree)]
    else:
        pairs = [f"{axis}=2" for axis in AXES if axis.startswith(key) and axis not in taken]
    return [" ".join([*before, completed]) for completed in pairs]


def answer(answers: list[str]) -> str:
    """The words as the shell that asks wants them."""
    kind = os.environ.get(ASKS, "")
    if kind == "complete_bash":
        last = int(os.environ.get("COMP_CWORD", "0"))
        near = _split(os.environ.get("COMP_WORDS", ""))[max(last - 1, 0) : last + 1]
        if "=" in near:  # bash replaces only what comes after it
            answers = [pair.partition("=")[2] for pair in answers]
        return "\n".join(answers)
    if kind == "complete_zsh":
        return "_arguments '*: :((" + "\n".join(f'"{pair}"' for pair in answers) + "))'"
    return "\n".join(answers)


def pass_on(args: list[str]) -> None:
    """Give Typer the words as they were typed."""
    os.environ["COMP_WORDS"] = shlex.join(["fivefold", *args])
    os.environ["COMP_CWORD"] = str(len(args))
    last = "" if args[-1:] == [""] else shlex.quote(args[-1])
    os.environ["_TYPER_COMPLETE_ARGS"] = f"{shlex.join(['fivefold', *args[:-1]])} {last}"


def _split(text: str) -> list[str]:
    """Words of a shell, also where a quote is not closed yet."""
    split = shlex.shlex(text, posix=True)
    split.whitespace_split, split.commenters = True, ""
    tokens: list[str] = []
    try:
        tokens.extend(split)
    except ValueError:
        tokens.append(split.token)
    return tokens
