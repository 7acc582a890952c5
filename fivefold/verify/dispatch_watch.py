"""Every collective of this rank as torch's dispatcher sees it, whatever code issues it.

It is a second count beside `Mesh.records`: a collective that was forgotten there, or added
elsewhere, shows up here. It costs a Python call for each operator and disables compilation, so only
`verify` uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.core.layout import PIPELINE
from fivefold.parallel import CollectiveRecord, Mesh

# The kind of each operator, and which of its arguments is the input buffer.
_KINDS = {
    "c10d": {
        "allreduce_": ("all_reduce", 0),
        "allreduce_coalesced_": ("all_reduce", 0),
        "_allgather_base_": ("all_gather", 1),
        "allgather_": ("all_gather", 1),
        "allgather_coalesced_": ("all_gather", 1),
        "allgather_into_tensor_coalesced_": ("all_gather", 1),
        "_reduce_scatter_base_": ("reduce_scatter", 1),
        "reduce_scatter_": ("reduce_scatter", 1),
        "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
        "alltoall_base_": ("all_to_all", 1),
        "alltoall_": ("all_to_all", 1),
        "broadcast_": ("broadcast", 0),
        "reduce_": ("reduce", 0),
        "gather_": ("gather", 1),
        "scatter_": ("scatter", 1),
        "send": ("send", 0),
        "recv_": ("recv", 0),
        "recv_any_source_": ("recv", 0),
        "barrier": ("barrier", 0),
    },
    "_c10d_functional": {
        "all_reduce": ("all_reduce", 0),
        "all_reduce_": ("all_reduce", 0),
        "all_reduce_coalesced": ("all_reduce", 0),
        "all_reduce_coalesced_": ("all_reduce", 0),
        "all_gather_into_tensor": ("all_gather", 0),
        "all_gather_into_tensor_out": ("all_gather", 0),
        "all_gather_into_tensor_coalesced": ("all_gather", 0),
        "reduce_scatter_tensor": ("reduce_scatter", 0),
        "reduce_scatter_tensor_out": ("reduce_scatter", 0),
        "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
        "all_to_all_single": ("all_to_all", 0),
        "broadcast": ("broadcast", 0),
        "broadcast_": ("broadcast", 0),
        "isend": ("send", 0),
        "irecv": ("recv", 0),
    },
}


class DispatchWatch(TorchDispatchMode):
    """Dispatch mode whose `records` count collectives as `Mesh.records` does."""

    def __init__(self, mesh: Mesh, say: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.records: Counter[CollectiveRecord] = Counter()
        self.say = say
        self.axes = {group.group_name: axis for axis, group in mesh.groups.items()}
        self.axes |= {group.group_name: PIPELINE for group in mesh.channels.values()}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _KINDS:
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        group = _group((*args, *kwargs.values()))
        if group is None:
            return
        group_name, size = group
        name = func._schema.name.split("::")[1]
        kind, position = _KINDS[func.namespace].get(name, (name, 0))
        axis = self.axes.get(group_name, group_name)
        self.records[CollectiveRecord(axis, kind, _bytes(args[position]), size)] += 1
        if self.say is not None:
            self.say(f"{kind} on {axis}")


def _group(arguments: tuple[Any, ...]) -> tuple[str, int] | None:
    """Name and size of the group among an operator's arguments; without one it is no collective.

    It comes as an object, boxed or not, or by its name, which is then the last text.
    """
    for argument in arguments:
        if isinstance(argument, dist.ProcessGroup):
            return argument.group_name, argument.size()
        if isinstance(argument, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(argument)
            return group.group_name, group.size()
    names = [text for text in arguments if isinstance(text, str)]
    if not names:
        return None
    return names[-1], dist.distributed_c10d._resolve_process_group(names[-1]).size()


def _bytes(buffer: Any) -> int:
    if isinstance(buffer, Tensor):
        return buffer.nbytes
    return sum(_bytes(tensor) for tensor in buffer)
