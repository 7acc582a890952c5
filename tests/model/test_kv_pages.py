"""The cache of the engine has the bytes that plans count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fivefold.core.model import kv_pages
from fivefold.core.model import presets as models
from fivefold.generate.cache import token_bytes
from fivefold.model.decoder import from_config


@pytest.mark.parametrize("model", ["tiny", "tiny-moe", "llama-3.1-8b", "deepseek-v2-lite"])
def test_engine_and_plan_count_alike(model: str) -> None:
    shape = replace(models.load(model), layers=2)
    decoder = from_config(shape, dtype=torch.bfloat16, device="meta")
    assert token_bytes(decoder) == kv_pages.token_bytes(shape, shape.layers, 1, 2)
    assert token_bytes(decoder, codes=True) == kv_pages.token_bytes(shape, shape.layers, 1, 1)
