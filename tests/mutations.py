"""Faults for mutation testing: the kinds of the field, as edits of one function's source.

A kind looks at one node of a function's tree and yields edits of the text, each of an exact span,
so that all other text of a file stays. What only shows (messages, docstrings, annotations) and what
only a GPU runs is never edited.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
ROOMS = {
    "parallel": "fivefold/parallel",
    "step": "fivefold/step.py",
    "optim": "fivefold/optim",
    "train": "fivefold/train",
    "data": "fivefold/data",
    "generate": "fivefold/generate",
    "serve": "fivefold/serve",
    "model": "fivefold/model",
    "cost": "fivefold/cost",
    "planner": "fivefold/planner",
}
# Code that only a GPU runs: the tests that choose by the map run without one.
GPU_FILES = {
    "fivefold/generate/cuda_graphs.py": "captures CUDA graphs",
    "fivefold/generate/piecewise.py": "captures CUDA graphs",
    "fivefold/model/fp8/kernel.py": "Triton kernels",
    "fivefold/optim/tensor_table.py": "addresses for Triton kernels",
}
GPU_FUNCTIONS = {
    "fivefold/data/rank_reader.py:_copied": "copies in a CUDA stream",
    "fivefold/model/fp8/matmul.py:_capability": "asks the GPU",
    "fivefold/model/fp8/matmul.py:_on_tensor_cores": "fp8 matmuls of a GPU",
    "fivefold/model/fp8/rows.py:_LiveRows.__init__": "rows that Triton kernels round",
    "fivefold/model/fp8/rows.py:_LiveRows.round": "rows that Triton kernels round",
    "fivefold/model/fp8/rows.py:_major": "asks the GPU",
    "fivefold/model/kernels/flash.py:_aligned_bias": "a kernel of a GPU takes it",
    "fivefold/model/kernels/flash.py:_compiled": "compiled on a GPU only",
    "fivefold/model/kernels/flash.py:_has_fast_cudnn": "asks the GPU",
    "fivefold/model/kernels/flash.py:_has_flash": "asks the GPU",
    "fivefold/model/slots.py:_sum_in_one_kernel": "launches a Triton kernel",
    "fivefold/optim/blockwise.py:BlockwiseUpdater._rounding": "seeds of a Triton kernel",
    "fivefold/optim/blockwise.py:BlockwiseUpdater._run_kernel": "launches a Triton kernel",
    "fivefold/optim/gradient_norm.py:norm_on_gpu": "launches a Triton kernel",
    "fivefold/optim/gradient_norm.py:_sums": "launches a Triton kernel",
    "fivefold/optim/optimizer.py:DeviceUpdater._run_kernel": "launches a Triton kernel",
    "fivefold/parallel/transport.py:_stream": "makes a CUDA stream",
    "fivefold/serve/rank.py:_capture_prompts": "captures CUDA graphs",
    "fivefold/train/callbacks/memory.py:allocated": "memory of a GPU",
    "fivefold/train/callbacks/memory.py:nearest_fit": "after a GPU ran out of memory",
    "fivefold/train/callbacks/memory.py:MemoryCallback.out_of_memory": "memory of a GPU",
}
GPU_CLASSES = {"fivefold/train/callbacks/records.py:_DeviceClock": "events of a GPU"}
ON_GPU = re.compile(r"cuda|triton|nccl|on_gpu|pin_memory", re.I)

COLLECTIVES = {
    *("all_reduce", "reduce_scatter", "all_gather", "gather", "scatter", "total", "sum_together"),
    *("send", "receive", "pass_on", "exchange", "barrier", "broadcast", "issue", "publish"),
    *("all_gather_object", "gather_object", "scatter_object_list", "isend", "irecv"),
}
OUT_OF_PLACE = {"gather", "scatter", "total"}
OTHER_AXIS = {
    **{"tp": "dp-cp", "dp-cp": "tp", "fsdp": "dp-cp", "replicate": "fsdp", "edp": "dp-cp"},
    **{"ep": "edp", "etp": "ep", "cp": "tp", "replica": "tp", "pp": "tp", "dp": "tp"},
    **{"ring": "ulysses", "ulysses": "ring", "ep-near": "ep-far", "ep-far": "ep-near"},
    **{"row": "tp", "scale": "tp", "world": "dp-cp", "twin": "dp-cp"},
}
REDUCTIONS = {
    **{"sum": "mean", "mean": "sum", "amax": "amin", "amin": "amax", "SUM": "MAX", "MAX": "SUM"},
    **{"AVG": "SUM", "logsumexp": "sum"},
}
WAITS = {
    *("wait", "synchronize", "wait_event", "wait_stream", "join", "arrive", "barrier", "drain"),
    *("flush", "fsync", "result", "sync"),
}
FORGETS = {"clear", "pop", "popleft", "discard", "remove", "cache_clear", "popitem", "release"}
PLACES = re.compile(r"rank|stage|coord|source|target|peer|chunk|index|position|turn|hop|microbatch")
PATHS = re.compile(r"path|folder|root|home|directory|\bfile\b|\bname\b")
MASKS = re.compile(r"mask|valid|visible|causal|window|padding|present|live|drop|keep")
PAIRS = (
    *({"source", "target"}, {"before", "after"}, {"first", "last"}, {"previous", "following"}),
    *({"left", "right"}, {"send", "receive"}, {"sent", "received"}, {"input", "output"}),
    *({"inputs", "outputs"}, {"start", "end"}, {"rank", "size"}, {"query", "key"}),
    *({"key", "value"}, {"k", "v"}, {"q", "k"}, {"row", "column"}, {"near", "far"}),
)
CALLS_THAT_SHOW = re.compile(r"^(print|.*\b(warn|warning|info|debug|log|write_line|Refusal))$")


class Edit(NamedTuple):
    """Replaces the bytes from `start` to `end` by a text."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Mutant:
    """One fault. Its `id` stays as long as the node and its edit do, wherever they move."""

    id: str
    room: str
    path: str
    function: str
    kind: str
    edit: Edit
    line: int
    before: str
    after: str
    digest: str  # of the function

    def apply(self, source: bytes) -> bytes:
        return source[: self.edit.start] + self.edit.text.encode() + source[self.edit.end :]


