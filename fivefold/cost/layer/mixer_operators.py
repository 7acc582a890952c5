"""The operators of layers with an own mixer, in all layers or in those of a hybrid without
attention, for the tape of `layer_operators`."""

from __future__ import annotations

from fivefold.core.model import LayerKind, Recompute, mixer_table
from fivefold.cost.layer.operator_list import OperatorList, TapeTensor
from fivefold.cost.layer.operators import LayerOperators


class MixerOperators(LayerOperators):
    """The operators of layers with an own mixer."""

    def _mixed(
        self, operators: OperatorList, x: TapeTensor, kind: LayerKind, rule: Recompute
    ) -> TapeTensor:
        activations = self.activations.of_mixer if kind.recurrent else self.activations
        mixer = activations.mixer
        if mixer is None:
            return self._attention(operators, x, rule)
        sizes = {
            f"attention.{name}.": float(size[0]) * self.unit
            for name, size in mixer.projections.items()
        }
        projections = self._project(operators, x, sizes, self._saves_shards(operators, rule))
        projections = [self._in_rows(operators, projection) for projection in projections]
        rows = mixer_table(activations.shape)
        weights = [f"attention.{row.name}" for row in rows if row.reads == "nothing"]
        result = TapeTensor(float(mixer.back[0]) * self.unit)
        saved_bytes = float(mixer.saved[0]) * self.unit
        mixed = operators.add(
            projections, result, [*projections, result], weights, keeps=saved_bytes
        )
        out = self._row_linear(operators, self._in_rows(operators, mixed), "attention.out")
        return self._biased(operators, out, rows[-1].bias)
