"""fivefold: transformers across five dimensions of parallelism, planned, verified and measured.

    import fivefold as ff

    print(ff.plan("llama-3.1-405b", gpus=16384, machine="h100"))

`docs/python.md` has every name. A name is imported when it is first used: to plan needs no torch.
Some functions are called as the room that does their work is (`verify`): `fivefold.verify` is the
function, and `from fivefold.verify import …` reads the room.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

TYPE_CHECKING = False  # to type checkers it is typing's, whose import would take longer than all
if TYPE_CHECKING:
    from typing import Any

    from fivefold.commands.calibrate import calibrate as calibrate
    from fivefold.commands.compare_frameworks import compare_frameworks as compare_frameworks
    from fivefold.commands.evaluate import evaluate as evaluate
    from fivefold.commands.export import export as export
    from fivefold.commands.generate import generate as generate
    from fivefold.commands.import_model import import_model as import_model
    from fivefold.commands.job import as_machine as machine
    from fivefold.commands.job import as_shape as shape
    from fivefold.commands.launch import launch as launch
    from fivefold.commands.observe import observe as observe
    from fivefold.commands.rehearse import rehearse as rehearse
    from fivefold.commands.schedule import schedule as schedule
    from fivefold.commands.score import score as score
    from fivefold.commands.search import plan as plan
    from fivefold.commands.search import search as search
    from fivefold.commands.serve import serve as serve
    from fivefold.commands.simulate import simulate as simulate
    from fivefold.commands.tokens import tokens as tokens
    from fivefold.commands.train import train as train
    from fivefold.commands.verify import verify as verify
    from fivefold.core import FivefoldError as FivefoldError
    from fivefold.core import Machine as Machine
    from fivefold.core import RankLost as RankLost
    from fivefold.core.layout import Layout as Layout
    from fivefold.core.model import Mixer as Mixer
    from fivefold.core.model import MixerCost as MixerCost
    from fivefold.core.model import MixerWeight as MixerWeight
    from fivefold.core.model import Shape as Shape
    from fivefold.core.plan import Plan as Plan
    from fivefold.train.callbacks import Callback as Callback

__version__ = "0.1.0"

# Where each name is: the module, and its name there.
_NAMES = {
    "plan": ("fivefold.commands.search", "plan"),
    "search": ("fivefold.commands.search", "search"),
    "schedule": ("fivefold.commands.schedule", "schedule"),
    "rehearse": ("fivefold.commands.rehearse", "rehearse"),
    "simulate": ("fivefold.commands.simulate", "simulate"),
    "verify": ("fivefold.commands.verify", "verify"),
    "train": ("fivefold.commands.train", "train"),
    "generate": ("fivefold.commands.generate", "generate"),
    "calibrate": ("fivefold.commands.calibrate", "calibrate"),
    "compare_frameworks": ("fivefold.commands.compare_frameworks", "compare_frameworks"),
    "evaluate": ("fivefold.commands.evaluate", "evaluate"),
    "export": ("fivefold.commands.export", "export"),
    "import_model": ("fivefold.commands.import_model", "import_model"),
    "launch": ("fivefold.commands.launch", "launch"),
    "observe": ("fivefold.commands.observe", "observe"),
    "score": ("fivefold.commands.score", "score"),
    "serve": ("fivefold.commands.serve", "serve"),
    "tokens": ("fivefold.commands.tokens", "tokens"),
    "shape": ("fivefold.commands.job", "as_shape"),
    "machine": ("fivefold.commands.job", "as_machine"),
    "Layout": ("fivefold.core.layout.layout", "Layout"),
    "Shape": ("fivefold.core.model.shape", "Shape"),
    "Machine": ("fivefold.core.hardware", "Machine"),
    "Mixer": ("fivefold.core.model.mixers", "Mixer"),
    "MixerCost": ("fivefold.core.model.mixers", "MixerCost"),
    "MixerWeight": ("fivefold.core.model.mixers", "MixerWeight"),
    "Plan": ("fivefold.core.plan.plan", "Plan"),
    "Callback": ("fivefold.train.callbacks.callback", "Callback"),
    "FivefoldError": ("fivefold.core.errors", "FivefoldError"),
    "RankLost": ("fivefold.core.errors", "RankLost"),
}
__all__ = [
    "Callback",
    "FivefoldError",
    "Layout",
    "Machine",
    "Mixer",
    "MixerCost",
    "MixerWeight",
    "Plan",
    "RankLost",
    "Shape",
    "calibrate",
    "compare_frameworks",
    "evaluate",
    "export",
    "generate",
    "import_model",
    "launch",
    "machine",
    "observe",
    "plan",
    "rehearse",
    "schedule",
    "score",
    "search",
    "serve",
    "shape",
    "simulate",
    "tokens",
    "train",
    "verify",
]


class _Package(ModuleType):
    """This module. Importing a room would bind its name here, over a function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, inner = _NAMES[name]
        value = getattr(import_module(module), inner)
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_NAMES})


sys.modules[__name__].__class__ = _Package
