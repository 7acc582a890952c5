"""What the operators of a part of a model hold, one after the other.

The operators of a forward (`cost/layer/operator_tape.py`) say what each makes, what it saves for
its backward, and whose gradient it gives. From that follows every allocation of the forward, of the
backward (autograd frees a gradient, and what was saved, once it is used), of recomputation, and of
input and weight gradients apart. The result is a list of events in order. Who reads it adds what
happens to weights and their gradients, which depends on their flat units.

The operators of a forward, and the tensors that they make, save and free.

An `OperatorList` is a value: `cost/layer/operators.py` writes it, `cost/layer/operator_tape.py`
plays it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Gathers = Literal["", "input", "gradient"]


@dataclass(eq=False)
class TapeTensor:
    """The result of an operator. A view has the memory of its `base`. One that is `remade` is not
    saved, but made again, from its `source` if that may be one as well."""

    bytes: float
    base: TapeTensor | None = None
    logits: bool = False
    remade: bool = False
    source: TapeTensor | None = None
    extra: float = 0.0  # bytes besides, while it is made
    named: bool = False  # a name holds it until the forward of its module ends
    gradient: float | None = None  # bytes of its gradient, if these are others
    adds: bool = False  # what made it takes the gradients of all who read it, and adds them

    @property
    def gradient_bytes(self) -> float:
        return self.bytes if self.gradient is None else self.gradient

    @property
    def storage(self) -> TapeTensor:
        return self if self.base is None else self.base.storage


@dataclass(eq=False)
class Operator:
    """`inputs` are those that get a gradient; a `passes` operator gives them that of its output."""

    inputs: tuple[TapeTensor, ...]
    output: TapeTensor
    saved: tuple[TapeTensor, ...] = ()
    weights: tuple[str, ...] = ()
    passes: bool = False
    holds: TapeTensor | None = None  # for those that make its output again
    backward_extra: float = 0.0  # bytes besides, while its backward runs
    settle_extra: float = 0.0  # and while its weight gradient does
    keeps: float = 0.0  # bytes that it saves besides
    defers: float = 0.0  # and what of that is left for its weight gradients
    early: bool = False  # they are its gradients, which its forward makes
    extra_outputs: tuple[TapeTensor, ...] = ()  # further outputs
    gathered: float = 0.0  # bytes of all tokens that its backward gathers
    gathers: Gathers = ""  # of what: deferred weight gradients need that, not this rank's tokens
    weights_last: bool = False  # its weight gradients come after those of its inputs
    codes: float = 0.0  # bytes that stand for the gradient of its outputs in deferred ones
    dequantised: float = 0.0  # bytes of operands that its weight gradients make from codes
    rounded: float = 0.0  # of weights, for the gradients of its inputs: gone before other gradients
    collective: bool = False  # it is one, or has some inside
    module: str = ""  # which may run again as a whole
    block: int = 0
    retains: float | None = None  # bytes beside outputs, of attention that may run once

    @property
    def saves(self) -> bool:
        """Whether its backward reads what its forward has saved: tensors, or codes of them."""
        return bool(self.saved or self.codes or self.dequantised)

    @property
    def outputs(self) -> tuple[TapeTensor, ...]:
        return (self.output, *self.extra_outputs)


@dataclass
class OperatorList:
    """The operators of a forward, in order."""

    input: TapeTensor
    operators: list[Operator] = field(default_factory=list[Operator])
    module: str = ""  # of the operators that follow
    block: int = 0
    rounds: bool = False  # linears of the layer that follows are rounded to fp8

    @property
    def output(self) -> TapeTensor:
        return self.operators[-1].output

    def begin(self, module: str, block: int, rounds: bool | None = None) -> None:
        """The operators that follow are of this module of a block; "" is the block itself."""
        self.module, self.block = module, block
        self.rounds = self.rounds if rounds is None else rounds

    def add(
        self,
        inputs: Sequence[TapeTensor],
        output: TapeTensor,
        saved: Sequence[TapeTensor] = (),
        weights: str | Sequence[str] = "",
        passes: bool = False,
        backward_extra: float = 0.0,
        settle_extra: float = 0.0,
        keeps: float = 0.0,
        defers: float = 0.0,
        holds: TapeTensor | None = None,
        collective: bool = False,
        early: bool = False,
        extra_outputs: Sequence[TapeTensor] = (),
        gathered: float = 0.0,
        gathers: Gathers = "",
        weights_last: bool = False,
        codes: float = 0.0,
        dequantised: float = 0.0,
        rounded: float = 0.0,
        retains: float | None = None,
    ) -> TapeTensor:
        """Append an operator; its output."""
        names = tuple(filter(None, [weights] if isinstance(weights, str) else weights))
        options = (names, passes, holds, backward_extra, settle_extra, keeps, defers, early)
        options = (
            *options,
            tuple(extra_outputs),
            gathered,
            gathers,
            weights_last,
            codes,
            dequantised,
            rounded,
            collective,
            self.module,
            self.block,
            retains,
        )
        self.operators.append(Operator(tuple(inputs), output, tuple(saved), *options))
        return output


Way = Literal["backward", "queued", "input"]
"""A backward by autograd, one whose weight gradients go past it, and one that defers them."""


class Change(NamedTuple):
    """So many bytes more, or fewer, and how many of them are logits. `peak` and `peak_logits` have
    been more before the end of it."""

    bytes: float
    logits: float = 0.0
    peak: float = 0.0
    peak_logits: float = 0.0


class WeightGradient(NamedTuple):
    """The gradients of the weights of a block whose names begin so: made, and then given. `apart`:
    as a tensor, and not inside of a sum."""

    block: int
    name: str
    is_final: bool
    apart: bool = False


class BlockPass(NamedTuple):
    """A pass comes to a block, or has left it."""

    block: int
    backward: bool
    left: bool


class Pause(NamedTuple):
    """A collective is under way; another action of the rank may go on."""


Event = Change | WeightGradient | BlockPass | Pause


@dataclass(eq=False)
class _Gradient:
    """A gradient, while somebody needs it."""

    bytes: float
    logits: bool = False
    users: int = 1


class OperatorTape:
    """Plays a list of operators: the forward first, then one backward. Modules in `again` run again
    in backward, each from its own input; with `full` the whole list does, with `keeps_attention`
    without attention itself."""

    def __init__(
        self,
        operator_list: OperatorList,
        again: Iterable[str] = (),
        full: bool = False,
        keeps_attention: bool = False,
    ) -> None:
        self.program, self.full, self.keeps_attention = operator_list, full, keeps_attention
        modules = dict.fromkeys(operator.module for operator in operator_list.operators)
        self.again = [""] if full else [module for module in modules if module and module in again]
        self.events: list[Event] = []
        self.users: Counter[TapeTensor] = Counter()  # of a tensor that is in memory
        self.readers: Counter[TapeTensor] = Counter()  # who will want a tensor that is made again
        self.saved: dict[Operator, list[TapeTensor]] = {}  # by what an operator has saved
        self.entered: dict[str, list[TapeTensor]] = {}  # by what runs a module again
        self.plain: set[TapeTensor] = set()  # inside of a module that runs again, inputs are saved
        self.private: dict[Operator, float] = {}  # bytes that operators have saved besides
        self.once: set[Operator] = set()  # attention that has run, and does not run again
        self.owed: list[tuple[Operator, _Gradient]] = []

    def forward(self) -> list[Event]:
        """From its input on, which is counted here, to its output, which is not."""
        self.events = []
        self._count(self.program.input)
        self._run(self.program.operators, lambda operator: self._module(operator) not in self.again)
        self._drop(self.program.output.storage)
        self._drop(self.program.input.storage)
        return self.events

    def backward(self, mode: Way) -> list[Event]:
        """The gradient of the output was made before; that of the input is left."""
        self.events, self.owed = [], []
        output = self.program.output
        grads = {output: _Gradient(output.gradient_bytes, output.logits)}
        left, block = set(self.again), None
        for operator in reversed(self.program.operators):
            if operator.block != block:
                self.events.append(BlockPass(operator.block, True, False))
                block = operator.block
            gradient, module = self._joined(grads, operator), self._module(operator)
            if module in left and operator.saves:
                left.remove(module)
                self._repeat(module)
            self._differentiate(operator, gradient, grads, mode)
            if module in self.again and operator is self._operators(module)[0]:
                for tensor in self.entered.pop(module):
                    self._drop(tensor)
        return self.events

    def _joined(self, grads: dict[TapeTensor, _Gradient], operator: Operator) -> _Gradient:
        """The gradients of all outputs of an operator, which are freed together."""
        first, *tail = [grads.pop(output) for output in operator.outputs]
        if tail:
            assert all(part.users == 1 for part in (first, *tail)), "nobody else reads them"
            first.bytes += sum(part.bytes for part in tail)
        return first

    def weight_gradients(self) -> list[Event]:
        """What the backward of input gradients has deferred."""
        self.events = []
        for operator, gradient in self.owed:
            self._weights(operator, operator.settle_extra)
            self._forget(gradient)
            self._let_go(operator)
        return self.events

    def _module(self, operator: Operator) -> str:
        return "" if self.full else operator.module

    def _operators(self, module: str) -> list[Operator]:
        return [operator for operator in self.program.operators if self._module(operator) == module]

    def _run(self, operators: Sequence[Operator], saves: Callable[[Operator], bool]) -> None:
        uses = Counter(source.storage for reader in operators for source in reader.inputs)
        uses[operators[-1].output.storage] += 1
        self.users[operators[0].inputs[0].storage] += uses[operators[0].inputs[0].storage]
        ends = set({(reader.block, reader.module): reader for reader in operators}.values())
        named: defaultdict[tuple[int, str], list[TapeTensor]] = defaultdict(list)
        block = None
        for operator in operators:
            if operator.block != block:
                if block is not None:
                    self.events.append(BlockPass(block, False, True))
                self.events.append(BlockPass(operator.block, False, False))
                block = operator.block
            readers = {output: uses[output.storage] + output.named for output in operator.outputs}
            self._make_once(operator, {n: max(k, 1) for n, k in readers.items() if n.base is None})
            if operator.collective:
                self.events.append(Pause())
            if saves(operator):
                self._save(operator)
            elif self._module(operator) not in self.entered:
                self.entered[self._module(operator)] = self._hold([operator.inputs[0]])
            for tensor in (*operator.inputs, *(output for output, n in readers.items() if not n)):
                self._drop(tensor.storage)
            named[operator.block, operator.module] += [
                output for output in operator.outputs if output.named
            ]
            for tensor in named.pop((operator.block, operator.module)) if operator in ends else ():
                self._drop(tensor)  # names go with the last operator of their module
        assert block is not None
        self.events.append(BlockPass(block, False, True))

    def _repeat(self, module: str) -> None:
        """Run a module again, up to the last operator that saves something."""
        operators = self._operators(module)
        first = operators[0].inputs[0]
        self._take(first)
        self.plain.add(first)
        while not operators[-1].saves:
            operators.pop()
        self._run(operators, lambda operator: True)
        self._drop(operators[-1].output.storage)
        if first.remade:
            self._drop(first)

    def _save(self, operator: Operator) -> None:
        self.saved[operator] = self._hold(operator.saved)
        if operator.holds is not None and not operator.holds.remade:
            self.saved[operator] += self._hold([operator.holds])
        self.private[operator] = operator.keeps
        self._change(operator.keeps)

    def _hold(self, tensors: Iterable[TapeTensor]) -> list[TapeTensor]:
        """Keep what these need, and note those that will be made again."""
        storages: list[TapeTensor] = []
        for tensor in tensors:
            if tensor.remade and tensor not in self.plain:
                self.readers[tensor] += 1
            else:
                self.users[tensor.storage] += 1
                storages.append(tensor.storage)
        return storages

    def _take(self, tensor: TapeTensor) -> None:
        """A tensor that a backward reads: made again, where it was not saved."""
        if not self.readers[tensor]:
            return
        if not self.users[tensor]:
            source = tensor.source
            if source is not None and source.remade:
                self.readers[source] += 1
                self._take(source)
            self._make(tensor, 0)
            if source is not None and source.remade:
                self._drop(source)
            self.users[tensor] = self.readers[tensor]
        self.readers[tensor] -= 1

    def _differentiate(
        self, operator: Operator, gradient: _Gradient, grads: dict[TapeTensor, _Gradient], mode: Way
    ) -> None:
        if operator.collective:
            self.events.append(Pause())
        if operator.passes:
            gradient.users += len(operator.inputs)
            self._forget(gradient)
            for tensor in operator.inputs:
                self._give(tensor, gradient, grads)
            return
        if operator.early:  # given on, in the place of those that a backward makes
            self._let_go(operator)
        made_again = [
            saved_tensor
            for saved_tensor in operator.saved
            if saved_tensor.remade and saved_tensor not in self.plain
        ]
        for tensor in made_again:
            self._take(tensor)
        if mode == "queued" and not operator.weights_last:
            self._weights(operator, operator.settle_extra)
        fresh = [
            _Gradient(input_tensor.gradient_bytes, input_tensor.logits)
            for input_tensor in operator.inputs
        ]
        operands = operator.dequantised if mode == "backward" else 0.0
        self._change(operator.backward_extra + operator.gathered + operator.rounded)
        for tensor in fresh:
            self._change(tensor.bytes, tensor.logits)
        self._change(operands - operator.rounded)
        if mode == "backward":
            self.events += [
                WeightGradient(operator.block, weight, False) for weight in operator.weights
            ]
        elif mode == "queued" and operator.weights_last:
            self._weights(operator, operator.settle_extra)
        self._change(-operator.backward_extra - operator.gathered - operands)
        if operator.weights and mode == "input":
            self._defer(operator, gradient, made_again)
        else:
            self._forget(gradient)
            self._let_go(operator)
            for tensor in made_again:
                self._drop(tensor)
        for tensor, its in zip(operator.inputs, fresh, strict=True):
            self._give(tensor, its, grads)
        if mode == "backward":
            self.events += [
                WeightGradient(operator.block, weight, True) for weight in operator.weights
            ]

    def _defer(self, operator: Operator, gradient: _Gradient, made_again: list[TapeTensor]) -> None:
        """What the weight gradients of an operator will need. What was gathered stands for what it
        was gathered from."""
        if operator.gathers == "input":
            self._let_go(operator)
            self.saved[operator], self.private[operator] = [], 0.0
            for tensor in made_again:
                self._drop(tensor)
        else:
            self.saved[operator] += made_again
        if operator.gathers == "gradient" or operator.codes:
            self._forget(gradient)
            gradient = _Gradient(0.0)
        num_bytes = (
            operator.defers + operator.codes + (operator.gathered if operator.gathers else 0.0)
        )
        self._change(num_bytes - self.private[operator])
        self.private[operator] = num_bytes
        self.owed.append((operator, gradient))

    def _give(
        self, tensor: TapeTensor, gradient: _Gradient, grads: dict[TapeTensor, _Gradient]
    ) -> None:
        """To what has made the tensor; a second gradient is added, as a third tensor."""
        if tensor in grads and tensor.adds:
            grads[tensor] = _Gradient(grads[tensor].bytes + gradient.bytes)
        elif tensor in grads:
            total = _Gradient(tensor.gradient_bytes, tensor.logits)
            self._change(total.bytes, total.logits)
            self._forget(grads[tensor])
            self._forget(gradient)
            grads[tensor] = total
        else:
            grads[tensor] = gradient

    def _weights(self, operator: Operator, extra: float) -> None:
        if operator.codes and not operator.dequantised:  # one matmul makes those of all linears
            for is_final in (False, True):
                self.events += [
                    WeightGradient(operator.block, weight_name, is_final, True)
                    for weight_name in operator.weights
                ]
            return
        if operator.dequantised:
            self._change(operator.dequantised)
        for weight in operator.weights:
            if extra:
                self._change(extra)
                self._change(-extra)
            self.events.append(WeightGradient(operator.block, weight, False))
            self.events.append(WeightGradient(operator.block, weight, True))
        if operator.dequantised:
            self._change(-operator.dequantised)

    def _let_go(self, operator: Operator) -> None:
        for tensor in self.saved.pop(operator, ()):
            self._drop(tensor)
        self._change(-self.private.pop(operator, 0.0))

    def _forget(self, gradient: _Gradient) -> None:
        gradient.users -= 1
        if not gradient.users:
            self._change(-gradient.bytes, gradient.logits)

    def _make_once(self, operator: Operator, users: dict[TapeTensor, int]) -> None:
        """The outputs of one operator; of attention that is kept, only those of the first run."""
        if operator.retains is None or not self.keeps_attention:
            self._make_all(users)
        elif operator in self.once:
            self.once.remove(operator)
            self.users.update({tensor: count - 1 for tensor, count in users.items()})
            self._change(-operator.retains)
        else:
            self.once.add(operator)
            self._make_all({tensor: count + 1 for tensor, count in users.items()})
            self._change(operator.retains)

    def _make_all(self, users: dict[TapeTensor, int]) -> None:
        """The outputs of one operator, and what it holds besides until the last is made."""
        extra = sum(output.extra for output in users)
        self._change(extra)
        for tensor, count in users.items():
            self._count(tensor, count)
        self._change(-extra)

    def _make(self, tensor: TapeTensor, users: int) -> None:
        self._change(tensor.extra)
        self._count(tensor, users)
        self._change(-tensor.extra)

    def _count(self, tensor: TapeTensor, users: int = 1) -> None:
        self.users[tensor] = users
        self._change(tensor.bytes, tensor.logits)

    def _drop(self, tensor: TapeTensor) -> None:
        self.users[tensor] -= 1
        if not self.users[tensor]:
            self._change(-tensor.bytes, tensor.logits)

    def _change(self, size: float, logits: bool = False) -> None:
        """One change for all that happens between events of other kinds."""
        if not size:
            return
        before = Change(0.0)
        if self.events and isinstance(self.events[-1], Change):
            before = self.events.pop()
            assert isinstance(before, Change)
        total, total_logits = before.bytes + size, before.logits + size * logits
        peak = (total, total_logits) if total > before.peak else (before.peak, before.peak_logits)
        self.events.append(Change(total, total_logits, *peak))
