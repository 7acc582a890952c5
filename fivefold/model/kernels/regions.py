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
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Compute = Callable[..., Any]
ByHand = Callable[[Compute], Compute]
_BY_OPERATORS = ContextVar("by_operators", default=False)
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
    _set_up_compiler()
    program = torch.compile(compute, fullgraph=True, dynamic=None if varies else False)
    return partial(with_any_rows, program) if varies else program


def compiled_for_steps(compute: Compute, varies: bool = False) -> Compute:
    """As `compiled`, once for all sizes: steps of a generator have any number of tokens. Kernels
    made anew for each would make requests wait. Not compiled inside of `by_operators`."""
    program = _compiled_for_steps(compute)

    def run(*inputs: Any) -> Any:
        return (compute if _BY_OPERATORS.get() else program)(*inputs)

    return run


@cache
def _compiled_for_steps(compute: Compute) -> Compute:
    _set_up_compiler()
    # A size beyond the limit of the compiler runs operator by operator. With `fullgraph` it would
    # be an error, and end a server.
    program = torch.compile(compute, fullgraph=False)
    return partial(with_any_tokens, program)


def _set_up_compiler() -> None:
    # Slow to import, and not wanted without a compiler.
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_SIZES)
    inductor.compile_threads = 1  # graphs are small, and processes would outlive a killed rank
    # A cached graph that brings its own kernels needs Triton's cache for itself ("exclusive access"
    # in torch's triton_bundler.py), and ranks share theirs: a rank would find the folder of another
    # that still writes, without the kernel, and print a traceback. Triton's cache itself is safe.
    inductor.bundle_triton_into_fx_graph_cache = False


@contextmanager
def by_operators(flag: bool) -> Iterator[None]:
    """Run regions of steps operator by operator, if that is wanted: calls of compiled ones take the
    host longer than the operators inside, which counts where the host is slower than the device."""
    before = _BY_OPERATORS.set(flag)
    try:
        yield
    finally:
        _BY_OPERATORS.reset(before)


def with_any_rows(compute: Compute, *inputs: Any) -> Any:
    """Call what the compiler made: one graph for all sizes of first dims. Kernels know the others,
    which makes them faster than those of a graph for all sizes."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            torch._dynamo.maybe_mark_dynamic(leaf, 0)
    return compute(*inputs)


def with_any_tokens(compute: Compute, *inputs: Any) -> Any:
    """As `with_any_rows`, for steps: their tokens are one row, and so in the second dim of most
    tensors. Unmarked, it would become dynamic only after a graph for the first size."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.ndim > 2:
            torch._dynamo.maybe_mark_dynamic(leaf, 1)
    return with_any_rows(compute, *inputs)


class Region:
    """A pure function and its gradient. `linear`: in its first input, which has the size and type
    of its output and is not saved. `varies` as for `Fuse`."""

    def __init__(self, compute: Compute, linear: bool = False, varies: bool = False) -> None:
        self.compute, self.linear, self.varies = compute, linear, varies
        self.gradients = _gradients_of(compute)

    def by(self, fuse: Fuse) -> Callable[..., Tensor]:
        """The region, run as `fuse` makes its kernels."""
        compute, gradients = (
            fuse(function, self.varies) for function in (self.compute, self.gradients)
        )

        def run(*inputs: Any) -> Tensor:
            if not torch.is_grad_enabled():  # autograd would cost the host as much as the region
                return compute(*inputs)
            return _Apply.apply(compute, gradients, self.linear, *inputs)

        return run


class _Apply(torch.autograd.Function):
    """Saves inputs, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, compute: Compute, gradients: Compute, linear: bool, *inputs: Any
    ) -> Tensor:
        values = (None, *inputs[1:]) if linear else inputs
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in values))
        ctx.constants = [None if isinstance(value, Tensor) else value for value in values]
        ctx.gradients, ctx.linear = gradients, linear
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.constants, strict=True)
        inputs = [other if saved is None else saved for saved, other in pairs]
        if ctx.linear:
            inputs[0] = gradients[0]
        needs = ctx.needs_input_grad[3:]
        grads: Iterator[Tensor] = iter(ctx.gradients(needs, inputs, gradients[0]))
        return (None, None, None, *(next(grads) if need else None for need in needs))


class ResidualRegion(Region):
    """A region whose first input is the residual stream, and may be the sum of two.

    `after_sum` takes both, the second of which may be None, and returns the output and the sum. The
    sum is computed inside of the kernel, and so is that of the gradients: the residual's and what
    the region's backward adds to it. What is saved is the sum, not what is summed.
    """

    def __init__(self, compute: Compute, by_hand: ByHand | None = None) -> None:
        """`by_hand` may have a kernel for gradients that is faster than the compiler's."""
        super().__init__(compute)
        self.of_sum, self.sum_gradients = _of_sum(compute), _sum_gradients_of(compute)
        self.by_hand = by_hand

    def after_sum(self, fuse: Fuse) -> Callable[..., tuple[Tensor, Tensor]]:
        """The region after a sum, run as `fuse` makes its kernels."""
        gradients = fuse(self.sum_gradients)
        if fuse is compiled and self.by_hand is not None:
            gradients = self.by_hand(gradients)
        kernels = (fuse(self.compute), fuse(self.of_sum), gradients)

        def run(x: Tensor, y: Tensor | None, *extra: Any) -> tuple[Tensor, Tensor]:
            if not torch.is_grad_enabled():
                return _after_sum(kernels, x, y, *extra)
            return _ApplyAfterSum.apply(kernels, x, y, *extra)

        return run


