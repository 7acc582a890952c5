"""The arithmetic of linears that read one input: forward, input gradient, weight gradients.

`parallel/tensor.py` puts collectives between these calls. `PlainMath` multiplies as torch
does; `model/fp8/linear.py` rounds the operands first.

A layout adds the same terms in another order: matmuls are split along their sums, have other sizes
and so other kernels; tokens, microbatches, heads, the vocabulary and the gradient norm are summed
in parts. `ReorderedSums` does the same to one process in forward and backward: it splits the sum of
every matmul, and rounds every other sum once, after adding in a wider type. The distance of that
run from the plain one is what rounding explains.

Legend: M tokens of this rank, N tokens that a matmul reads, I inputs, O outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Values = Sequence[Tensor]
Biases = Sequence[Tensor | None]


class GradientSink(Protocol):
    """Takes the gradients of weights."""

    def add_product(self, weight: Tensor, outputs_NO: Tensor, inputs_NI: Tensor) -> None:
        """Add outputsᵀ · inputs to the gradient of a weight."""

    def add_gradient(self, weight: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a weight."""


class Sent(NamedTuple):
    """An input or output gradient on its way to a matmul, before or after a gather. Codes in fp8
    have a maximum, and values may have one."""

    tensor: Tensor
    maximum: Tensor | None = None
    coded: bool = False

    def chunk(self, number: int, chunks: int) -> Sent:
        """One chunk of the tokens."""
        return self if chunks == 1 else self._replace(tensor=self.tensor.chunk(chunks)[number])


class LinearMath(Protocol):
    """`run`: tokens of one row that follow one another. `Any` is what the arithmetic itself made:
    operands of its matmuls."""

    def extra(self) -> Values:
        """Weights beside those of the linears, whose gradients `wgrads` computes too."""
        ...

    def quantize(
        self, x_MI: Tensor, gradient: bool, gathers: bool, maximum: Tensor | None = None
    ) -> Sent:
        """What a gather moves of an input, or of the gradient of one output; the maximum may be
        known from an earlier time."""
        ...

    def operands(self, sent: Sequence[Sent], run: int, gradient: bool, with_columns: bool) -> Any:
        """Operands: one input, or gradients of all outputs; `with_columns` if a weight gradient
        reads them as well."""
        ...

    def chunk(self, operands: Any, number: int, chunks: int) -> Any:
        """Operands of one chunk of the tokens."""
        ...

    def fprop(self, x: Any, weights: Values, biases: Biases, outs: Values | None) -> Values:
        """The outputs of some tokens, written to `outs` if given."""
        ...

    def dgrad(
        self, grads: Any, weights: Values, number: int, chunks: int, out: Tensor | None
    ) -> Tensor:
        """The input gradient of one chunk of the tokens."""
        ...

    def save(self, x: Any, sent: Sent, run: int) -> tuple[Values, Callable[[Values], Any]]:
        """Tensors to save for the weight gradients, and how these are read from them. `x` is None
        if it was read in chunks."""
        ...

    def wgrads(
        self, x: Any, grads: Any, weights: Sequence[Any], biases: Sequence[Any]
    ) -> Sequence[Callable[[GradientSink], None]]:
        """What computes the gradients of weights and biases."""
        ...


class PlainMath:
    """In the type of the weights."""

    def extra(self) -> Values:
        return ()

    def quantize(
        self, x_MI: Tensor, gradient: bool, gathers: bool, maximum: Tensor | None = None
    ) -> Sent:
        return Sent(x_MI)

    def operands(
        self, sent: Sequence[Sent], run: int, gradient: bool, with_columns: bool
    ) -> list[Tensor]:
        return [message.tensor for message in sent]

    def chunk(self, operands: list[Tensor], number: int, chunks: int) -> list[Tensor]:
        return [tensor.chunk(chunks)[number] for tensor in operands]

    def fprop(
        self, x: list[Tensor], weights: Values, biases: Biases, outs: Values | None
    ) -> Values:
        (x_NI,) = x
        outputs = outs or [x_NI.new_empty(len(x_NI), len(weight)) for weight in weights]
        for weight, bias, out in zip(weights, biases, outputs, strict=True):
            if bias is None:
                torch.mm(x_NI, weight.T, out=out)
            else:
                torch.addmm(bias, x_NI, weight.T, out=out)
        return outputs

    def dgrad(
        self, grads: list[Tensor], weights: Values, number: int, chunks: int, out: Tensor | None
    ) -> Tensor:
        """That of all linears, summed inside of the matmuls."""
        size = len(grads[0]) // chunks
        x_grad = grads[0].new_empty(size, weights[0].shape[1]) if out is None else out
        return add_products([grad.chunk(chunks)[number] for grad in grads], weights, x_grad, False)

    def save(self, x: Any, sent: Sent, run: int) -> tuple[Values, Callable[[Values], Any]]:
        return [sent.tensor], list

    def wgrads(
        self, x: list[Tensor], grads: list[Tensor], weights: Sequence[Any], biases: Sequence[Any]
    ) -> Sequence[Callable[[GradientSink], None]]:
        """One for each linear that learns, so that their memory is freed one by one."""
        triples = zip(weights, biases, grads, strict=True)
        return [partial(linear_work, *triple, x[0]) for triple in triples if learns(*triple[:2])]


