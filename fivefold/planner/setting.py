"""What estimates assume, and the arguments of the cost functions that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fivefold.core import Machine
from fivefold.core.layout import UnitPolicy, planned_fp8
from fivefold.core.model import Shape, balance
from fivefold.core.plan import Plan, PlanOptions
from fivefold.cost import LayoutGrid, grid_of_plan
from fivefold.cost.hardware import NARROW_GRADIENTS, SoftwareStack

CostArguments = tuple[Shape, Machine, SoftwareStack, LayoutGrid, int, str, float]


@dataclass(frozen=True)
class EstimateSetting:
    """What estimates assume: the machine, the software, the precision and the free memory."""

    machine: Machine
    stack: SoftwareStack
    precision: str
    headroom: float = 0.05  # share of the memory that stays free
    imbalance: float = 1.0  # slots of the fullest expert over the mean

    def arguments(self, shape: Shape, grid: LayoutGrid, seq: int) -> CostArguments:
        """The arguments of cost functions, in their order."""
        return shape, self.machine, self.stack, grid, seq, self.precision, self.imbalance

    def with_keys(self, options: PlanOptions) -> EstimateSetting:
        """The same with the keys of a plan that change the software; other people's has none."""
        if not self.stack.runs_plans:
            return self
        units = UnitPolicy.of(options.grad_dtype, options.unit_size, options.prefetch)
        train, narrow = options.train, NARROW_GRADIENTS if units.grad_dtype == "bf16" else {}
        away = "" if train.offload_grads == "none" else "nvme" if train.grads_disk else "cpu"
        stack = replace(
            self.stack,
            unit_bytes=units.size,
            prefetch=units.prefetch,
            gather=options.gather or "",
            saves_gathered=options.tp_keep == "gathered",
            tp_overlap=options.tp_overlap,
            grads_home=away,
            memory=replace(self.stack.memory, moment_bytes=train.state_bytes),
            optimizer_bytes=self.stack.optimizer_bytes
            + 2 * (train.state_bytes - self.stack.memory.moment_bytes),
            orthogonalizes=train.optimizer_kind.full_matrices,
            frozen=train.lora > 0,
            lora_rank=train.lora,
            balance=balance.parse(options.balance),
            fp8=planned_fp8(self.precision, options),
            **narrow,
        )
        return replace(self, stack=stack)

    @property
    def capacity(self) -> float:
        """Bytes of a GPU that may be used."""
        return self.machine.memory * (1 - self.headroom)


def plan_arguments(plan: Plan, setting: EstimateSetting) -> CostArguments:
    """The arguments of cost functions for one plan."""
    grid = grid_of_plan(plan)
    return setting.with_keys(plan.options).arguments(plan.shape, grid, plan.batch.seq)