class Source:
    """A file as bytes and tree."""

    def __init__(self, content: bytes) -> None:
        self.content, self.tree = content, ast.parse(content)
        self.lines = [0]
        for line in content.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.content[start:end].decode()

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(*self.span(node), text)

    def operator(
        self, left: ast.expr | ast.stmt, right: ast.expr, former: str, text: str
    ) -> Iterator[Edit]:
        """Replace an operator between two nodes."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda match: b" " * len(match[0]), self.content[start:end])
        at = gap.find(former.encode())
        if at >= 0:
            yield Edit(start + at, start + at + len(former), text)

    def snippet(self, edit: Edit) -> tuple[str, str]:
        """The lines of an edit before and after it, without line breaks."""
        start = self.content.rfind(b"\n", 0, edit.start) + 1
        end = self.content.find(b"\n", edit.end)
        old = self.content[start:end]
        new = self.content[start : edit.start] + edit.text.encode() + self.content[edit.end : end]
        return " ".join(old.decode().split()), " ".join(new.decode().split())


Kind = Callable[[ast.AST, Source], Iterator[Edit]]


def _attribute(node: ast.AST) -> str:
    """The last name of what a call calls; nothing of another node."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return getattr(function, "attr", None) or getattr(function, "id", "")


def _statement_call(node: ast.AST) -> ast.Call | None:
    """The call that is a statement."""
    value = node.value if isinstance(node, ast.Expr) else None
    value = value.value if isinstance(value, ast.Await) else value
    return value if isinstance(value, ast.Call) else None


def _constant(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(_constant(node), str)


def _is_number(node: ast.AST) -> bool:
    """Whether nothing shows that a node is text or a collection, which have no other sign."""
    collections = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)
    is_collection = isinstance(node, (*collections, ast.GeneratorExp))
    return not (is_collection or _is_text(node) or _attribute(node) in ("keys", "list", "tuple"))


def _is_path(node: ast.BinOp, source: Source) -> bool:
    """Whether a division joins paths."""
    names = source.text(node.left) + " " + source.text(node.right)
    return _is_text(node.right) or PATHS.search(names) is not None


