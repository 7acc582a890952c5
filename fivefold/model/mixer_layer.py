"""The layer of an own mixer: the linears and tensors of its table around the user's function.

Seams: `project` as in attention, `kernel`, which context parallelism replaces, and `hold`, through
which a tensor goes to the function, for split backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from fivefold.core import FivefoldError
from fivefold.core.model import Mixer, MixerTokens, Shape, mixer_table
from fivefold.model.batch import Context, TokenBatch
from fivefold.model.layers import Linear, Project, WeightFactory, as_it_is, project


class MixerInputs(NamedTuple):
    """What the function of a mixer gets: outputs of linears, tensors, and facts on the tokens."""

    projections: dict[str, Tensor]
    params: dict[str, Tensor]
    tokens: MixerTokens
    row: TokenBatch | None  # the full rows, where the tokens are a shard of them


class MixerLayer(nn.Module):
    """Linears of the input, the function of an own mixer, and the linear back."""

    def __init__(self, shape: Shape, mixer: Mixer, factory: WeightFactory) -> None:
        super().__init__()
        self.shape, self.mixer, self.first_head = shape, mixer, 0
        rows = mixer_table(shape)
        self.reading = [weight.name for weight in rows if weight.reads == "input"]
        self.param_names = [weight.name for weight in rows if weight.reads == "nothing"]
        self.splits = {weight.name: weight.split for weight in rows}
        self.project: Project = project  # seam: tensor parallelism, split backward
        self.kernel: MixerKernel = mixed  # seam: context parallelism
        self.hold: Callable[[Tensor], Tensor] = as_it_is  # seam: split backward
        for row in rows:
            if hasattr(self, row.name):
                raise FivefoldError(
                    f"mixer {mixer.name}, weight {row.name}: torch.nn.Module or the layer has an "
                    "attribute of this name; choose another"
                )
            if row.reads == "nothing":
                self.register_parameter(row.name, factory.empty(*row.shape))
            else:
                outputs, inputs = row.shape
                self.add_module(row.name, Linear(outputs, inputs, row.bias, factory))

    @property
    def linears(self) -> list[Linear]:
        """Those that read the input."""
        return [self.get_submodule(name) for name in self.reading]  # pyright: ignore

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        outputs = self.project(x_BSD, self.linears)
        info = context.attention
        inputs = MixerInputs(
            dict(zip(self.reading, outputs, strict=True)),
            {name: self.hold(self.get_parameter(name)) for name in self.param_names},
            MixerTokens(info.positions, context.rotary),
            info.row,
        )
        return self.out(self.kernel(self, inputs).to(outputs[0].dtype))


MixerKernel = Callable[[MixerLayer, MixerInputs], Tensor]


def mixed(layer: MixerLayer, inputs: MixerInputs) -> Tensor:
    """The user's function; refuses a result that no linear could read."""
    tensors = {**inputs.projections, **inputs.params}
    output = layer.mixer.mix(layer.shape, tensors, inputs.tokens)
    before = next(iter(inputs.projections.values())).shape[:2]
    if not isinstance(output, Tensor) or output.dim() != 3 or output.shape[:2] != before:
        what = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise FivefoldError(
            f"mix() of mixer {layer.mixer.name} returned {what}: return a tensor of (rows, tokens, "
            f"inputs of out), here {tuple(before)} and what the heads of a rank make"
        )
    return output
