"""fp8 matmuls: the keys, the numbers of both formats, and which layouts cut a block.

What shares a scale, and how it is computed, is in `docs/fp8.md`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from fivefold.core import FivefoldError, UnknownName

if TYPE_CHECKING:
    from fivefold.core.layout.layout import Layout
    from fivefold.core.model import Shape

Scaling = Literal["tensorwise", "blockwise", "mxfp8", "nvfp4"]
Operands = Literal["fp8", "bf16"]
Multiplied = Literal["gpu", "emulated"]
Fp8Format = Literal["e4m3", "e5m2"]

# Of a plan, in the order of `parse`.
KEYS = ("fp8", "fp8_wgrad", "fp8_gradients", "fp8_skip", "fp8_matmul")
BLOCK, SMALL_BLOCK = 128, 32  # the latter of mxfp8
SCALE_BYTES = 4
LARGEST: dict[Fp8Format, float] = {"e4m3": 448.0, "e5m2": 57344.0}
LEAST_MAXIMUM = 2.0**-100
_WITH_STATE = ("delayed", "static")
_RUN = ("tensorwise", "blockwise", "mxfp8")  # nvfp4 is planned alone
# Bytes of a rounded input or gradient with its share of the scales: a float32 number for 128
# values, or a byte for 32 or 16.
_CODE_BYTES: dict[Scaling, float] = {
    "tensorwise": 1.0,
    "blockwise": 1 + 4 / BLOCK,
    "mxfp8": 1 + 1 / SMALL_BLOCK,
    "nvfp4": 1 / 2 + 1 / 16,
}
# Weights of linears that are rounded, and of routed experts.
_ROUNDED = re.compile(
    r"\.(attention\.(q|k|v|out|q_down|q_up|kv_down|kv_up)|mlp\.(shared\.)?(gate|up|down))\.weight$"
)
_ROUTED = re.compile(r"\.mlp\.experts\.(gate|up|down)\.weight$")
EXPERT_WEIGHT = 2.0  # bytes of an expert's rounded weight in both orders
_ROW_MULTIPLE = 16  # bytes: grouped matmuls read rows of a multiple of this


def packed_row(width: int) -> int:
    """Bytes of a row that travels to experts: its codes, and its scale at the end.

    >>> packed_row(2048), packed_row(60)
    (2064, 64)
    """
    return -(-(width + SCALE_BYTES) // _ROW_MULTIPLE) * _ROW_MULTIPLE


def stores_codes(name: str) -> bool:
    """Whether an engine in fp8 has codes of this weight: those that training rounds, in all layers.

    >>> stores_codes("blocks.3.attention.q.weight"), stores_codes("blocks.3.mlp.router.weight")
    (True, False)
    """
    rounded = _ROUNDED.search(name) or _ROUTED.search(name)
    return name.startswith(("blocks.", "mtp.")) and rounded is not None


@dataclass(frozen=True)
class Fp8:
    """How matmuls are rounded: what shares a scale, the operands of weight gradients, the format of
    gradients, how many first and last layers are not rounded, and whether a GPU without units for
    it may multiply the rounded values."""

    scaling: Scaling = "tensorwise"
    wgrad: Operands = "fp8"
    gradients: Fp8Format = "e5m2"
    first: int = 0
    last: int = 0
    emulated: bool = False

    @classmethod
    def parse(
        cls,
        scaling: str | None = None,
        wgrad: str | None = None,
        gradients: str | None = None,
        skip: str | None = None,
        matmul: str | None = None,
    ) -> Fp8:
        """From the keys of a plan; None is the default."""
        scaling = "tensorwise" if scaling is None else _one_of("fp8", scaling, Scaling)
        usual = "e5m2" if scaling == "tensorwise" else "e4m3"
        return cls(
            cast(Scaling, scaling),
            cast(Operands, _one_of("fp8_wgrad", wgrad or "fp8", Operands)),
            cast(Fp8Format, _one_of("fp8_gradients", gradients or usual, Fp8Format)),
            *_skipped(skip or "0+0"),
            _one_of("fp8_matmul", matmul or "gpu", Multiplied) == "emulated",
        )

    @property
    def skip(self) -> str:
        """The key `fp8_skip`."""
        return f"{self.first}+{self.last}"

    @property
    def gathers_codes(self) -> bool:
        """Whether gathers of tokens move codes: one rank's scale is every rank's, and no matmul
        reads anything else."""
        return self.scaling == "tensorwise" and self.wgrad == "fp8"

    @property
    def experts(self) -> bool:
        """Whether matmuls of routed experts are rounded: with one scale for a row, and for an
        expert's weight, whatever linears have."""
        return self.scaling != "nvfp4"

    @property
    def code_bytes(self) -> float:
        """Bytes of a rounded input or gradient, with its share of the scales."""
        return _CODE_BYTES[self.scaling]

    @property
    def weight_bytes(self) -> float:
        """Bytes of a rounded weight in both orders. Of squares, the scales take next to nothing."""
        return 2.0 if self.scaling in ("tensorwise", "blockwise") else 2 * self.code_bytes

    @property
    def block(self) -> int:
        """How many values of a row share a scale, if not all."""
        return SMALL_BLOCK if self.scaling == "mxfp8" else BLOCK

    @property
    def saved_bytes(self) -> float:
        """Bytes that the input of a linear is saved in: as codes, if its weight gradient reads
        them."""
        return self.code_bytes if self.wgrad == "fp8" else 2.0

    def rounds_weight(self, name: str, layers: int) -> bool:
        """Whether this weight of a linear is rounded, in a model of so many layers."""
        return _ROUNDED.search(name) is not None and self._rounds_layer_of(name, layers)

    def rounds_expert_weight(self, name: str, layers: int) -> bool:
        """The same of routed experts."""
        routed = self.experts and _ROUTED.search(name) is not None
        return routed and self._rounds_layer_of(name, layers)

    def _rounds_layer_of(self, name: str, layers: int) -> bool:
        kind, number, *_ = name.split(".")
        return self.rounds(int(number) if kind == "blocks" else layers, layers)

    def describe(self) -> str:
        """What is rounded, how, and what is not."""
        shared = {
            "tensorwise": "one scale for a tensor",
            "blockwise": "one scale for 128 values of a token and for 128 x 128 weights",
            "mxfp8": "one scale, a power of two, for 32 values",
            "nvfp4": "one scale for 16 values",
        }[self.scaling]
        wgrad = "" if self.wgrad == "fp8" else "; weight gradients multiply in bf16"
        routed = "; routed experts have one scale for a row and for an expert's weight, and weight "
        routed = f"{routed}gradients in bf16" if self.experts else ""
        skipped = f"; the first {self.first} and last {self.last} layers stay in bf16"
        return (
            f"linears of layers are rounded, with {shared}{wgrad}{routed}"
            f"{skipped if self.first + self.last else ''}; embedding, head, router, norms"
            f"{' and attention' if self.experts else ', attention and routed experts'} are not"
        )

    def share(self, layers: int) -> float:
        """Of so many layers, those that are rounded."""
        return max(0.0, 1 - (self.first + self.last) / layers)

    def rounds(self, layer: int, layers: int) -> bool:
        """Whether the matmuls of a layer are rounded; those of multi-token prediction always."""
        return layer >= layers or self.first <= layer < layers - self.last

    def require_runnable(self, asynchronous: bool) -> None:
        """Refuse what can be planned in few bits and not run."""
        if self.scaling == "nvfp4":
            raise FivefoldError(
                "precision = nvfp4 is planned and not run: training in it needs random Hadamard "
                "transforms and stochastic rounding, which no public call of torch has; run with "
                "precision = fp8 or bf16"
            )
        if asynchronous:
            raise FivefoldError(
                "precision = fp8 with an asynchronous schedule: weights are rounded once a step, "
                "and such a schedule has several versions of them; choose another schedule"
            )