def collective(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A collective that is not issued, or over another axis."""
    call = _statement_call(node)
    if call is not None and isinstance(node, ast.stmt):
        inner = call.func.value if isinstance(call.func, ast.Attribute) else call
        if _attribute(call) in COLLECTIVES or _attribute(inner) in COLLECTIVES:
            yield source.replace(node, "pass")
    if not isinstance(node, ast.Call):
        return
    if _attribute(node) in OUT_OF_PLACE and len(node.args) > 1 and "mesh" in source.text(node.func):
        yield source.replace(node, f"({source.text(node.args[0])})")
    if _attribute(node) in COLLECTIVES | {"size", "coord"}:
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            axis = OTHER_AXIS.get(str(_constant(argument)))
            if axis is not None:
                yield source.replace(argument, f'"{axis}"')


def reduction(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A mean in place of a sum, or another reduction."""
    if isinstance(node, ast.Attribute) and node.attr in REDUCTIONS:
        parent = source.parents[node]
        called = isinstance(parent, ast.Call) and parent.func is node
        if called or source.text(node.value).endswith("ReduceOp"):
            _, end = source.span(node)
            yield Edit(end - len(node.attr), end, REDUCTIONS[node.attr])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        other = {"sum": "max", "any": "all", "all": "any"}.get(node.func.id)
        if other is not None and len(node.args) == 1:
            yield source.replace(node.func, other)
    if _constant(node) in ("sum", "max", "mean") and isinstance(source.parents[node], ast.Call):
        assert isinstance(node, ast.Constant)
        yield source.replace(node, '"max"' if node.value == "sum" else '"sum"')


def bound(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A slice or range that begins or ends one off."""
    lower = upper = None
    if isinstance(node, ast.Slice):
        lower, upper = node.lower, node.upper
    elif isinstance(node, ast.Call) and _attribute(node) == "range":
        upper = node.args[min(1, len(node.args) - 1)]
        lower = node.args[0] if len(node.args) > 1 else None
    if lower is not None:
        yield source.replace(lower, f"({source.text(lower)}) + 1")
    if upper is not None:
        yield source.replace(upper, f"({source.text(upper)}) - 1")


def stale(node: ast.AST, source: Source) -> Iterator[Edit]:
    """State or a buffer that is not updated."""
    call = _statement_call(node)
    if call is not None and isinstance(node, ast.stmt):
        in_place = _attribute(call).endswith("_") and not _attribute(call).endswith("__")
        if in_place or _attribute(call) in {"update", "append", "extend", "add"}:
            yield source.replace(node, "pass")
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    first = targets[0] if targets else None
    if isinstance(first, (ast.Attribute, ast.Subscript)) and isinstance(node, ast.stmt):
        yield source.replace(node, "pass")


def neighbour(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A stage, rank or chunk beside the right one, or two that are exchanged."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        is_next = _constant(node.right) == 1 and PLACES.search(source.text(node.left))
        if is_next:
            yield source.replace(node, f"({source.text(node.left)})")
    if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Name, ast.Attribute)):
        text = source.text(node.slice)
        if PLACES.search(text.rpartition(".")[2]):
            yield source.replace(node.slice, f"{text} - 1")
    arguments = node.args if isinstance(node, ast.Call) else getattr(node, "elts", ())
    stored = isinstance(getattr(node, "ctx", None), ast.Store)
    for first, second in () if stored else pairwise(arguments):
        texts = source.text(first), source.text(second)
        if {text.rpartition(".")[2] for text in texts} in PAIRS:
            start, end = source.span(first)[0], source.span(second)[1]
            yield Edit(start, end, f"{texts[1]}, {texts[0]}")


def divisor(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A divisor that is forgotten, multiplied by, or rounds in the other direction."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
        left, right = source.text(node.left), source.text(node.right)
        if isinstance(node.op, ast.FloorDiv):
            yield source.replace(node, f"(-(-({left}) // ({right})))")
        elif _is_path(node, source):
            return
        else:
            yield from source.operator(node.left, node.right, "/", "*")
        yield source.replace(node, f"({left})")
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        yield from source.operator(node.target, node.value, "/=", "*=")
    elif isinstance(node, ast.Attribute) and node.attr == "div_":
        _, end = source.span(node)
        yield Edit(end - len("div_"), end, "mul_")


def wait(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A wait that is missing."""
    call = _statement_call(node)
    if call is not None and _attribute(call) in WAITS and isinstance(node, ast.stmt):
        inner = call.func.value if isinstance(call.func, ast.Attribute) else None
        yield source.replace(node, source.text(inner) if isinstance(inner, ast.Call) else "pass")


def mask(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A mask or filter that is skipped."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("masked_fill", "masked_fill_", "masked_select", "where", "tril"):
            of_torch = source.text(node.func.value) in ("torch", "np", "numpy")
            if not of_torch:
                yield source.replace(node, source.text(node.func.value))
            elif len(node.args) == 3:
                yield source.replace(node, f"({source.text(node.args[1])})")
                yield source.replace(node, f"({source.text(node.args[2])})")
    elif isinstance(node, ast.If) and not node.orelse and MASKS.search(source.text(node.test)):
        yield source.replace(node.test, "False")
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Name, ast.Attribute)):
        if MASKS.search(source.text(node.slice)) and isinstance(node.ctx, ast.Load):
            yield source.replace(node, source.text(node.value))
    elif isinstance(node, ast.comprehension):
        for condition in node.ifs:
            yield source.replace(condition, "True")


def sign(node: ast.AST, source: Source) -> Iterator[Edit]:
    """The other sign."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        if _is_number(node.left) and _is_number(node.right):
            signs = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            yield from source.operator(node.left, node.right, *signs)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        if not isinstance(node.operand, ast.Constant):
            yield source.replace(node, f"({source.text(node.operand)})")
    elif isinstance(node, ast.AugAssign) and _is_number(node.value):
        other = {ast.Add: ("+=", "-="), ast.Sub: ("-=", "+=")}.get(type(node.op))
        if other is not None:
            yield from source.operator(node.target, node.value, *other)


def comparison(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A comparison that is one off, or a condition the other way round."""
    orders = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            if type(op) in orders:
                yield from source.operator(left, right, *orders[type(op)])
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield source.replace(node.test, f"not ({source.text(node.test)})")
    elif isinstance(node, ast.BoolOp):
        former, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield from source.operator(node.values[0], node.values[1], former, other)


def cache(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A cache that is not emptied, or whose key lacks a part."""
    call = _statement_call(node)
    if call is not None and _attribute(call) in FORGETS and isinstance(node, ast.stmt):
        yield source.replace(node, "pass")
    if isinstance(node, ast.Delete) and not isinstance(node.targets[0], ast.Name):
        yield source.replace(node, "pass")
    key: ast.expr | None = None
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        key = node.value if "key" in node.targets[0].id else None
    elif isinstance(node, ast.Subscript) and re.search("cache|memo|known", source.text(node.value)):
        key = node.slice
    if isinstance(key, ast.Tuple):
        for element in key.elts:
            texts = [source.text(other) for other in key.elts if other is not element]
            inner = f"{', '.join(texts)}," if texts else ""
            yield source.replace(key, f"({inner})")


def unit(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A factor that is forgotten or of another unit, or the other of two bounds."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv)):
        for number, other in ((node.left, node.right), (node.right, node.left)):
            is_factor = isinstance(_constant(number), (int, float)) and _constant(number) != 1
            if is_factor and (number is node.right or isinstance(node.op, ast.Mult)):
                yield source.replace(node, f"({source.text(other)})")
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        text = source.text(node)
        if re.fullmatch(r"1e(3|6|9|12|15)|1024|1000", text):
            yield source.replace(node, "1000" if text == "1024" else f"({text} * 1.024)")
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        power = {2: "10**9", 1024: "1000**3"}.get(_constant(node.left))
        if power is not None:
            yield source.replace(node, power)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        other = {"min": "max", "max": "min"}.get(node.func.id)
        if other is not None:
            yield source.replace(node.func, other)


KINDS: dict[str, Kind] = {
    "collective": collective,
    "reduction": reduction,
    "bound": bound,
    "stale buffer": stale,
    "neighbour": neighbour,
    "divisor": divisor,
    "wait": wait,
    "mask": mask,
    "sign": sign,
    "comparison": comparison,
    "stale cache": cache,
    "unit": unit,
}
WITH_UNITS = ("cost", "planner")


def dump(node: object) -> str:
    """A tree as text that all versions of Python agree on: no positions, no empty fields."""
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [
        f"{name}={dump(value)}"
        for name, value in ast.iter_fields(node)
        if value not in (None, []) and name not in ("ctx", "kind", "type_comment", "type_params")
    ]
    return f"{type(node).__name__}({','.join(fields)})"


def short_hash(*parts: str) -> str:
    return blake2b("\0".join(parts).encode(), digest_size=5).hexdigest()


def functions(body: list[ast.stmt], scope: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods of a module; nested ones are a part of the one around them."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield scope + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{scope}{node.name}.")


def _is_left_out(path: str, name: str, function: Function, source: Source) -> bool:
    decorators = " ".join(map(source.text, function.decorator_list))
    only_shows = function.name in ("__repr__", "__str__")
    gpu = f"{path}:{name}" in GPU_FUNCTIONS or f"{path}:{name.rpartition('.')[0]}" in GPU_CLASSES
    return gpu or only_shows or re.search(r"overload|triton", decorators) is not None


def _nodes(function: Function, source: Source) -> Iterator[ast.AST]:
    """Nodes of a function that may be edited, those around others first."""
    body: list[ast.AST] = [*function.body]
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    stack = body[::-1]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Call) and CALLS_THAT_SHOW.match(source.text(node.func)):
            continue
        inner = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = [child for child in node.body if not _is_docstring(child)]
        elif isinstance(node, ast.AnnAssign):
            inner = [node.value] if node.value is not None else []
        elif isinstance(node, ast.arguments):
            inner = []
        elif _is_for_gpus(node, source):
            continue
        yield node
        stack += inner[::-1]


def _is_for_gpus(node: ast.AST, source: Source) -> bool:
    """Whether a branch depends on the device, or a simple statement or expression names a GPU."""
    if isinstance(node, (ast.If, ast.IfExp)):
        return ON_GPU.search(source.text(node.test)) is not None
    is_simple = isinstance(node, (ast.expr, ast.stmt)) and not hasattr(node, "body")
    return is_simple and ON_GPU.search(source.text(node)) is not None


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(_constant(node.value), str)


def mutants_of(room: str, path: str, content: bytes) -> Iterator[Mutant]:
    """All mutants of a file."""
    if path in GPU_FILES or path.endswith("_kernel.py"):
        return
    source = Source(content)
    for name, function in functions(source.tree.body):
        if _is_left_out(path, name, function, source):
            continue
        digest = short_hash(dump(function))
        is_new = function.name in ("__init__", "__post_init__")  # what it leaves out is missed
        seen: Counter[str] = Counter()
        edits: set[Edit] = set()
        for node in _nodes(function, source):
            for kind, edits_of in KINDS.items():
                if (kind == "unit") > (room in WITH_UNITS) or (kind == "stale buffer" and is_new):
                    continue
                for edit in edits_of(node, source):
                    if edit in edits:
                        continue
                    edits.add(edit)
                    change = short_hash(kind, dump(node), "".join(edit.text.split()))
                    seen[change] += 1
                    line = content.count(b"\n", 0, edit.start) + 1
                    mutant_id = short_hash(path, name, change, str(seen[change]))
                    yield Mutant(
                        mutant_id, room, path, name, kind, edit, line, *source.snippet(edit), digest
                    )


def files_of(root: Path, room: str) -> list[Path]:
    start = root / ROOMS[room]
    return [start] if start.is_file() else sorted(start.rglob("*.py"))


def candidates(root: Path, room: str) -> list[Mutant]:
    """All mutants of a room."""
    return [
        mutant
        for path in files_of(root, room)
        for mutant in mutants_of(room, path.relative_to(root).as_posix(), path.read_bytes())
    ]


def compiles(mutant: Mutant, root: Path) -> bool:
    try:
        ast.parse(mutant.apply((root / mutant.path).read_bytes()))
    except SyntaxError:
        return False
    return True


def draw(
    mutants: list[Mutant],
    number: int,
    invalid: set[str],
    root: Path,
    most: int = 2,
    recorded: Sequence[Mutant] = (),
) -> list[Mutant]:
    """So many mutants, the `recorded` ones among them: kinds take turns, and no function has more
    than `most`.

    The order is by a hash of the id, so that the draw is the same as long as the functions are, and
    a longer draw begins with a shorter one.
    """
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in sorted(mutants, key=lambda mutant: short_hash("draw", mutant.id), reverse=True):
        by_kind[mutant.kind].append(mutant)
    per_function = Counter(f"{mutant.path}:{mutant.function}" for mutant in recorded)
    drawn, recorded_ids = list(recorded), {mutant.id for mutant in recorded}
    while len(drawn) < number and any(by_kind.values()):
        for kind in KINDS:
            while by_kind[kind]:
                mutant = by_kind[kind].pop()
                function = f"{mutant.path}:{mutant.function}"
                valid = per_function[function] < most and mutant.id not in invalid | recorded_ids
                if valid and compiles(mutant, root):
                    per_function[function] += 1
                    drawn.append(mutant)
                    break
    return drawn[:number]
