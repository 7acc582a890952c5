"""Tensors with sizes and no values, on torch's `meta` device.

An operator on such tensors computes the size, the strides and the type of its result. For most of
them torch does that in Python, which takes up to a millisecond; all layers of a model and all ranks
of a job ask the same again. So it is asked once, and remembered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")
_PLAIN = (
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# What makes a tensor of a number that is written down, and what reads it again.
_NUMBERS = (torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default)
_MOVE = torch.ops.aten._to_copy.default
_OfTensor = tuple[torch.Size, tuple[int, ...], torch.dtype]


class _Result(Enum):
    """Kind of an operator's result, by its schema."""

    NEW = auto()  # one or more tensors that no input shares memory with
    WRITTEN = auto()  # an argument, in place
    OTHER = auto()  # views, lists, numbers


class SizesOnly(TorchDispatchMode):
    """Mode in which created tensors have a size, strides and dtype, and no memory."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return sized_result(func, args, kwargs or {})


def sized_result(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Result of an operator, without values; wrapped numbers keep theirs."""
    if func in _NUMBERS and not args[0].dim():
        return func(*args, **kwargs)
    kind, takes_device = _kind_of(func)
    if takes_device:
        if func is _MOVE and _only_moves(args[0], kwargs):
            return args[0]
        kwargs = {**kwargs, "device": DEVICE}
        kwargs.pop("pin_memory", None)
    known = None if kind is _Result.OTHER else _key(func, args, kwargs)
    if known is None:
        if any(map(_has_values, args)) or any(map(_has_values, kwargs.values())):
            args, kwargs = tree_map_only(Tensor, _without_values, (args, dict(kwargs)))
        return func(*args, **kwargs)
    if known not in _KNOWN:
        result = func(*args, **kwargs)
        _KNOWN[known] = _remembered(kind, result, args)
        return result
    if (sizes := _KNOWN[known]) is None:
        return func(*args, **kwargs)
    if kind is _Result.WRITTEN:
        return args[0]
    tensors = [None if size is None else _new(*size) for size in sizes]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


_KNOWN: dict[Hashable, list[_OfTensor | None] | None] = {}


def _new(size: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=DEVICE)


def _only_moves(tensor: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor goes to another device, and is the same there: all of them are one here."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    return device not in (None, tensor.device) and dtype in (None, tensor.dtype)


@cache
def _kind_of(func: Any) -> tuple[_Result, bool]:
    """What an operator gives, and whether it takes a device for it."""
    arguments, returns = func._schema.arguments, func._schema.returns
    takes_device = any(argument.name == "device" for argument in arguments)
    aliased = [argument.name for argument in arguments if argument.alias_info is not None]
    if not returns or any(str(result.type) != "Tensor" for result in returns):
        return _Result.OTHER, takes_device
    if not aliased and func.namespace == "aten":
        return _Result.NEW, takes_device
    written = aliased == [arguments[0].name] and arguments[0].alias_info.is_write
    if written and len(returns) == 1 and func.namespace == "aten":
        return _Result.WRITTEN, takes_device
    return _Result.OTHER, takes_device


def _key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
    """What a result's size depends on; None if there is more to it."""
    parts: list[Hashable] = [func]
    for value in args:
        if not _add_key(parts, value):
            return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _add_key(parts, value):
            return None
    return tuple(parts)


def _add_key(parts: list[Hashable], value: Any) -> bool:
    if isinstance(value, Tensor):
        parts += (value.shape, value.stride(), value.dtype)
        return value.is_meta
    if isinstance(value, list | tuple):
        parts.append(len(value))
        return all(_add_key(parts, element) for element in value)
    parts += (type(value), value)  # 1, 1.0 and True are equal, and promote types otherwise
    return isinstance(value, _PLAIN)


def _remembered(kind: _Result, result: Any, args: tuple[Any, ...]) -> list[_OfTensor | None] | None:
    """The sizes of a result, None for one that is not made; None where it shares memory that its
    schema does not tell of."""
    if kind is _Result.WRITTEN:
        return [] if result is args[0] else None
    results: list[Tensor | None] = [result] if isinstance(result, Tensor) else list(result)
    tensors = [output for output in results if output is not None]
    storages = {
        leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, Tensor)
    }
    shared = any(tensor.untyped_storage()._cdata in storages for tensor in tensors)
    offset = any(tensor.storage_offset() for tensor in tensors)
    if shared or offset:
        return None
    return [
        None if output is None else (output.shape, output.stride(), output.dtype)
        for output in results
    ]


def _has_values(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_values, value))
    return isinstance(value, Tensor) and not value.is_meta


def _without_values(tensor: Tensor) -> Tensor:
    """A tensor with values as one without."""
    if tensor.is_meta:
        return tensor
    return _new(tensor.shape, tensor.stride(), tensor.dtype)
