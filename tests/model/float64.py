"""Models of `transformers` in float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Everywhere(TorchFunctionMode):
    """Lifts to float64 what the package computes in float32 whatever the model's type: the inner
    part of its norms, its rotary tables, the softmax and the loss."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lifted = {name: self.lift(value) for name, value in (kwargs or {}).items()}
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(self.lift, args), **lifted)

    @staticmethod
    def lift(value: object) -> object:
        return torch.float64 if value is torch.float32 else value
