"""What the keys `data` and `eval_data` name: corpora with weights, and folders with names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from fivefold.core import BadFile

STANDARD_LIBRARY, SYNTHETIC, RHYMES = "stdlib", "synthetic", "rhymes"
_WEIGHT = re.compile(r"(.+):([0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})")
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+)")


def parse_mixture(spec: str) -> dict[str, Fraction]:
    """Names of corpora and their weights.

    >>> parse_mixture("web:3 a:b:.5")
    {'web': Fraction(3, 1), 'a:b': Fraction(1, 2)}
    """
    try:
        args = shlex.split(spec)
    except ValueError as error:
        raise BadFile(f"data = {spec!r}", [f"{error}; close the quotes"]) from error
    if not args:
        example = "name stdlib, rhymes, synthetic, or a folder that `fivefold tokens` wrote"
        raise BadFile(f"data = {spec!r}", [f"it names no corpus; {example}"])
    weights: dict[str, Fraction] = {}
    problems: list[str] = []
    for word in args:
        match = _WEIGHT.fullmatch(word)
        name, weight = (match[1], Fraction(match[2])) if match else (word, Fraction(1))
        if name in weights:
            problems.append(f"{name} appears twice; give it once, with one weight")
        if len(args) > 1 and match is None:
            problems.append(f"{name} has no weight; write {name}:0.5, for example")
        if weight == 0:
            problems.append(f"{word} has no weight above 0; give one, or leave it out")
        weights[name] = weight
    if problems:
        raise BadFile(f"data = {spec!r}", problems)
    return weights


def parse_sets(spec: str) -> dict[str, str]:
    """Folders by the names of their sets; without a name, a folder has its own.

    >>> parse_sets("data/web code=tokens/python")
    {'web': 'data/web', 'code': 'tokens/python'}
    """
    try:
        args = shlex.split(spec)
    except ValueError as error:
        raise BadFile(f"eval_data = {spec!r}", [f"{error}; close the quotes"]) from error
    folders: dict[str, str] = {}
    for word in args:
        named = _NAMED.fullmatch(word)
        name, folder = (named[1], named[2]) if named else (Path(word).name, word)
        if name in folders:
            rule = f"{folders[name]} and {folder} are both called {name}; write NAME=FOLDER"
            raise BadFile(f"eval_data = {spec!r}", [rule])
        folders[name] = folder
    return folders


def moved_corpora(spec: str, move: Callable[[str], str]) -> str:
    """The text of either key with all its folders moved; one that cannot be read stays as it is.

    >>> moved_corpora("stdlib:1 text/web:2", lambda folder: f"up/{folder}")
    'stdlib:1 up/text/web:2'
    >>> moved_corpora("code=a 'b c'", lambda folder: f"../{folder}")
    "code=../a '../b c'"
    """
    try:
        args = shlex.split(spec)
    except ValueError:
        return spec
    return " ".join(shlex.quote(_moved(word, move)) for word in args)


def _moved(word: str, move: Callable[[str], str]) -> str:
    name, equals, tail = "", "", word
    if named := _NAMED.fullmatch(word):
        name, equals, tail = named[1], "=", named[2]
    match = _WEIGHT.fullmatch(tail)
    folder, weight = (match[1], f":{match[2]}") if match else (tail, "")
    if folder in (STANDARD_LIBRARY, SYNTHETIC, RHYMES):
        return word
    return f"{name}{equals}{move(folder)}{weight}"
