"""The house rules of objects: complete when made, and never for just any GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from tests.house import nodes, parsed, room, trees

# What means the current GPU of the calling thread, unless a device or a stream is given. A thread
# begins with GPU 0, whichever one its rank has.
OF_ONE_GPU = re.compile(
    r"torch\.cuda\.(synchronize|Stream|(current|default)_stream|(max_)?memory_\w+|reset_\w+"
    r"|mem_get_info|get_device_(name|properties|capability))|.+\.record"
)

# Attributes that may be set from outside of their class, and why: an object is complete when made.
SEAMS = (
    *("matmul", "normalise", "kernel", "lookup", "add_positions", "cross_entropy"),
    *("run_blocks", "mask", "balance", "dispatch", "repeats", "remakes", "first_head", "activate"),
    *("residual_tokens", "chunked", "normalise_sum", "project", "latent_kernel", "coding"),
    *("hold", "add_bias", "route"),
)
SETTABLE = {
    "grad": "torch: the gradient of a tensor",
    **dict.fromkeys(SEAMS, "a seam of the model: a room replaces the arithmetic of a layer"),
    **dict.fromkeys(("__signature__", "__annotations__", "__doc__"), "typer reads a verb by them"),
    **dict.fromkeys(("allow_tf32", "compile_threads", "recompile_limit"), "torch: a setting"),
    "bundle_triton_into_fx_graph_cache": "torch: a setting",
    "enabled": "torch: whether oneDNN multiplies",
    "__class__": "Python: what a module does with its attributes",
    **dict.fromkeys(("stdout", "stderr"), "Python: where a process prints"),
    "__wrapped__": "Python: the function that another one is made of",
    "max_ctas": "torch: how NCCL runs a communicator",
    "_timeout": "torch: the options of a group, which warn where they differ from its timeout",
    "atexit": "weakref: whether a finalizer runs when the process exits",
    "encode_special_tokens": "tokenizers: a setting of their object",
    **dict.fromkeys(("whitespace", "whitespace_split", "commenters", "escape"), "shlex: a setting"),
}
SEAM_ROOMS = ("model", "parallel", "rehearse", "verify", "generate")
# A torch module takes its weights and buffers by name, and a package its rooms.
SETATTR = (
    "fivefold.__init__",
    "fivefold.parallel.composition",
    "fivefold.parallel.units.flat_unit",
    "fivefold.verify.asynchronous",
)


def assigned(module: ast.Module) -> Iterator[ast.Attribute]:
    """Every attribute that is assigned or deleted, of whatever object."""
    for node in nodes(module):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def is_own(node: ast.Attribute) -> bool:
    """Of the object or class itself; or of the context of an autograd function."""
    return is_name(node.value, "self", "cls", "ctx")


def is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def declared(module: ast.Module) -> set[str]:
    """Attributes of the classes of a module, which other code of this module may set."""
    names = {node.attr for node in assigned(module) if is_name(node.value, "self")}
    for node in nodes(module):
        if isinstance(node, ast.ClassDef):
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return names


def set_from_outside(modules: Mapping[str, ast.Module]) -> list[str]:
    """Attributes that a module sets on objects of other modules."""
    found: list[str] = []
    for name, module in modules.items():
        own = declared(module)
        for node in assigned(module):
            allowed = node.attr in own or node.attr in SETTABLE
            if node.attr in SEAMS:
                allowed = room(name) in SEAM_ROOMS
            if not (is_own(node) or allowed):
                found.append(f"{name}: {ast.unparse(node)}")
        if name not in SETATTR:
            found += [f"{name}: {ast.unparse(call)}" for call in setters(module)]
    return found


def setters(module: ast.Module) -> Iterable[ast.Call]:
    """Calls of `setattr` and its kin, which assign without an equals sign."""
    for node in nodes(module):
        if isinstance(node, ast.Call):
            of_object = isinstance(node.func, ast.Attribute) and node.func.attr == "__setattr__"
            if of_object or is_name(node.func, "setattr", "delattr"):
                yield node


def test_objects_are_complete_when_they_are_made() -> None:
    wrong = set_from_outside(trees())
    assert not wrong, "give the class a method, or pass it when it is made:\n" + "\n".join(wrong)


def test_an_attribute_set_from_outside_is_seen() -> None:
    modules = parsed(
        a="class Mesh:\n    def __init__(self):\n        self.pause = None\n"
        "def build():\n    mesh = Mesh()\n    mesh.pause = 1\n    return mesh",
        b="def slow(job):\n    job.mesh.pause = 2\n    job.count += 1",
        c="def shorten(x, name):\n    setattr(x, name, 1)\n    del x.parts\n    x.grad = None",
        page="def fuse(layer):\n    layer.matmul = min",
        parallel="def fuse(layer):\n    layer.matmul = min",
    )
    assert set_from_outside(modules) == [
        "fivefold.b: job.mesh.pause",
        "fivefold.b: job.count",
        "fivefold.c: x.parts",
        "fivefold.c: setattr(x, name, 1)",
        "fivefold.page: layer.matmul",
    ]


def without_device(modules: Mapping[str, ast.Module]) -> list[str]:
    """Calls for a GPU that do not name it: they mean the current one of whatever thread calls."""
    found: list[str] = []
    for name, module in modules.items():
        for node in nodes(module):
            if not isinstance(node, ast.Call):
                continue
            named = {each.arg for each in node.keywords} & {"device", "stream"}
            if not (node.args or named) and OF_ONE_GPU.fullmatch(ast.unparse(node.func)):
                found.append(f"{name}: {ast.unparse(node)}")
    return found


def test_calls_for_a_gpu_name_it() -> None:
    wrong = without_device(trees())
    assert not wrong, "name the device, or the stream of an event:\n" + "\n".join(wrong)


def test_a_call_for_no_gpu_in_particular_is_seen() -> None:
    modules = parsed(
        a="def f(device):\n    torch.cuda.synchronize()\n    torch.cuda.synchronize(device)",
        b="s = torch.cuda.Stream(priority=-1)\nt = torch.cuda.Stream(device='cuda:1')",
        c="def f(event, log):\n    event.record()\n    event.record(stream)\n    log.records()",
        d="import torch\npeak = torch.cuda.max_memory_allocated() + torch.cuda.device_count()",
    )
    assert without_device(modules) == [
        "fivefold.a: torch.cuda.synchronize()",
        "fivefold.b: torch.cuda.Stream(priority=-1)",
        "fivefold.c: event.record()",
        "fivefold.d: torch.cuda.max_memory_allocated()",
    ]
