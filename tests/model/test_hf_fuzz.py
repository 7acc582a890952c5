"""Random configs of every family: imported, trained beside `transformers`, exported, read back.

The configs change with the commit; a failure prints the config and the command that repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_draws import DRAWS, Draw, draw
from small import batch_of, state_from_hf
from test_hf_files import built, in_float64, loaded
from test_hf_parity import Float64Everywhere, saved, saved_gradients
from torch import Tensor

from fivefold.core.layout.weight_table import buffers, weights
from fivefold.core.model.presets import load
from fivefold.huggingface.config_export import WRITERS, as_hf
from fivefold.huggingface.files import HfFolder, write_model
from fivefold.model.batch import TokenBatch
from fivefold.model.decoder import Decoder, from_config
from tests.selection import ALL_CASES, SALT, salt

F32, F64 = torch.float32, torch.float64
NUM_DRAWS = 40
NUM_STEPS = 2
FAMILIES = list(DRAWS)


@contextmanager
def repeatable(drawn: Draw, i: int) -> Iterator[None]:
    """Add the config and the command to whatever fails."""
    try:
        yield
    except BaseException as error:
        test = f"tests/model/test_hf_fuzz.py::test_a_random_config_there_and_back[{i}]"
        error.add_note(f"{drawn}\n{ALL_CASES}=1 {SALT}={salt()} python -m pytest '{test}'")
        raise


def shaken(config: Any, seed: int) -> Any:
    """A model of the package in which no weight is 1 or 0."""
    torch.manual_seed(seed)
    theirs = built(config)
    with torch.no_grad():
        for each in theirs.parameters():
            each.add_(0.2 * torch.randn_like(each))
        for name, each in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                each.copy_(0.1 * torch.randn_like(each))
    return theirs.eval()


def imported(folder: Path) -> Decoder:
    """Our model in float64, from a folder of the package."""
    shape = load(str(folder / "config.json"))
    source, ours = HfFolder(folder, shape), from_config(shape, dtype=F64)
    state = {each.name: source.weight(each, F64) for each in weights(shape)}
    state |= {each.name: source.weight(each, F32) for each in buffers(shape)}
    ours.load_state_dict(state, strict=not shape.tied)
    return ours


def their_loss(theirs: Any, batch: TokenBatch) -> Tensor:
    with Float64Everywhere():
        log_odds = theirs(batch.tokens).logits.log_softmax(-1)
    picked = log_odds.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    return -(picked * (batch.labels != -100)).sum()


def assert_same_gradients(ours: Decoder, theirs: Any) -> None:
    expected = state_from_hf(ours.shape, saved_gradients(theirs))
    found = {name: each.grad for name, each in ours.named_parameters()}
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in found.items():
        # Some are zero but for rounding: a key's bias moves no softmax without rotation. An expert
        # that no token chose may have none.
        grad = torch.zeros_like(expected[name]) if grad is None else grad
        scale = max(expected[name].abs().max().item(), 1e-3 * largest)
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-9 * scale, msg=name)


def train(ours: Decoder, theirs: Any, batch: TokenBatch) -> None:
    """A few steps of both models; losses and gradients are equal in each.

    The large epsilon keeps AdamW from scaling gradients that are only rounding to full steps.
    """
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3) for model in (ours, theirs)
    ]
    for _ in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, expected = ours(batch.tokens, batch), their_loss(theirs, batch)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        assert_same_gradients(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()


def logits_of(ours: Decoder, batch: TokenBatch) -> Tensor:
    assert ours.head is not None
    ours.head.cross_entropy = lambda logits, labels: logits
    return ours(batch.tokens, batch).view(*batch.tokens.shape, -1)


def round_trip(drawn: Draw, folder: Path, seed: int) -> None:
    config = drawn.config()
    theirs = shaken(config, seed)
    theirs.save_pretrained(folder / "in")
    ours, theirs = imported(folder / "in"), in_float64(theirs)
    batch = batch_of(ours.shape, seq=24, seed=seed)
    train(ours, theirs, batch)

    for each in ours.parameters():
        each.data.copy_(each.data.float())  # what the files can hold
    model = as_hf(ours.shape, "float32")
    state = ours.state_dict()
    write_model(folder / "out", model.shape, model.config, state.__getitem__, F32, 10**9)
    back, told = loaded(folder / "out")
    assert not any(told.values()), told
    with torch.no_grad(), Float64Everywhere():
        logits = in_float64(back)(batch.tokens).logits
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, batch), logits, rtol=1e-9, atol=1e-9)
        narrow = from_config(ours.shape, dtype=F32)
        narrow.load_state_dict(state, strict=not ours.shape.tied)
        torch.testing.assert_close(logits_of(narrow, batch).double(), logits, rtol=1e-2, atol=1e-2)
    assert saved(back).keys() == saved(theirs).keys()


def test_every_family_is_drawn() -> None:
    assert set(FAMILIES) == set(WRITERS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("i", range(NUM_DRAWS))
def test_a_random_config_there_and_back(i: int, tmp_path: Path) -> None:
    drawn = draw(f"{salt()}: {i}", FAMILIES[i % len(FAMILIES)])
    with repeatable(drawn, i):
        round_trip(drawn, tmp_path, i)