def add_products(grads: Values, weights: Values, total: Tensor, begun: bool) -> Tensor:
    """The sum of gradient · weight over linears, on top of what is there if that was `begun`."""
    for index, (gradient, weight) in enumerate(zip(grads, weights, strict=True), start=begun):
        total.addmm_(gradient, weight, beta=min(index, 1))
    return total


def learns(*weights: Tensor | None) -> bool:
    """Whether any of these has a gradient."""
    return any(weight is not None and weight.requires_grad for weight in weights)


def linear_work(
    weight: Tensor, bias: Tensor | None, grad: Tensor, x: Tensor, sink: GradientSink
) -> None:
    """The gradients of a linear's weight and bias, unless they are frozen."""
    grad_NO = grad.reshape(-1, grad.shape[-1])
    if learns(weight):
        sink.add_product(weight, grad_NO, x.to(grad.dtype).reshape(-1, x.shape[-1]))
    if bias is not None and learns(bias):
        sink.add_gradient(bias, grad_NO.sum(0))


PLAIN = PlainMath()


_MATMULS = ("mm", "bmm", "addmm", "addmm_", "baddbmm", "_grouped_mm")
_SUMS = (
    *("sum", "mean", "linalg_vector_norm", "_foreach_norm", "scatter_add"),
    *("_softmax", "_safe_softmax", "_log_softmax", "nll_loss_forward"),
    *("_softmax_backward_data", "_log_softmax_backward_data", "embedding_dense_backward"),
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


class ReorderedSums(TorchDispatchMode):
    """While it is on, operators that sum do so in another order; nothing is compiled then. The sum
    of a matmul is split in two, after this share of its terms."""

    def __init__(self, share: float = 3 / 7) -> None:
        super().__init__()
        self.share = share

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name in _MATMULS:
            return _split_matmul(func, name, args, kwargs, self.share)
        return _wide(func, args, kwargs) if name in _SUMS else func(*args, **kwargs)


def _split_matmul(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], share: float
) -> Any:
    """A matmul whose sum is split in two, at no multiple of what kernels add in a row."""
    num_added = 1 if "add" in name else 0
    added, (a, b), options = args[:num_added], args[num_added:][:2], args[num_added + 2 :]
    cut = int(a.shape[-1] * share)
    cut -= cut % 8 if cut > 8 else 0  # kernels of GPUs want 16 bytes
    by_group = name == "_grouped_mm" and b.dim() == 2  # the sum is over the tokens of each expert
    if cut == 0 or by_group:
        return func(*args, **kwargs)
    first, second = (a[..., :cut], b[..., :cut, :]), (a[..., cut:], b[..., cut:, :])
    total = func(*added, *first, *options, **kwargs)
    if added:
        product = torch.bmm if a.dim() == 3 else torch.mm
        wide = {} if total.dtype == a.dtype else {"out_dtype": total.dtype}
        return total.add_(product(*second, **wide), alpha=kwargs.get("alpha", 1))
    other = {"out": torch.empty_like(total)} if "out" in kwargs else {}
    return total.add_(func(*second, *options, **{**kwargs, **other}))


def _wide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A sum of float32 that is added in float64, and rounded. Of narrower types the matmuls are
    enough: every operator rounds them far more coarsely than it adds."""
    if "out" in kwargs or kwargs.get("dtype") == torch.float64:
        return func(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if {tensor.dtype for tensor in tensors if tensor.is_floating_point()} != {torch.float32}:
        return func(*args, **kwargs)
    widen = partial(_cast, source=torch.float32, target=torch.float64)
    narrow = partial(_cast, source=torch.float64, target=torch.float32)
    wide_args, wide_kwargs = tree_map(widen, (args, dict(kwargs)))
    return tree_map(narrow, func(*wide_args, **wide_kwargs))


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """A tensor of one type in another, or that type itself among the arguments."""
    if isinstance(value, Tensor):
        return value.to(target) if value.dtype == source else value
    return target if value is source else value


# Low-rank adapters (LoRA) beside frozen linears: y + scale·B·(A·x).
#
# The plain model adds them by torch's own operators. `AdaptedMath` is the same as `LinearMath`, so
# that the collectives of a split linear serve its adapter too: A reads the input that was gathered
# for the linear, and B adds to the outputs before they are summed. What a backward needs of A·x is
# computed again: it takes rank · inputs multiplications for a token.
#
# Legend: N tokens, I inputs, O outputs of a linear, R rank; E experts, M rows of all of them.


class LowRank(nn.Module):
    """The two factors of an adapter, of one linear or of stacked experts."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = a, b, scale


