"""What the operators of a part of a model hold, one after the other.

The operators of a forward (`cost/layer/operator_list.py`) say what each makes, what it saves for
its backward, and whose gradient it gives. From that follows every allocation of the forward, of the
backward (autograd frees a gradient, and what was saved, once it is used), of recomputation, and of
input and weight gradients apart. The result is a list of events in order. Who reads it adds what
happens to weights and their gradients, which depends on their flat units.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fivefold.cost.layer.operator_list import Operator, OperatorList, TapeTensor

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
    given: bool
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
        found: OperatorList,
        again: Iterable[str] = (),
        full: bool = False,
        keeps_attention: bool = False,
    ) -> None:
        self.found, self.full, self.keeps_attention = found, full, keeps_attention
        modules = dict.fromkeys(one.module for one in found.operators)
        self.again = [""] if full else [each for each in modules if each and each in again]
        self.events: list[Event] = []
        self.users: Counter[TapeTensor] = Counter()  # of a tensor that is in memory
        self.asked: Counter[TapeTensor] = Counter()  # who will want a tensor that is made again
        self.held: dict[Operator, list[TapeTensor]] = {}  # by what an operator has saved
        self.entered: dict[str, list[TapeTensor]] = {}  # by what runs a module again
        self.plain: set[TapeTensor] = set()  # inside of a module that runs again, inputs are saved
        self.private: dict[Operator, float] = {}  # bytes that operators have saved besides
        self.once: set[Operator] = set()  # attention that has run, and does not run again
        self.owed: list[tuple[Operator, _Gradient]] = []

    def forward(self) -> list[Event]:
        """From its input on, which is counted here, to its output, which is not."""
        self.events = []
        self._count(self.found.input)
        self._run(self.found.operators, lambda one: self._module(one) not in self.again)
        self._drop(self.found.output.storage)
        self._drop(self.found.input.storage)
        return self.events

    def backward(self, way: Way) -> list[Event]:
        """The gradient of the output was made before; that of the input is left."""
        self.events, self.owed = [], []
        output = self.found.output
        grads = {output: _Gradient(output.gradient_bytes, output.logits)}
        left, block = set(self.again), None
        for one in reversed(self.found.operators):
            if one.block != block:
                self.events.append(BlockPass(one.block, True, False))
                block = one.block
            gradient, module = self._joined(grads, one), self._module(one)
            if module in left and one.saves:
                left.remove(module)
                self._repeat(module)
            self._differentiate(one, gradient, grads, way)
            if module in self.again and one is self._operators(module)[0]:
                for each in self.entered.pop(module):
                    self._drop(each)
        return self.events

    def _joined(self, grads: dict[TapeTensor, _Gradient], one: Operator) -> _Gradient:
        """The gradients of all outputs of an operator, which are freed together."""
        first, *more = [grads.pop(each) for each in one.outputs]
        if more:
            assert all(each.users == 1 for each in (first, *more)), "nobody else reads them"
            first.bytes += sum(each.bytes for each in more)
        return first

    def weight_gradients(self) -> list[Event]:
        """What the backward of input gradients has deferred."""
        self.events = []
        for one, gradient in self.owed:
            self._weights(one, one.settle_extra)
            self._forget(gradient)
            self._let_go(one)
        return self.events

    def _module(self, one: Operator) -> str:
        return "" if self.full else one.module

    def _operators(self, module: str) -> list[Operator]:
        return [one for one in self.found.operators if self._module(one) == module]

    def _run(self, operators: Sequence[Operator], saves: Callable[[Operator], bool]) -> None:
        uses = Counter(each.storage for one in operators for each in one.inputs)
        uses[operators[-1].output.storage] += 1
        self.users[operators[0].inputs[0].storage] += uses[operators[0].inputs[0].storage]
        ends = set({(one.block, one.module): one for one in operators}.values())
        named: defaultdict[tuple[int, str], list[TapeTensor]] = defaultdict(list)
        block = None
        for one in operators:
            if one.block != block:
                if block is not None:
                    self.events.append(BlockPass(block, False, True))
                self.events.append(BlockPass(one.block, False, False))
                block = one.block
            readers = {each: uses[each.storage] + each.named for each in one.outputs}
            self._make_once(one, {n: max(k, 1) for n, k in readers.items() if n.base is None})
            if one.collective:
                self.events.append(Pause())
            if saves(one):
                self._save(one)
            elif self._module(one) not in self.entered:
                self.entered[self._module(one)] = self._hold([one.inputs[0]])
            for each in (*one.inputs, *(each for each, n in readers.items() if not n)):
                self._drop(each.storage)
            named[one.block, one.module] += [each for each in one.outputs if each.named]
            for each in named.pop((one.block, one.module)) if one in ends else ():
                self._drop(each)  # names go with the last operator of their module
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
        self._run(operators, lambda one: True)
        self._drop(operators[-1].output.storage)
        if first.remade:
            self._drop(first)

    def _save(self, one: Operator) -> None:
        self.held[one] = self._hold(one.saved)
        if one.holds is not None and not one.holds.remade:
            self.held[one] += self._hold([one.holds])
        self.private[one] = one.keeps
        self._change(one.keeps)

    def _hold(self, tensors: Iterable[TapeTensor]) -> list[TapeTensor]:
        """Keep what these need, and note those that will be made again."""
        found: list[TapeTensor] = []
        for each in tensors:
            if each.remade and each not in self.plain:
                self.asked[each] += 1
            else:
                self.users[each.storage] += 1
                found.append(each.storage)
        return found

    def _take(self, tensor: TapeTensor) -> None:
        """A tensor that a backward reads: made again, where it was not saved."""
        if not self.asked[tensor]:
            return
        if not self.users[tensor]:
            source = tensor.source
            if source is not None and source.remade:
                self.asked[source] += 1
                self._take(source)
            self._make(tensor, 0)
            if source is not None and source.remade:
                self._drop(source)
            self.users[tensor] = self.asked[tensor]
        self.asked[tensor] -= 1

    def _differentiate(
        self,
        one: Operator,
        gradient: _Gradient,
        grads: dict[TapeTensor, _Gradient],
        way: Way,
    ) -> None:
        if one.collective:
            self.events.append(Pause())
        if one.passes:
            gradient.users += len(one.inputs)
            self._forget(gradient)
            for each in one.inputs:
                self._give(each, gradient, grads)
            return
        if one.early:  # given on, in the place of those that a backward makes
            self._let_go(one)
        made_again = [each for each in one.saved if each.remade and each not in self.plain]
        for each in made_again:
            self._take(each)
        if way == "queued" and not one.weights_last:
            self._weights(one, one.settle_extra)
        fresh = [_Gradient(each.gradient_bytes, each.logits) for each in one.inputs]
        operands = one.dequantised if way == "backward" else 0.0
        self._change(one.backward_extra + one.gathered + one.rounded)
        for each in fresh:
            self._change(each.bytes, each.logits)
        self._change(operands - one.rounded)
        if way == "backward":
            self.events += [WeightGradient(one.block, each, False) for each in one.weights]
        elif way == "queued" and one.weights_last:
            self._weights(one, one.settle_extra)
        self._change(-one.backward_extra - one.gathered - operands)
        if one.weights and way == "input":
            self._defer(one, gradient, made_again)
        else:
            self._forget(gradient)
            self._let_go(one)
            for each in made_again:
                self._drop(each)
        for each, its in zip(one.inputs, fresh, strict=True):
            self._give(each, its, grads)
        if way == "backward":
            self.events += [WeightGradient(one.block, each, True) for each in one.weights]

    def _defer(self, one: Operator, gradient: _Gradient, made_again: list[TapeTensor]) -> None:
        """What the weight gradients of an operator will need. What was gathered stands for what it
        was gathered from."""
        if one.gathers == "input":
            self._let_go(one)
            self.held[one], self.private[one] = [], 0.0
            for each in made_again:
                self._drop(each)
        else:
            self.held[one] += made_again
        if one.gathers == "gradient" or one.codes:
            self._forget(gradient)
            gradient = _Gradient(0.0)
        kept = one.defers + one.codes + (one.gathered if one.gathers else 0.0)
        self._change(kept - self.private[one])
        self.private[one] = kept
        self.owed.append((one, gradient))

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

    def _weights(self, one: Operator, extra: float) -> None:
        if one.codes and not one.dequantised:  # one matmul makes those of all linears
            for given in (False, True):
                self.events += [
                    WeightGradient(one.block, each, given, True) for each in one.weights
                ]
            return
        if one.dequantised:
            self._change(one.dequantised)
        for each in one.weights:
            self._extra(extra)
            self.events.append(WeightGradient(one.block, each, False))
            self.events.append(WeightGradient(one.block, each, True))
        if one.dequantised:
            self._change(-one.dequantised)

    def _let_go(self, one: Operator) -> None:
        for each in self.held.pop(one, ()):
            self._drop(each)
        self._change(-self.private.pop(one, 0.0))

    def _forget(self, gradient: _Gradient) -> None:
        gradient.users -= 1
        if not gradient.users:
            self._change(-gradient.bytes, gradient.logits)

    def _make_once(self, one: Operator, users: dict[TapeTensor, int]) -> None:
        """The outputs of one operator; of attention that is kept, only those of the first run."""
        if one.kept is None or not self.keeps_attention:
            self._make_all(users)
        elif one in self.once:
            self.once.remove(one)
            self.users.update({each: count - 1 for each, count in users.items()})
            self._change(-one.kept)
        else:
            self.once.add(one)
            self._make_all({each: count + 1 for each, count in users.items()})
            self._change(one.kept)

    def _make_all(self, users: dict[TapeTensor, int]) -> None:
        """The outputs of one operator, and what it holds besides until the last is made."""
        extra = sum(each.extra for each in users)
        self._change(extra)
        for each, count in users.items():
            self._count(each, count)
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

    def _extra(self, size: float) -> None:
        if size:
            self._change(size)
            self._change(-size)

    def _change(self, size: float, logits: bool = False) -> None:
        """One change for all that happens between events of other kinds."""
        if not size:
            return
        before = Change(0.0)
        if self.events and isinstance(self.events[-1], Change):
            before = self.events.pop()
            assert isinstance(before, Change)
        total, words = before.bytes + size, before.logits + size * logits
        peak = (total, words) if total > before.peak else (before.peak, before.peak_logits)
        self.events.append(Change(total, words, *peak))
