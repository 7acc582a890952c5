"""What estimates assume, and the arguments of the cost functions that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fivefold.core import RUNTIME_PRECISIONS, Machine
from fivefold.core.layout import UnitPolicy, planned_fp8
from fivefold.core.model import Shape, balance
from fivefold.core.plan import Plan, PlanOptions
from fivefold.cost import LayoutGrid, grid_of_plan
from fivefold.cost.hardware import BY_KERNELS, NARROW_GRADIENTS, OUR_OWN, SoftwareStack, load_preset

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


def estimate_setting(
    machine: Machine,
    precision: str,
    headroom: float,
    kernels: str,
    imbalance: float,
    stack_name: str | None = None,
) -> tuple[EstimateSetting, list[str]]:
    """How the job is estimated; a precision that the chip lacks is replaced, with a note.

    `stack_name`: other people's software, a preset or a file, in place of our own.
    """
    known = machine.peaks.known()
    if "nvfp4" in known:  # both came with Blackwell
        known = {**known, "mxfp8": machine.peak("mxfp8")}
    stack, notes = BY_KERNELS[kernels], list[str]()
    if stack_name not in (None, OUR_OWN):
        preset = load_preset(stack_name)
        stack = preset.stack
        notes.append(
            f"priced as {stack.name} would run it, not fivefold: {preset.what}. A written plan has "
            "the layout, the schedule and the batch; train and rehearse run fivefold's own software"
        )
    if precision in known:
        return EstimateSetting(machine, stack, precision, headroom, imbalance), notes
    if precision not in RUNTIME_PRECISIONS:
        machine.peak(precision)  # raises an error that lists the precisions of the chip
    other = next((name for name in RUNTIME_PRECISIONS if name in known), next(iter(known)))
    note = f"{machine.name} has no {precision} units: estimated in {other}"
    return EstimateSetting(machine, stack, other, headroom, imbalance), [*notes, note]
