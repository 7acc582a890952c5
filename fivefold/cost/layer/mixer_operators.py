"""The operators of layers with an own mixer, in all layers or in those of a hybrid without
attention, for the tape of `layer_operators`."""

from __future__ import annotations

from fivefold.core.model import LayerKind, Recompute, mixer_table
from fivefold.cost.layer.operator_list import OperatorList, TapeTensor
from fivefold.cost.layer.operators import LayerOperators


class MixerOperators(LayerOperators):
    """The operators of layers with an own mixer."""

    def _mixed(
        self, found: OperatorList, x: TapeTensor, kind: LayerKind, rule: Recompute
    ) -> TapeTensor:
        here = self.activations.of_mixer if kind.recurrent else self.activations
        mixer = here.mixer
        if mixer is None:
            return self._attention(found, x, rule)
        sizes = {
            f"attention.{name}.": float(one[0]) * self.unit for name, one in mixer.made.items()
        }
        made = self._project(found, x, sizes, self._saves_shards(found, rule))
        made = [self._in_rows(found, each) for each in made]
        rows = mixer_table(here.shape)
        held = [f"attention.{each.name}" for each in rows if each.reads == "nothing"]
        result = TapeTensor(float(mixer.back[0]) * self.unit)
        kept = float(mixer.saved[0]) * self.unit
        mixed = found.add(made, result, [*made, result], held, keeps=kept)
        out = self._row_linear(found, self._in_rows(found, mixed), "attention.out")
        return self._biased(found, out, rows[-1].bias)
