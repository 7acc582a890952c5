"""The words of the glossary that are retired, and every text that people read.

A word is retired where another one says the same: one word for one thing, the field's own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house import FILES

ROOT = Path(__file__).parents[1]
# What is not said any more, and what is said.
RETIRED = {
    r"behind": "after; hidden by",
    r"in front of": "before",
    r"line-?ups?": "group",
    r"look-?outs?": "estimate",
    r"matrix products?": "matmul or GEMM",
    r"outlooks?": "estimate or forecast",
    r"pieces?": "shard, or chunk",
    r"places? (in|of) the pipeline": "stage",
    r"slopes?": "gradient",
    r"split products?": "split matmul",
    r"what it holds at most": "peak memory",
    r"which holds most": "the fullest",
    r"told": "set, said or given",
    r"hold at most": "peak memory",
    r"weight slices?": "shard",
}
WORDS = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.I)
HISTORY = ("log.md",)  # what was tried, in the words of its day


def pages() -> Iterator[tuple[str, str]]:
    """README, docs and what beginners read beside them, without code in them."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))):
        if path.name not in HISTORY:
            text = path.read_text("utf-8")
            yield path.name, re.sub(r"```(?!text).*?```|`[^`\n]*`", "", text, flags=re.S)


def messages() -> Iterator[tuple[str, str]]:
    """Every string of the package that has words: help, errors, answers, prose of the page."""
    for path in FILES:
        source = path.read_text("utf-8")
        if not WORDS.search(re.sub(r'"\s*f?"', "", source)):
            continue  # most files: a parse of all takes seconds
        tree = ast.parse(source)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and id(node) not in docs
            if is_text and isinstance(node.value, str) and " " in node.value:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def page_prose() -> Iterator[tuple[str, str]]:
    """Strings with words in the scripts of the page, and its HTML."""
    for path in sorted((ROOT / "fivefold_page" / "static").glob("*")):
        if path.suffix == ".html":
            yield path.name, re.sub(r"<[^>]*>", " ", path.read_text("utf-8"))
        if path.suffix == ".js" and ".min." not in path.name:
            script = re.sub(r"^\s*//[^\n]*", "", path.read_text("utf-8"), flags=re.M)
            for text in re.findall(r'"(?:[^"\\\n]|\\.)*"|`[^`]*`', script):
                yield path.name, re.sub(r"\$\{[^}]*\}", "…", text)


def found(texts: Iterator[tuple[str, str]]) -> list[str]:
    """Retired words, with where they are and what to say."""
    wrong: list[str] = []
    for where, text in texts:
        for word in WORDS.finditer(text):
            near = " ".join(text[max(0, word.start() - 40) : word.end() + 30].split())
            way = next(say for each, say in RETIRED.items() if re.fullmatch(each, word[1], re.I))
            wrong.append(f"{where}: {word[1]!r} in {near!r}: say {way}")
    return wrong
