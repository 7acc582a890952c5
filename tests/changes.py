"""What differs between a commit and the working tree: functions, and names of modules.

Comments, docstrings, formatting and moves are no change. Functions are compared by their trees,
nested ones as part of the one around them. Names are what statements of a module bind: constants,
and classes without their methods, but not what is imported: functions move.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path

Name = tuple[str, str]  # a file of the working tree, and a name that its module binds
MODULES = ("fivefold", "fivefold_page", "fivefold_score", "tests")
ANY = "*"  # statements that bind no name


Nodes = dict[str, list[ast.AST]]


@dataclass
class Module:
    """The definitions of a file, and what each of them mentions."""

    functions: Nodes = field(default_factory=lambda: defaultdict(list))
    names: Nodes = field(default_factory=lambda: defaultdict(list))
    mentions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    imports: set[tuple[str, str]] = field(default_factory=set)  # folder/module, name or nothing

    def add(self, node: ast.AST, name: str, table: Nodes, binds: set[str]) -> None:
        table[name].append(node)
        self.mentions[name] |= identifiers(node) - binds


def digests(nodes: Nodes) -> dict[str, str]:
    texts = {name: "".join(map(ast.dump, trees)) for name, trees in nodes.items()}
    return {name: blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()}


def identifiers(node: ast.AST) -> set[str]:
    """Names, attributes and arguments (fixtures are arguments), without those of annotations."""
    seen: set[str] = set()
    nodes = [node]
    while nodes:
        current = nodes.pop()
        if isinstance(current, ast.Name):
            seen.add(current.id)
        elif isinstance(current, ast.Attribute):
            seen.add(current.attr)
        elif isinstance(current, ast.arg):
            seen.add(current.arg)
            continue
        for name, value in ast.iter_fields(current):
            if name not in ("annotation", "returns"):
                values = value if isinstance(value, list) else [value]
                nodes += [child for child in values if isinstance(child, ast.AST)]
    return seen


def _plain(text: str) -> ast.Module:
    """The tree without docstrings."""
    tree = ast.parse(text)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


@cache
def module_of(text: str) -> Module:
    try:
        tree = _plain(text)
    except SyntaxError:  # whoever imports it will say so
        return Module()
    module = Module()
    _define(module, tree.body, "")
    return module


def _define(module: Module, body: Iterable[ast.stmt], scope: str) -> None:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name, node.name = node.name, ""
            module.add(node, scope + name, module.functions, {name})
        elif isinstance(node, ast.ClassDef):
            _define(module, node.body, f"{scope}{node.name}.")
            name, node.name = node.name, ""
            functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            node.body = [child for child in node.body if not isinstance(child, functions)]
            module.add(node, scope + name, module.names, {name})
        elif scope:
            continue  # counted with the class
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            source = (getattr(node, "module", None) or "").replace(".", "/")
            for alias in node.names:
                last = alias.name.replace(".", "/")
                module.imports.add((source, last) if source else (last, ""))
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                _define(module, getattr(node, part, []), scope)
                if hasattr(node, part):
                    setattr(node, part, [])
            module.add(node, ANY, module.names, set())
        else:
            bound = _bound(node)
            for name in bound or {ANY}:
                module.add(node, name, module.names, bound)


def _bound(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    within = (child for target in targets for child in ast.walk(target))
    stored = (child for child in within if isinstance(child, ast.Name))
    return {child.id for child in stored if isinstance(child.ctx, ast.Store)}


@dataclass
class Changes:
    """Functions have the names that they had in the commit: `file:Class.method`."""

    functions: set[str] = field(default_factory=set)
    names: set[Name] = field(default_factory=set)
    added: set[Name] = field(default_factory=set)  # functions and names that the commit has not
    old_paths: dict[str, str] = field(default_factory=dict)  # of files that moved


def compare(
    old: Mapping[str, str], new: Mapping[str, str], old_paths: Mapping[str, str]
) -> Changes:
    """Changes between two versions of some files; `old_paths` says where moved files were."""
    changes = Changes(old_paths=dict(old_paths))
    gone: dict[Name, tuple[str, bool]] = {}
    fresh: dict[Name, str] = {}
    former = {old_paths.get(path, path): path for path in new}
    for path in sorted({*new, *(former.get(path, path) for path in old)}):
        before = module_of(old.get(old_paths.get(path, path), ""))
        after = module_of(new.get(path, ""))
        for kind in ("functions", "names"):
            olds = digests(getattr(before, kind))
            news = digests(getattr(after, kind))
            fresh |= {(path, name): news[name] for name in news.keys() - olds.keys()}
            for name, digest in olds.items():
                if name not in news:
                    gone[path, name] = (digest, kind == "functions")
                elif news[name] != digest and kind == "functions":
                    changes.functions.add(f"{old_paths.get(path, path)}:{name}")
                elif news[name] != digest:
                    changes.names.add((path, name))
    moved = {*fresh.values()}
    former_values = {digest for digest, _ in gone.values()}
    for (path, name), (digest, is_function) in gone.items():
        if digest not in moved and is_function:
            changes.functions.add(f"{old_paths.get(path, path)}:{name}")
        elif digest not in moved:
            changes.names.add((path, name))
    changes.added = {name for name, digest in fresh.items() if digest not in former_values}
    return changes


def mentioning(
    names: Iterable[Name], files: Mapping[str, str], *, through_functions: bool
) -> set[Name]:
    """These names, and what mentions them where its module binds or imports them; then what
    mentions that."""
    seen, last = set(names), set(names)
    while last:
        words = {name.rpartition(".")[2] for _, name in last} - {ANY}
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, sorted(words)))})\b")
        new: set[Name] = set()
        for path, text in files.items():
            spelled = set(pattern.findall(text)) if words else set()
            named = {name for name in last if name[1].rpartition(".")[2] in spelled}
            here = {name for name in last if name[0] == path or name in named}
            # Words first: trees take longer.
            if any(name[0] == path or _may_see(text, name[0]) for name in here):
                new |= {(path, name) for name in _mentioning_in(path, module_of(text), here)}
        seen, last = seen | new, new - seen
        if not through_functions:
            last = {(path, name) for path, name in last if name in module_of(files[path]).names}
    return seen


def _may_see(text: str, origin: str) -> bool:
    """Whether a text has the name of a file or one of its folders, as its imports would."""
    parts = origin.removesuffix(".py").split("/")[1:]
    return parts[-1] == "conftest" or any(part in text for part in parts)


def _mentioning_in(path: str, module: Module, names: set[Name]) -> Iterator[str]:
    for origin, name in names:
        last = name.rpartition(".")[2]
        if name == ANY and origin == path:
            yield from module.functions
        elif origin == path or _is_visible(path, module, origin, last):
            methods = f"{name}." if origin == path else "no method"
            for definition, mentioned in module.mentions.items():
                if last in mentioned or definition.startswith(methods):
                    yield definition


def _is_visible(path: str, module: Module, origin: str, name: str) -> bool:
    """Whether a file imports a name of another, or that module, or has its fixtures."""
    source, folder = origin.removesuffix(".py") + "/", path.rpartition("/")[0]
    if source.endswith("/conftest/") and path.startswith(source.removesuffix("conftest/")):
        return True
    for start, imported in module.imports:
        for module_path in (start, f"{folder}/{start}"):
            by_name = imported in (name, "") and source.startswith(f"{module_path}/")
            if by_name or (imported and source.startswith(f"{module_path}/{imported}/")):
                return True
    return False


class Repository:
    """The files of a commit and of the working tree."""

    def __init__(self, root: Path, base: str) -> None:
        self.root, self.base = root, base

    def _git(self, *words: str, sent: bytes = b"") -> bytes:
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        command = ["git", *words]
        streams = {"input": sent, "stderr": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        done = subprocess.run(command, cwd=self.root, check=True, env=environment, **streams)
        return done.stdout

    def has_base(self) -> bool:
        """Whether git is there and knows the commit."""
        try:
            self._git("cat-file", "-e", f"{self.base}^{{commit}}")
        except (OSError, subprocess.CalledProcessError):
            return False
        return True

    def changed_data(self) -> set[str]:
        """Files that are no modules, as functions without a name."""
        paths = ["--", ".", *(f":(exclude,glob){folder}/**/*.py" for folder in MODULES)]
        changed = self._git("diff", "--name-only", "-z", self.base, *paths).decode()
        others = self._git("ls-files", "--others", "--exclude-standard", "-z").decode()
        return {f"{path}:" for path in (changed + others).split("\0") if path}

    def changed(self, folders: Iterable[str]) -> Changes:
        paths = ["--", *(f":(glob){folder}/**/*.py" for folder in folders)]
        changed = self._git("diff", "--name-status", "-M", "-z", "--no-relative", self.base, *paths)
        others = self._git("ls-files", "--others", "--exclude-standard", "-z", *paths)
        fields = changed.decode().split("\0")
        pairs = [(path, path) for path in others.decode().split("\0") if path]
        while len(fields) > 1:
            renamed, former = fields.pop(0).startswith("R"), fields.pop(0)
            pairs.append((former, fields.pop(0) if renamed else former))
        old = self._texts_of_base([former for former, _ in pairs])
        new = {path: text for _, path in pairs if (text := self.text(path)) is not None}
        return compare(old, new, {path: former for former, path in pairs if former != path})

    def _texts_of_base(self, paths: Sequence[str]) -> dict[str, str]:
        """The files that the commit has, of these."""
        sent = "".join(f"{self.base}:{path}\n" for path in paths).encode()
        output = self._git("cat-file", "--batch", sent=sent)
        texts: dict[str, str] = {}
        for path in paths:
            header, _, output = output.partition(b"\n")
            if not header.endswith(b" missing"):
                size = int(header.split()[-1])
                texts[path] = output[:size].decode("utf-8", errors="replace")
                output = output[size + 1 :]
        return texts

    def text(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def files(self, folders: Iterable[str]) -> dict[str, str]:
        """All modules of the working tree."""
        paths = (path for folder in folders for path in sorted((self.root / folder).rglob("*.py")))
        names = (str(path.relative_to(self.root)) for path in paths)
        return {name: text for name in names if (text := self.text(name)) is not None}