def adapted_linear(adapter: LowRank, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, and the adapter."""
    return F.linear(x, weight, bias) + F.linear(F.linear(x, adapter.a), adapter.b) * adapter.scale


def adapted_grouped(
    adapter: LowRank, matmul: Callable[..., Tensor], x_MI: Tensor, weight: Tensor, ends_E: Tensor
) -> Tensor:
    """The matmuls of all experts, and their adapters by the same `matmul`."""
    low_MR = matmul(x_MI, adapter.a, ends_E) * adapter.scale
    return matmul(x_MI, weight, ends_E) + matmul(low_MR, adapter.b, ends_E)


class _OutputGradients(NamedTuple):
    """Gradients of all outputs, and what they are to the inner side of the adapters: these lie
    side by side, as the adapters follow one another."""

    of_outputs: list[Tensor]
    low_NR: Tensor


class AdaptedMath(PlainMath):
    """Linears of one input, of which some have an adapter. Passes over the tokens are what adapters
    cost: A of all of them is one matmul."""

    def __init__(self, adapters: Sequence[LowRank | None]) -> None:
        self.adapters = adapters
        self.present = [adapter for adapter in adapters if adapter is not None]
        self.ranks = [len(adapter.a) for adapter in self.present]

    def extra(self) -> Sequence[Tensor]:
        return [factor for adapter in self.present for factor in (adapter.a, adapter.b)]

    def fprop(
        self, x: list[Tensor], weights: Values, biases: Biases, outs: Values | None
    ) -> Values:
        (x_NI,) = x
        outputs = outs or [x_NI.new_empty(len(x_NI), len(weight)) for weight in weights]
        lows = iter((x_NI @ self._joined_a().T).split(self.ranks, dim=1))
        for adapter, weight, bias, out_NO in zip(
            self.adapters, weights, biases, outputs, strict=True
        ):
            if adapter is None:
                super().fprop(x, [weight], [bias], [out_NO])
                continue
            # The adapter first: the linear's matmul adds to it, which costs no pass of its own.
            start, beta = (out_NO, 0) if bias is None else (bias, 1)
            low = {"beta": beta, "alpha": adapter.scale, "out": out_NO}
            torch.addmm(start, next(lows), adapter.b.T, **low).addmm_(x_NI, weight.T)
        return outputs

    def operands(self, sent: Sequence[Sent], run: int, gradient: bool, with_columns: bool) -> Any:
        values = super().operands(sent, run, gradient, with_columns)
        if not gradient:
            return values
        low_NR = values[0].new_empty(len(values[0]), sum(self.ranks))
        triples = zip(
            self.present, self._of_adapters(values), low_NR.split(self.ranks, 1), strict=True
        )
        for adapter, grad_NO, low in triples:
            low.addmm_(grad_NO, adapter.b, beta=0, alpha=adapter.scale)
        return _OutputGradients(values, low_NR)

    def dgrad(
        self, grads: _OutputGradients, weights: Values, number: int, chunks: int, out: Tensor | None
    ) -> Tensor:
        low_NR, joined = grads.low_NR.chunk(chunks)[number], self._joined_a()
        x_grad = low_NR.new_empty(len(low_NR), joined.shape[1]) if out is None else out
        torch.mm(low_NR, joined, out=x_grad)
        parts = [grad.chunk(chunks)[number] for grad in grads.of_outputs]
        return add_products(parts, weights, x_grad, begun=True)

    def wgrads(
        self, x: list[Tensor], grads: _OutputGradients, weights: Sequence[Any], biases: Biases
    ) -> Sequence[Callable[[GradientSink], None]]:
        of_linears = super().wgrads(x, grads.of_outputs, weights, biases)
        return [*of_linears, partial(self._adapter_work, x[0], grads)]

    def _adapter_work(self, x_NI: Tensor, grads: _OutputGradients, sink: GradientSink) -> None:
        """The gradients of both factors of all adapters."""
        lows = (x_NI @ self._joined_a().T).split(self.ranks, dim=1)
        of_a = (grads.low_NR.T @ x_NI).split(self.ranks)
        outputs = self._of_adapters(grads.of_outputs)
        for adapter, grad_NO, low_NR, of_one in zip(self.present, outputs, lows, of_a, strict=True):
            sink.add_product(adapter.b, grad_NO, low_NR * adapter.scale)
            sink.add_gradient(adapter.a, of_one)

    def _of_adapters(self, of_linears: Values) -> Values:
        """Of what belongs to linears, what belongs to those with an adapter."""
        pairs = zip(self.adapters, of_linears, strict=True)
        return [value for adapter, value in pairs if adapter is not None]

    def _joined_a(self) -> Tensor:
        """A of all adapters, one below another."""
        parts = [adapter.a for adapter in self.present]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
