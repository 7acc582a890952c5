"""The files beside the weights of an exported model: its card, and how it generates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import fivefold
from fivefold.core import counted
from fivefold.core.model import TokenizerId, parameters
from fivefold.core.plan import Plan

GENERATION, CARD = "generation_config.json", "README.md"
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def generation_config(config: Mapping[str, Any]) -> bytes:
    """How a model without such a file generates: with the special tokens of its config."""
    known = {key: config[key] for key in _SPECIAL if config.get(key) is not None}
    return (json.dumps(known, indent=2) + "\n").encode()


def model_card(
    plan: Plan, plan_toml: str, dtype: str, step: int, tokenizer: TokenizerId | None
) -> bytes:
    """The card: what was trained, on what, and the recipe that does it again."""
    shape, recipe, batch = plan.shape, plan.options.train, plan.batch
    trained = (
        f"{counted(step, 'step')} of {counted(batch.sequences, 'sequence')} of {batch.seq:,} tokens"
        if step
        else "no step: the weights are those that were imported"
    )
    warmup = counted(recipe.warmup_steps, "warmup step")
    lines = {
        "architecture": f"{shape.family}, {parameters(shape).total:,} parameters",
        "weights": dtype,
        "trained for": trained,
        "data": recipe.data if step else "none",
        "packed documents": "yes" if plan.packed else "no",
        "optimizer": f"{recipe.optimizer}, weight decay {recipe.weight_decay:g}",
        "learning rate": f"{recipe.lr:g}, {recipe.lr_curve}, {warmup}",
        "gradient clipping": f"{recipe.clip:g}",
        "seed": str(recipe.seed),
        "layout": f"{plan.layout}",
        "tokenizer": "none in this folder" if tokenizer is None else str(tokenizer),
        "fivefold": fivefold.__version__,
    }
    rows = "\n".join(f"| {key} | {value} |" for key, value in lines.items())
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- fivefold\n---\n\n"
        f"# {shape.name}\n\n| | |\n|---|---|\n{rows}\n\n"
        f"## Recipe\n\n`fivefold train plan.toml` with this plan:\n\n```toml\n{plan_toml}```\n"
    ).encode()
