"""The data dimension: every stage of ZeRO, by one mechanism.

Splits   the weights of a flat unit (a block, or small ones joined) lie in one buffer, cut into a
         shard for each rank of the shard group (shard · cp). Stage 0 replicates everything; stage
         1 shards the optimizer states, stage 2 the gradients too, stage 3 the weights as well.
Moves    0: one all-reduce of the gradients a step. 1: one reduce-scatter a step, and one
         all-gather of the updated weights. 2: the same, but a reduce-scatter for every microbatch.
         3: an all-gather before forward and one before backward, and a reduce-scatter, for every
         microbatch; or, with the weights kept over a step, one all-gather a step. With
         replicas, the shards are all-reduced over them once a step.
Costs    2Ψ a step for stages 0 and 1, (1 + m)Ψ for stage 2, 3mΨ for stage 3 (m microbatches).
Wins     when the batch has sequences enough for every rank; the higher the stage, the less memory.
Refuses  never by itself: any module can be sharded, given its blocks.

Gradients are summed, never averaged: the loss is divided once, by the global number of tokens.
The reduction of a unit starts when its last gradient is there, and overlaps the rest of the
backward. Its gather is prefetched: while a block runs, all units of the next one are on their way,
dense and expert, or of as many blocks as the plan says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from fivefold.core import FivefoldError
from fivefold.core.layout import LocalWeight, Unit, pack, prefetched
from fivefold.parallel.mesh import Mesh, Phase
from fivefold.parallel.units import Fill, FlatUnit, OwnedShard, Places, UnitOptions, Use

_MOST_IN_FLIGHT = 2  # reductions whose full gradients are still in memory

Blocks = Mapping[str, Sequence[nn.Module]]
"""The modules of each block, in forward order."""


def shard(
    model: nn.Module, blocks: Blocks, mesh: Mesh, options: UnitOptions, bucket: int | None = None
) -> DataParallel:
    """Shard any module by its blocks; its weights keep their values and their names.

    Every parameter must belong to a block; `blocks` are in the order of the forward pass.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows: dict[str, LocalWeight] = {}
    for block, modules in blocks.items():
        for parameter in (weight for module in modules for weight in module.parameters()):
            name = names[id(parameter)]
            # A module of the user's has no table of roles.
            role = "matrix" if parameter.dim() > 1 else "bias"
            rows.setdefault(name, LocalWeight(name, block, tuple(parameter.shape), role=role))
    left = sorted(set(names.values()) - set(rows))
    if left:
        raise FivefoldError(f"{', '.join(left)} belong to no block: name the modules that use them")
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    itemsize = next(iter(values.values())).itemsize
    num_shards = mesh.size("fsdp") if options.zero else 1
    units = pack(list(rows.values()), num_shards, itemsize, bucket)
    return DataParallel(model, blocks, units, mesh, options, lambda row: values[row.name])