def _one_of(key: str, value: str, kind: object) -> str:
    if key == "fp8" and value in _WITH_STATE:
        raise FivefoldError(
            f"fp8 = {value}: scales of earlier steps are a state that checkpoints and resharding "
            "would have to carry, and values above them saturate; choose tensorwise or blockwise, "
            "whose scales come from the tensor itself"
        )
    known = _RUN if kind is Scaling else get_args(kind)
    if value not in known:
        raise UnknownName(key, value, known)
    return value


def _skipped(text: str) -> tuple[int, int]:
    first, plus, last = text.partition("+")
    if not (plus and first.isdecimal() and last.isdecimal() and len(text) < 12):
        raise FivefoldError(
            f"fp8_skip = {text!r}: give the number of first and of last layers that stay in bf16, "
            "such as 1+1"
        )
    return int(first), int(last)


def fp8_of(options: Any) -> Fp8 | None:
    """How a plan with these options rounds matmuls; None if it does not. In other precisions the
    keys say nothing, and are refused."""
    precision, keys = options.precision, {key: getattr(options, key) for key in KEYS}
    if precision == "fp8":
        return Fp8.parse(*keys.values())
    if precision == "nvfp4" and not any(keys.values()):
        return Fp8("nvfp4", gradients="e4m3")
    for key, value in keys.items():
        if value is not None:
            raise FivefoldError(
                f"{key} = {value} has no effect with precision = {precision}: add precision = fp8, "
                "or leave it out"
            )
    return None


def planned_fp8(precision: str, options: Any) -> Fp8 | None:
    """What is estimated in this precision, whatever a plan with these options runs in."""
    if precision in ("fp8", options.precision):
        return fp8_of(options)
    scaling: dict[str, Scaling] = {"mxfp8": "mxfp8", "nvfp4": "nvfp4"}
    return Fp8(scaling[precision], gradients="e4m3") if precision in scaling else None


def keeps_rounded(layout: Layout, keeps_weights: bool) -> bool:
    """Whether rounded weights stay over a step: where full weights do. `keeps_weights`: those that
    ZeRO-3 has gathered stay."""
    return keeps_weights or layout.zero < 3 or layout.shard * layout.cp == 1


def refuse_biases(shape: Shape, fp8: Fp8 | None) -> None:
    """Grouped matmuls in fp8 have no biases."""
    if fp8 is not None and fp8.experts and shape.moe is not None and shape.moe.biases:
        raise FivefoldError("experts with biases are not rounded to fp8: use precision = bf16")
