"""Peak memory of the ranks of one plan: actions followed one by one, in the order in which the
schedule has them, with all that each of them makes and frees.

A search estimates with arrays (`cost/memory/categories.py`): closed forms of the moments that are
most often the peak.

What the actions of one stage do to the memory of its rank, byte by byte: activations by the tape
of its operators, weights and gradients by its flat units.

The first backwards of a step differ from later ones, which find gradients under way, and the last
one sends what ZeRO-1 has summed until then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import zip_longest

import numpy as np

from fivefold.core.layout import EXPERT_WEIGHT, Unit, gathered_as_codes, keeps_rounded
from fivefold.core.model import LayerKind, Recompute
from fivefold.core.plan import BLOCK_OF_STATES, ROUNDED_AT_ONCE, Plan
from fivefold.core.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Overlap,
    Step,
    actions_of,
    defers_weight_gradients,
    turns_of,
)
from fivefold.cost.layer import (
    BlockPass,
    Change,
    Event,
    LayerOperators,
    MixerOperators,
    OperatorList,
    OperatorTape,
    Pause,
    RoundedOperators,
)
from fivefold.cost.memory.activations import WIDE
from fivefold.cost.memory.categories import MUON_STATE, MemoryEntries
from fivefold.cost.memory.stage_gradients import sums_of_copies
from fivefold.cost.memory.unit_ledger import (
    ACTIVATIONS,
    DataRules,
    Given,
    Held,
    JoinedStep,
    SegmentUse,
    Slice,
    UnitLedger,
    UnitTable,
    nothing,
    segment_steps,
)
from fivefold.cost.traffic import is_muon_weight, units_of

FINISH = "finish"
REPLAYED = 2  # actions of those that repeat: what one of them begins has ended by then


@dataclass(frozen=True)
class Segment:
    """Blocks by name, and their events by the kind of an action."""

    blocks: tuple[str, ...]
    events: Mapping[str, Sequence[Event]]


@dataclass(frozen=True)
class ActionBytes:
    """Bytes by category: what an action adds at its peak, and what it leaves."""

    at_peak: Held
    left: Held
    peak: float
    change: float
    slices: Sequence[Slice] = ()


class StageLedger:
    """One kind of stage: its segments in forward order, its units, and what its actions add and
    leave. `carried` bytes go from stage to stage, `tables` stay from forward to backward. Actions
    are `sliced` if two of them take turns."""

    def __init__(
        self,
        segments: Sequence[Segment],
        units: Sequence[Unit],
        rules: DataRules,
        carried: float,
        tables: float,
        sliced: bool,
        known_steps: dict[Hashable, list[JoinedStep]],
    ) -> None:
        self.sliced = sliced
        self.segments, self.packed = segments, units
        self.carried, self.tables = carried, tables
        blocks = [*dict.fromkeys(block for segment in segments for block in segment.blocks)]
        self.table = UnitTable(units, blocks, rules)
        self.sizes = self.table.gradient_sizes()
        self.known: dict[tuple[str, int, bool], ActionBytes] = {}
        self.sums_every_time = any(self.table.sums_every_time)
        self.units = [self.table.segment_units(segment.blocks) for segment in segments]
        self.kinds = self._kinds()
        blocks_of = [segment.blocks for segment in segments]
        self.first = {names: index for index, names in reversed([*enumerate(blocks_of)])}
        self.final = {names: index for index, names in enumerate(blocks_of)}
        self.known_steps = known_steps
        self.steps: dict[tuple[int, str], list[JoinedStep]] = {}

    def _kinds(self) -> list[Hashable]:
        """Segments with equal events and an equal kind have equal steps."""
        kinds: list[Hashable] = []
        for segment in self.segments:
            counts = tuple(map(self.table.entry_counts, segment.blocks))
            kinds.append(self.table.weights_of(segment.blocks) if None in counts else counts)
        return kinds

    def steps_of(self, index: int, kind: str) -> list[JoinedStep]:
        """Of one segment in an action of this kind; equal segments share them."""
        if (index, kind) not in self.steps:
            segment, own, passes = self.segments[index], self.kinds[index], any(self.table.sheds)
            # A backward comes to the last segment with the same blocks first.
            blocks = self.segments[index].blocks
            use = SegmentUse(waits=index != self.first[blocks], waited=index != self.final[blocks])
            key = (id(segment.events[kind]), own, self.sizes, use, passes)
            if key not in self.known_steps:
                gives_rest = kind in (BACKWARD, WEIGHT_GRAD)
                weights = self.table.weights_of(segment.blocks)
                self.known_steps[key] = segment_steps(
                    segment.events[kind], weights, self.sizes, use, gives_rest, passes
                )
            self.steps[index, kind] = self.known_steps[key]
        return self.steps[index, kind]


class StageRun:
    """The actions of one stage in a step. Stages of a kind do the same, so each action is played
    once; `behind` and `latest` are those that this stage has not played itself."""

    def __init__(self, ledger: StageLedger) -> None:
        self.ledger, self.segments = ledger, ledger.segments
        self.units = UnitLedger(ledger.table, ledger.sliced)
        self.counts = Counter[str]()
        self.behind: list[tuple[str, bool]] = []
        self.latest: deque[tuple[str, bool]] = deque(maxlen=REPLAYED)  # of those that repeat
        self.settled: dict[str, ActionBytes] = {}  # what every further action of a kind does

    def is_steady(self, kind: str) -> bool:
        """Whether the next action of a kind, and all after it but the last, do the same."""
        counted, steady = self._counted(kind)
        return self.counts[counted] + 1 >= steady

    def _counted(self, kind: str) -> tuple[str, int]:
        """As what an action is counted, and from which one on all are alike."""
        gives = kind in (BACKWARD, WEIGHT_GRAD)
        return "gradients" if gives else kind, 3 if gives and self.ledger.sums_every_time else 2

    def repeat(self, kind: str) -> None:
        """The same again."""
        self.latest.append((kind, False))

    def act(self, kind: str, last: bool) -> ActionBytes:
        """The next action; `last`: no gradient of the step comes after it."""
        if not last and kind in self.settled:
            self.latest.append((kind, False))
            return self.settled[kind]
        counted, steady = self._counted(kind)
        self.counts[counted] += 1
        key = (kind, min(self.counts[counted], steady), last)
        known = self.ledger.known
        if key in known:
            begins = self.counts[counted] <= steady or last
            (self.behind if begins else self.latest).append((kind, last))
            if not begins:
                self.settled[kind] = known[key]
            return known[key]
        for before in (*self.behind, *self.latest):
            self._play(*before)
        self.behind.clear()
        self.latest.clear()
        known[key] = self._play(kind, last)
        return known[key]

    def finish(self) -> ActionBytes:
        """After the last action: what is under way arrives."""
        return self.act(FINISH, True)

    def _play(self, kind: str, last: bool) -> ActionBytes:
        self.units.begin(last, kind != FORWARD)
        if kind == FORWARD:
            self._forward()
        elif kind == WEIGHT_GRAD:
            for index in reversed(range(len(self.segments))):
                self._read(index, WEIGHT_GRAD)
        elif kind == FINISH:
            self.units.finish()
        else:
            self._backward(kind)
        units = self.units
        units.pause()
        return ActionBytes(units.at_peak, units.level, units.peak, units.total, units.slices)

    def _forward(self) -> None:
        self.units.change(self.ledger.tables, ACTIVATIONS)
        for index in range(len(self.segments)):
            self._read(index, FORWARD)
        if self.segments[-1].blocks != ("head",):
            self.units.change(self.ledger.carried, ACTIVATIONS)
            self.units.change(-self.ledger.carried, ACTIVATIONS)

    def _backward(self, kind: str) -> None:
        if self.segments[-1].blocks != ("head",):
            self.units.change(self.ledger.carried, ACTIVATIONS)
        for index in reversed(range(len(self.segments))):
            self._read(index, kind)
        if self.segments[0].blocks != ("embed",):
            self.units.change(-self.ledger.carried, ACTIVATIONS)
        self.units.change(-self.ledger.tables, ACTIVATIONS)
        self.units.end_backward()

    def _read(self, index: int, kind: str) -> None:
        units, blocks = self.units, self.segments[index].blocks
        numbers = self.ledger.units[index]
        for step in self.ledger.steps_of(index, kind):
            if isinstance(step, Change):
                units.pass_through(step)
            elif isinstance(step, Given):
                units.give(numbers[step.unit], step.weights)
            elif isinstance(step, BlockPass):
                self._pass(blocks[step.block], step)
            elif isinstance(step, Pause):
                units.pause()
            else:
                units.keep(blocks[step.block], step.name, step.bytes)

    def _pass(self, block: str, event: BlockPass) -> None:
        if event.backward:
            self.units.come_back(block)
        elif event.left:
            self.units.leave(block)
        else:
            self.units.enter(block)


# Bytes of an element while a state is rounded: random bits, the sum, its upper half, the choice
# between that and what is not finite, and the result.
ROUNDING = 4 * WIDE + 2
MESSAGES = 2  # that are received while others are computed with


ActionEvents = Mapping[str, Sequence[Event]]
KnownEvents = dict[Hashable, ActionEvents]
KnownPairs = dict[tuple[int, int], ActionBytes]


@lru_cache(maxsize=32)  # many plans of a search have the same layers
def _known_tapes(
    operators: Hashable,
) -> tuple[KnownEvents, dict[Hashable, list[JoinedStep]]]:
    """What is known of layers with these operators: events, and the steps of segments."""
    return {}, {}


class PlanLedger:
    """The stages of a plan, by kind, and what its ranks hold at most."""

    def __init__(self, plan: Plan, entries: MemoryEntries) -> None:
        self.plan, self.entries, self.itemsize = plan, entries, entries.itemsize
        self.queued = defers_weight_gradients(plan.schedule)
        different = {steps for _, steps in turns_of(plan.schedule, 0)}
        paired = any(isinstance(step, Overlap) for steps in different for step in steps)
        self.in_turns = paired and plan.layout.stage_size > 1  # collectives hide each other
        tokens = float(np.asarray(entries.tokens).reshape(-1)[0])
        visits = 1 if plan.split.gathers else plan.split.outer
        reorders = plan.batch.microbatch_size > 1 or plan.options.tp_overlap > 1
        options = (plan.saves_input_shards, self.queued, reorders)
        job = (entries.activations, tokens, visits, *options)
        kind = LayerOperators if plan.shape.of_mixer.own_mixer is None else MixerOperators
        self.operators, self.fp8 = kind(*job), entries.stack.fp8
        self.rounding = {False: self.operators, True: self.operators}  # by whether weights stay so
        if self.fp8 is not None:
            size = (self.itemsize, self.itemsize * tokens)
            self.rounding = {
                keeps_weights: LayerOperators(
                    *job, RoundedOperators(self.fp8, keeps_weights, *size)
                )
                for keeps_weights in (False, True)
            }
        self.kinds: dict[Hashable, StageLedger] = {}
        self.pairs: KnownPairs = {}

    def peak(self, rank: int) -> dict[str, float]:
        """By category, of one pipeline rank."""
        stages = {n: self._stage(n) for n in self.plan.schedule.placement.stages_of(rank)}
        units = [unit for stage in stages.values() for unit in stage.packed]
        rounded = sum(self._rounded_weights(n, stage.packed) for n, stage in stages.items())
        runs = {n: StageRun(stage) for n, stage in stages.items()}
        walk = _RankWalk(runs, self.pairs if self.in_turns else None)
        walk.follow(list(turns_of(self.plan.schedule, rank)))
        walk.end(self._update(units))
        categories = {**self._states(units), **walk.at_peak()}
        categories["weights"] += rounded
        if self.plan.layout.pp > 1:
            categories["buffers"] = MESSAGES * self.operators.residual
        return categories

    def _stage(self, stage: int) -> StageLedger:
        """Equal stages share what is known of them."""
        plan, shape, layers = self.plan, self.plan.shape, self.plan.stages[stage]
        ends, rule = (layers.start == 0, layers.stop == shape.layers), plan.recompute.of(stage)
        keeps = not plan.gathers_each_time(layers)
        rounds = tuple(map(self._rounds, layers))
        key = (*ends, rule, keeps, *map(self._kind, layers), *rounds)
        if key not in self.kinds:
            operators = self.rounding[keeps_rounded(plan.layout, keeps)]
            tables = self.entries.activations.rotary_tables() * self.operators.tokens
            self.kinds[key] = StageLedger(
                list(self._segments(layers, rule, operators)),
                units_of(plan, stage, self.itemsize),
                self._rules(layers, keeps),
                self.operators.residual,
                tables,
                self.in_turns,
                _known_tapes(operators.key)[1],
            )
        return self.kinds[key]

    def _kind(self, layer: int) -> LayerKind:
        """A window changes no bytes."""
        return self.plan.shape.layer_kind(layer)._replace(full_attention=True)

    def _rounds(self, layer: int) -> bool:
        return self.fp8 is not None and self.fp8.rounds(layer, self.plan.shape.layers)

    def _rules(self, layers: range, keeps: bool) -> DataRules:
        plan, layout = self.plan, self.plan.layout
        return DataRules(
            layout.zero,
            self.itemsize,
            plan.units.grad_itemsize(self.itemsize),
            dense_ranks=layout.dp * layout.cp,
            expert_ranks=layout.edp,
            keeps_weights=keeps,
            kept_to_backward=layout.pp == 1,
            prefetch=plan.units.prefetch,
            leaves=bool(self.entries.stack.grads_home),
            tied=plan.shape.tied and len(layers) == plan.shape.layers,
            queued=self.queued,
            coded=gathered_as_codes(plan.shape, self.fp8),
        )

    def _segments(
        self, layers: range, rule: Recompute, operators: LayerOperators
    ) -> Iterator[Segment]:
        shape = self.plan.shape
        known = _known_tapes(operators.key)[0]
        if layers.start == 0:
            yield Segment(("embed",), self._events(known, "embed", operators.embedding))
        size = rule.blocks or 1
        for start in range(layers.start, layers.stop, size):
            indices = range(start, min(start + size, layers.stop))
            kind = (tuple(map(self._kind, indices)), rule, tuple(map(self._rounds, indices)))
            events = self._events(known, kind, partial(operators.blocks, *kind), rule)
            yield Segment(tuple(f"blocks.{i}" for i in indices), events)
        if layers.stop == shape.layers:
            head = self._head(known, operators)
            yield Segment(("head",), head)
            for depth in range(shape.mtp):
                last = shape.layers
                kind = ((self._kind(last),), rule, (self._rounds(last),))
                ahead = partial(operators.blocks, *kind, joins=True)
                if layers.start == 0:  # the embedding's first gradient waits for its last one
                    yield Segment(("embed",), self._events(known, "embed", operators.embedding))
                yield Segment((f"mtp.{depth}",), self._events(known, ("mtp", *kind), ahead, rule))
                yield Segment(("head",), head)

    def _head(self, known: KnownEvents, operators: LayerOperators) -> ActionEvents:
        losses, memory = self.entries.losses, self.entries.memory
        if losses.chunked.all() and not self.queued:
            loss_bytes = (losses.computed(), losses.gradients())
            sizes = tuple(float(array.item()) for array in loss_bytes)
            return self._events(known, ("head", *sizes), partial(operators.head_in_chunks, *sizes))
        split = self.plan.layout.tp > 1 and memory.split_logits_bytes
        logits = split or memory.logits_bytes
        return self._events(known, ("head", logits), partial(operators.head, logits))

    def _events(
        self,
        known: KnownEvents,
        key: Hashable,
        find: Callable[[], OperatorList],
        rule: Recompute | None = None,
    ) -> ActionEvents:
        """Of every kind of action."""
        if key in known:
            return known[key]
        rule = rule or Recompute()
        make = partial(OperatorTape, find(), rule.modules, rule.full, rule.keeps_attention)
        tape = make()
        events = {FORWARD: tape.forward()}
        events[BACKWARD] = tape.backward("queued" if self.queued else "backward")
        if self.queued:
            tape = make()
            tape.forward()
            events[INPUT_GRAD] = tape.backward("input")
            events[WEIGHT_GRAD] = tape.weight_gradients()
        known[key] = events
        return events

    def _states(self, units: Sequence[Unit]) -> Held:
        """Weights between their uses, float32 copies and optimizer states."""
        layout, memory = self.plan.layout, self.entries.memory
        offloads = self.plan.options.train.offload_kind != "none"
        states: Held = {"weights": 0.0, "master": 0.0, "optimizer": 0.0}
        for unit in units:
            sheds = layout.zero == 3 and unit.num_shards > 1
            size = unit.shard_size if sheds else unit.size
            states["weights"] += 0 if sheds and offloads else size * self.itemsize
            if offloads:
                continue
            states["master"] += unit.shard_size * self.entries.master_bytes
            narrow = 0
            if self.entries.stack.orthogonalizes:
                rows = (entry.row for entry in unit.entries)
                narrow = sum(row.numel for row in rows if is_muon_weight(row)) // unit.num_shards
            states["optimizer"] += (unit.shard_size - narrow) * memory.moment_bytes
            states["optimizer"] += narrow * MUON_STATE
        return states

    def _rounded_weights(self, stage: int, units: Sequence[Unit]) -> float:
        """Weights in fp8, in both orders: from their first use on, and over the update."""
        plan, layers = self.plan, self.plan.stages[stage]
        if self.fp8 is None or not keeps_rounded(plan.layout, not plan.gathers_each_time(layers)):
            return 0.0
        rows, layers = [entry.row for unit in units for entry in unit.entries], plan.shape.layers
        linears = (row.numel for row in rows if self.fp8.rounds_weight(row.name, layers))
        routed = (row.numel for row in rows if self.fp8.rounds_expert_weight(row.name, layers))
        return self.fp8.weight_bytes * sum(linears) + EXPERT_WEIGHT * sum(routed)

    def _update(self, units: Sequence[Unit]) -> float:
        """Bytes besides, after the last action. Mirrored stages sum all gradients, in float32. An
        update by blocks widens narrow gradients and states, and clips copies of them where its
        kernel does not clip as it reads; narrow states are rounded in pieces. SGD adds a decayed
        weight to its gradient, and an optimizer of a user is assumed to have as much."""
        plan, memory, kind = self.plan, self.entries.memory, self.plan.options.train.optimizer_kind
        size = plan.units.grad_itemsize(self.itemsize)
        owned, peak = sum(unit.shard_size for unit in units), 0.0
        largest = max(entry.row.numel / unit.num_shards for unit in units for entry in unit.entries)
        if plan.schedule.placement.mirrored:
            peak = sums_of_copies(float(owned), size)
        narrow = plan.options.train.states == "bf16"
        if size < WIDE or narrow:
            block = BLOCK_OF_STATES / max(memory.moment_bytes + self.entries.master_bytes, 1)
            most = (WIDE if size < WIDE else 0) + (2 * memory.moment_bytes if narrow else 0)
            if not kind.scales:
                most += WIDE
            rounded = min(largest, ROUNDED_AT_ONCE) * ROUNDING if narrow else 0.0
            return max(peak, min(owned, block) * most + rounded)
        if not kind.scales and not kind.full_matrices:
            return max(peak, largest * WIDE)
        return peak


class _RankWalk:
    """Follows the actions of one rank. `pairs`: known ones, if two actions that are one step change
    at collectives; the ranks of a plan share them."""

    def __init__(self, stages: Mapping[int, StageRun], pairs: KnownPairs | None) -> None:
        self.stages, self.pairs = stages, pairs
        self.total = self.most = 0.0
        self.parts: list[tuple[int, Sequence[ActionBytes]]] = []  # how often they have run
        self.where = (0, 0, 0)  # the peak: in which part, turn and action

    def follow(self, parts: Sequence[tuple[int, tuple[Step, ...]]]) -> None:
        """Steps in parts that repeat. Turns after which nothing is new are one."""
        last, alike = self._last(parts), dict[int, list[tuple[Action, ...]]]()
        steady: dict[int, list[ActionBytes]] = {}
        for number, (times, steps) in enumerate(parts):
            which, ends, left = id(steps), last.get(number, {}), times
            if which not in alike:
                alike[which] = [*map(actions_of, steps)]
            actions = alike[which]
            while left:
                ending = bool(ends) and left == 1
                turn_actions = None if ending else steady.get(which)
                again = count = left - bool(ends)
                if turn_actions is None:
                    new = ending or not self._is_steady(actions)
                    count = 1 if new else count
                    turn_actions, again = self._turn(actions, ends if ending else {}), count - 1
                    if not new:
                        steady[which] = turn_actions
                self._repeat(actions, again)
                self._add(turn_actions, count)
                left -= count

    def _last(
        self, parts: Sequence[tuple[int, tuple[Step, ...]]]
    ) -> dict[int, dict[int, tuple[int, str]]]:
        """Parts with the last gradient of a stage: by stage its place there, and its kind."""
        ends: dict[int, dict[int, tuple[int, str]]] = {}
        missing = set(self.stages)
        for number in reversed(range(len(parts))):
            steps = parts[number][1]
            for index in reversed(range(len(steps))):
                for stage, kind, _ in actions_of(steps[index]):
                    if stage in missing and kind in (BACKWARD, WEIGHT_GRAD):
                        missing.remove(stage)
                        ends.setdefault(number, {})[stage] = index, kind
            if not missing:
                break
        return ends

    def _is_steady(self, actions: Sequence[tuple[Action, ...]]) -> bool:
        return all(self.stages[n].is_steady(kind) for step in actions for n, kind, _ in step)

    def _turn(
        self, actions: Sequence[tuple[Action, ...]], ends: dict[int, tuple[int, str]]
    ) -> list[ActionBytes]:
        results: list[ActionBytes] = []
        for index, step in enumerate(actions):
            if len(step) == 1:
                n, kind, _ = step[0]
                results.append(self.stages[n].act(kind, ends.get(n) == (index, kind)))
                continue
            pair = [self.stages[n].act(kind, ends.get(n) == (index, kind)) for n, kind, _ in step]
            if self.pairs is None:
                results += pair
                continue
            key = id(pair[0]), id(pair[1])  # of what ledgers know, as long as the plan is followed
            if key not in self.pairs:
                self.pairs[key] = _in_turns(*pair)
            results.append(self.pairs[key])
        return results

    def _repeat(self, actions: Sequence[tuple[Action, ...]], times: int) -> None:
        """The same turn again; only the last ones matter to those that follow."""
        for _ in range(min(times, REPLAYED)):
            for step in actions:
                for n, kind, _ in step:
                    self.stages[n].repeat(kind)

    def end(self, besides: float) -> None:
        """After the last action."""
        self._add([run.finish() for run in self.stages.values()], 1)
        update = {**nothing(), ACTIVATIONS: besides}
        self._add([ActionBytes(update, nothing(), besides, 0.0)], 1)

    def at_peak(self) -> Held:
        """By category."""
        part, turn, index = self.where
        sizes, runs = dict(self.parts[part][1][index].at_peak), Counter[int]()
        actions = {
            id(action_bytes): action_bytes
            for _, part_actions in self.parts[: part + 1]
            for action_bytes in part_actions
        }
        for number, (times, turn_actions) in enumerate(self.parts[: part + 1]):
            for order, action in enumerate(turn_actions):
                runs[id(action)] += times if number < part else turn + (order < index)
        for which, count in runs.items():
            for name, size in actions[which].left.items():
                sizes[name] += count * size
        return sizes

    def _add(self, actions: Sequence[ActionBytes], times: int) -> None:
        """Every turn changes the level by as much, so the first or the last one has the peak."""
        change = sum(action_bytes.change for action_bytes in actions)
        for turn in {0, times - 1} if change > 0 else {0}:
            total = self.total + turn * change
            for index, action in enumerate(actions):
                if total + action.peak > self.most:
                    self.most, self.where = total + action.peak, (len(self.parts), turn, index)
                total += action.change
        self.parts.append((times, actions))
        self.total += times * change


def _in_turns(forward: ActionBytes, backward: ActionBytes) -> ActionBytes:
    """Both as one step; the backward begins, and each goes on where the other one pauses."""
    first = other = Slice(0.0, nothing(), 0.0, nothing())
    best, peak = (first.left, other.left), 0.0
    for ahead, behind in zip_longest(backward.slices, forward.slices):
        if ahead is not None:
            first = ahead
            if first.peak + other.change > peak:
                peak, best = first.peak + other.change, (first.at_peak, other.left)
        if behind is not None:
            other = behind
            if other.peak + first.change > peak:
                peak, best = other.peak + first.change, (other.at_peak, first.left)
    change = forward.change + backward.change
    return ActionBytes(_sum(*best), _sum(forward.left, backward.left), peak, change)


def _sum(first: Held, other: Held) -> Held:
    return {name: size + other[name] for name, size in first.items()}