Kernels = tuple[Compute, Compute, Compute]
"""Of a region, of a sum and the region, and of the gradients of both."""


def _after_sum(kernels: Kernels, x: Tensor, y: Tensor | None, *extra: Any) -> tuple[Tensor, Tensor]:
    compute, of_sum, _ = kernels
    return (compute(x, *extra), x) if y is None else of_sum(x, y, *extra)


class _ApplyAfterSum(torch.autograd.Function):
    """Saves the sum and the inputs after it."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, x: Tensor, y: Tensor | None, *extra: Any
    ) -> tuple[Tensor, Tensor]:
        output, total = _after_sum(kernels, x, y, *extra)
        ctx.gradients = kernels[2]
        values = (total, *extra)
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in values))
        ctx.constants = [None if isinstance(value, Tensor) else value for value in values]
        return output, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.constants, strict=True)
        inputs = [other if saved is None else saved for saved, other in pairs]
        of_x, of_y, *extra_needs = ctx.needs_input_grad[1:]
        needs = (of_x or of_y, *extra_needs)
        grads: Iterator[Tensor] = iter(ctx.gradients(needs, inputs, *gradients))
        of_sum, *extra_grads = (next(grads) if need else None for need in needs)
        return (None, of_sum if of_x else None, of_sum if of_y else None, *extra_grads)


def _gradients_of(compute: Compute) -> Compute:
    """The function of the gradients of a region."""

    def template(needs: Sequence[bool], inputs: Sequence[Any], gradient: Tensor) -> Any:
        return _gradients(compute, needs, inputs, gradient)

    return _with_own_code(template, f"{compute.__name__}_gradients", compute)


def _of_sum(compute: Compute) -> Compute:
    """The function of two addends that returns the region's output and their sum."""

    def template(x: Tensor, y: Tensor, *extra: Any) -> tuple[Any, Tensor]:
        total = x + y
        return compute(total, *extra), total

    return _with_own_code(template, f"{compute.__name__}_of_sum", compute)


def _sum_gradients_of(compute: Compute) -> Compute:
    """The function of the gradients, where that of the first input is added to another."""

    def template(
        needs: Sequence[bool], inputs: Sequence[Any], gradient: Tensor, residual: Tensor
    ) -> Any:
        first, *extra_grads = _gradients(compute, needs, inputs, gradient)
        if not needs[0]:
            return first, *extra_grads
        # Operator by operator, into memory that is there: the gradient was made here.
        first = first + residual if torch.compiler.is_compiling() else first.add_(residual)
        return first, *extra_grads

    return _with_own_code(template, f"{compute.__name__}_sum_gradients", compute)


def _with_own_code(template: FunctionType, name: str, compute: Compute) -> Compute:
    """A function made from a region; `__wrapped__` is the region.

    It has code of its own: the compiler keeps its graphs by code, and looks at all of them at every
    call.
    """
    code = template.__code__.replace(co_name=name)
    function = FunctionType(code, globals(), name, None, template.__closure__)
    function.__wrapped__ = compute  # pyright: ignore[reportFunctionMemberAccess]
    return function


def _gradients(
    compute: Compute, needs: Sequence[bool], inputs: Sequence[Any], gradient: Tensor
) -> Sequence[Tensor]:
    """The gradients of the inputs that are wanted."""
    places = [index for index, need in enumerate(needs) if need]

    def of_wanted(*tensors: Tensor) -> Tensor:
        all_inputs = list(inputs)
        for position, tensor in zip(places, tensors, strict=True):
            all_inputs[position] = tensor
        return compute(*all_inputs)

    chosen = [inputs[index] for index in places]
    if torch.compiler.is_compiling():
        return torch.func.vjp(of_wanted, *chosen)[1](gradient)
    with torch.enable_grad():  # several times faster than vjp where each operator is a call
        leaves = [value.detach().requires_grad_() for value in chosen]
        return torch.autograd.grad(of_wanted(*leaves), leaves, gradient)


def is_fake(tensor: Tensor) -> bool:
    """Whether this has a size and no values; it stands for a tensor on a new GPU."""
    return tensor.is_meta