class DataParallel:
    """Flat units of one rank's model, their hooks, and the shards that the optimizer updates."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        units: Sequence[Unit],
        mesh: Mesh,
        options: UnitOptions,
        fill: Fill,
        phase: Phase | None = None,
    ) -> None:
        """The model may be on the meta device: its weights are made here, from `fill`."""
        self.mesh, self.options, self.phase = mesh, options, phase or Phase()
        self.last_microbatch = True
        self.in_flight: deque[FlatUnit] = deque()
        places, used = _places(model), _used(model, blocks)
        self.units: list[FlatUnit] = []
        for unit in units:
            names = {entry.row.name for entry in unit.entries}
            users = tuple(block for block in blocks if used[block] & names)
            use = Use(
                users,
                stays=options.backward_follows and users[-1] == list(blocks)[-1],
                read_in_backward=not options.without_weights >= set(users),
            )
            self.units.append(FlatUnit(unit, use, places, mesh, options, fill))
            self.units[-1].watch_gradients(self._ready)
        self.homes = {
            id(parameter): (unit, name)
            for unit in self.units
            for name, parameter in unit.parameters.items()
        }
        order = list(blocks)
        for index, (block, modules) in enumerate(blocks.items()):
            after = order[index + 1] if index + 1 < len(order) else None
            passed = [unit for unit in self.units if unit.use.blocks[0] == after]
            following, before = (
                [
                    self.units[number]
                    for number in prefetched(units, order, block, step, options.prefetch)
                ]
                for step in (+1, -1)
            )
            self._hook(block, modules, following)
            if block not in options.without_weights:
                self._hook_backward(block, modules, before, passed)

    @property
    def owned(self) -> list[OwnedShard]:
        """Shards that the optimizer of this rank updates, in the order of the model."""
        return [weight for unit in self.units if not unit.unit.frozen for weight in unit.owned]

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Context of the backward of one microbatch; `last` says whether the step ends with it."""
        with self.phase.in_backward(), self.collecting(last):
            yield
        self._release(self.units)

    @contextmanager
    def collecting(self, last: bool) -> Iterator[None]:
        """Context in which gradients of one microbatch are collected; `last` as in `backward`."""
        self.last_microbatch = last
        yield

    def add_gradient(self, weight: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a weight, past autograd."""
        unit, name = self.homes[id(weight)]
        unit.add(name, gradient)

    def add_product(self, weight: Tensor, outputs_NO: Tensor, inputs_NI: Tensor) -> None:
        """Add outputsᵀ · inputs to the gradient of a weight, past autograd."""
        unit, name = self.homes[id(weight)]
        unit.add_product(name, outputs_NO, inputs_NI)

    def finish(self) -> None:
        """Finish the reduction of all gradients after the last backward, for the optimizer."""
        for unit in self.units:
            unit.release()
            if unit.collects and not unit.sent_last:
                # Some weight got no gradient from the last microbatch: its share is zero.
                self._send(unit)
        while self.in_flight:
            self.in_flight.popleft().receive()
        for unit in self.units:
            unit.hand_over()

    def let_go(self) -> None:
        """Free gathered weights after forwards without a backward."""
        for unit in self.units:
            unit.release()

    def publish(self) -> None:
        """Start to gather the updated weights after the optimizer step."""
        for unit in self.units:
            unit.publish()

    def wait(self) -> None:
        """Wait until all updated weights are here; the next forward does this unit by unit."""
        for unit in self.units:
            unit.arrive()

    def _hook(self, block: str, modules: Sequence[nn.Module], following: list[FlatUnit]) -> None:
        """`following` are the units that are prefetched meanwhile."""
        needed = [unit for unit in self.units if block in unit.use.blocks]
        modules[0].register_forward_pre_hook(lambda *_: self._enter(needed, following))
        modules[-1].register_forward_hook(lambda *_: self._leave(block, needed))

    def _hook_backward(
        self,
        block: str,
        modules: Sequence[nn.Module],
        before: list[FlatUnit],
        passed: list[FlatUnit],
    ) -> None:
        """`before` are prefetched meanwhile; with `passed` a backward that comes here has done."""
        needed = [unit for unit in self.units if block in unit.use.blocks]

        def left(module: nn.Module, arguments: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: self._return(needed, before, passed))

        modules[-1].register_forward_hook(left)

    def _enter(self, units: list[FlatUnit], following: list[FlatUnit]) -> None:
        for unit in units:
            unit.gather()
        for unit in () if self.phase.backward else following:
            unit.gather()
        for unit in units:
            unit.arrive()

    def _leave(self, block: str, units: list[FlatUnit]) -> None:
        # A forward inside the backward is recomputation: its weights are needed at once.
        if not self.phase.backward:
            self._release(
                unit for unit in units if unit.use.blocks[-1] == block and not unit.use.stays
            )

    def _return(
        self, units: list[FlatUnit], before: list[FlatUnit], passed: list[FlatUnit]
    ) -> None:
        self._release(passed)
        for unit in (*units, *before):
            if unit.use.read_in_backward:
                unit.gather()
        for unit in units:
            unit.arrive()

    def _release(self, units: Iterable[FlatUnit]) -> None:
        if not self.options.keeps_weights:
            for unit in units:
                unit.release()

    def _ready(self, unit: FlatUnit) -> None:
        """All gradients of a unit are there for this microbatch."""
        if self.last_microbatch or unit.reduces_every_microbatch:
            self._send(unit)

    def _send(self, unit: FlatUnit) -> None:
        while len(self.in_flight) >= _MOST_IN_FLIGHT:
            self.in_flight.popleft().receive()
        if unit in self.in_flight:
            self.in_flight.remove(unit)
            unit.receive()
        unit.send(self.last_microbatch)
        self.in_flight.append(unit)


def _places(model: nn.Module) -> Places:
    """Every module and attribute that holds a weight, by the weight's first name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            places[names[id(parameter)]].append((module, attribute))
    return places


def _used(model: nn.Module, blocks: Blocks) -> dict[str, set[str]]:
    """The weights that each block uses; a tied one is used by two."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        block: {names[id(weight)] for module in modules for weight in module.parameters()}
        for block, modules in blocks.items()
    }
