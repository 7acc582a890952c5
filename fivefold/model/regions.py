"""Regions: the arithmetic between GEMMs and collectives, one kernel each way where it is compiled.

A region is a pure function of its inputs. What it saves for its backward is a part of its
definition: its inputs, but not one in which it is linear. Its backward computes all else again,
inside of its kernel. So memory does not depend on the compiler, and a rehearsal knows it.

GEMMs, attention, collectives and what hides them are never inside of a region: the compiler cannot
move them, and every layout and schedule runs the same kernels. On an H200, 8 layers of Llama-3.1-8B
with 8,192 tokens took 202.8 ms forward and backward with regions and 203.7 ms with one graph for
each block, and saved the same 10.6 GiB (torch 2.11, 2026-11-16).

Who makes a model chooses how its regions run, by a `Fuse`: `eager`, `compiled`, or a rehearsal's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

Compute = Callable[..., Any]
_MOST_SIZES = 64  # for which one region is compiled anew: widths, grad modes, strides


class Fuse(Protocol):
    """Makes kernels of a pure function; `varies`: its first dim has another size in every call."""

    def __call__(self, compute: Compute, varies: bool = False) -> Compute: ...


def eager(compute: Compute, varies: bool = False) -> Compute:
    """One kernel for each operator."""
    return compute


@cache
def compiled(compute: Compute, varies: bool = False) -> Compute:
    """As few kernels as the compiler can. All layers share them."""
    # Slow to import, and not wanted without a compiler.
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_SIZES)
    inductor.compile_threads = 1  # graphs are small, and processes would outlive a killed rank
    return torch.compile(compute, fullgraph=True, dynamic=varies)


class Region:
    """A pure function and its gradient. `linear`: in its first input, which has the size and type
    of its output and is not saved. `varies` as for `Fuse`."""

    def __init__(self, compute: Compute, linear: bool = False, varies: bool = False) -> None:
        self.compute, self.linear, self.varies = compute, linear, varies
        self.gradients = _gradients_of(compute)

    def by(self, fuse: Fuse) -> Callable[..., Tensor]:
        """The region, run as `fuse` makes its kernels."""
        return partial(
            _Apply.apply,
            fuse(self.compute, self.varies),
            fuse(self.gradients, self.varies),
            self.linear,
        )


class _Apply(torch.autograd.Function):
    """Saves inputs, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, compute: Compute, gradients: Compute, linear: bool, *inputs: Any
    ) -> Tensor:
        kept = (None, *inputs[1:]) if linear else inputs
        ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in kept))
        ctx.others = [None if isinstance(each, Tensor) else each for each in kept]
        ctx.gradients, ctx.linear = gradients, linear
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        both = zip(ctx.saved_tensors, ctx.others, strict=True)
        inputs = [other if saved is None else saved for saved, other in both]
        if ctx.linear:
            inputs[0] = gradients[0]
        wanted = ctx.needs_input_grad[3:]
        found: Iterator[Tensor] = iter(ctx.gradients(wanted, inputs, gradients[0]))
        return (None, None, None, *(next(found) if each else None for each in wanted))


def _gradients_of(compute: Compute) -> Compute:
    """The function of the gradients of a region; `__wrapped__` is the region.

    It has code of its own: the compiler keeps its graphs by code, and looks at all of them at every
    call.
    """

    def template(wanted: Sequence[bool], inputs: Sequence[Any], gradient: Tensor) -> Any:
        return _gradients(compute, wanted, inputs, gradient)

    name = f"{compute.__name__}_gradients"
    code = template.__code__.replace(co_name=name)
    found = FunctionType(code, globals(), name, None, template.__closure__)
    found.__wrapped__ = compute  # pyright: ignore[reportFunctionMemberAccess]
    return found


def _gradients(
    compute: Compute, wanted: Sequence[bool], inputs: Sequence[Any], gradient: Tensor
) -> Sequence[Tensor]:
    """The gradients of the inputs that are wanted."""
    places = [place for place, each in enumerate(wanted) if each]

    def of_wanted(*some: Tensor) -> Tensor:
        all_inputs = list(inputs)
        for place, each in zip(places, some, strict=True):
            all_inputs[place] = each
        return compute(*all_inputs)

    chosen = [inputs[place] for place in places]
    if torch.compiler.is_compiling():
        return torch.func.vjp(of_wanted, *chosen)[1](gradient)
    with torch.enable_grad():  # several times faster than vjp where each operator is a call
        leaves = [each.detach().requires_grad_() for each in chosen]
        return torch.autograd.grad(of_wanted(*leaves), leaves, gradient)
