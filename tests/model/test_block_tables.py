"""Block tables on the device are those of the step, whatever came and went before."""

from __future__ import annotations

import random
from unittest.mock import patch

import torch

from fivefold.core.model import BLOCK
from fivefold.generate import step_tensors as steps
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.generate.step_tensors import BlockTables, StepTensors, step_tensors

CPU, PADDING = torch.device("cpu"), 99


def chunk_of(id: str, tokens: int, table: tuple[int, ...], start: int = 0) -> SequenceChunk:
    return SequenceChunk(id, tuple(range(tokens)), start, table, samples=True)


def table_of(tensors: StepTensors, index: int, blocks: int) -> tuple[int, ...]:
    rows = tensors.sequences
    return tuple(rows.tables[rows.rows[index], :blocks].tolist())


def test_a_step_brings_only_what_changed() -> None:
    """A sequence that goes on sends its new blocks; one that began again sends all."""
    tables, sent = BlockTables(CPU, 8, PADDING), list[int]()
    plain = steps.to_device

    def counted(numbers: object, device: torch.device) -> torch.Tensor:
        tensor = plain(numbers, device)  # type: ignore[arg-type]
        sent.append(tensor.numel())
        return tensor

    with patch.object(steps, "to_device", counted):
        for table, changed in (((3, 7), 2), ((3, 7), 0), ((3, 7, 1), 1), ((4, 7, 1), 3), ((4,), 1)):
            sent.clear()
            tables.rows_of([chunk_of("a", 1, table)])
            assert sent == [2 * changed] * bool(changed)
            assert tuple(tables.tensor[tables.rows_of([chunk_of("a", 1, table)])[0]][
                : len(table)
            ].tolist()) == table  # fmt: skip


def test_tokens_of_no_sequence_write_to_the_padding() -> None:
    fill = SequenceChunk("", (0,) * 20, 0, (PADDING,) * 2, samples=False, fills=True)
    step = StepBatch((chunk_of("a", 3, (5, 6), 15), fill))
    tensors = step_tensors(step, BlockTables(CPU, 4, PADDING))
    assert tensors.slots.tolist()[:3] == [5 * BLOCK + 15, 6 * BLOCK, 6 * BLOCK + 1]
    assert set(tensors.slots[3:].tolist()) == {PADDING * BLOCK + i % BLOCK for i in range(20)}
    assert tensors.sequences.starts.tolist() == [0, 3, 23]
    assert tensors.sequences.lengths.tolist() == [18, 20] and tensors.sampled.tolist() == [2]


def test_tables_are_right_for_any_course_of_sequences() -> None:
    """More sequences than rows, more blocks than columns, preemption, and sequences that end."""
    draw = random.Random(0)
    with patch.object(steps, "_ROWS", 6):
        tables, running, grown = BlockTables(CPU, 4, PADDING), dict[str, tuple[int, ...]](), 0
        for turn in range(400):
            before = tables.tensor
            for id in [id for id in running if draw.random() < 0.1]:
                del running[id]
            for id in list(running):
                kind = draw.random()
                if kind < 0.3:
                    running[id] += (draw.randrange(90),)
                elif kind < 0.35:
                    running[id] = tuple(draw.randrange(90) for _ in range(draw.randrange(1, 9)))
            if len(running) < (5 if turn < 200 else 40):
                running[f"{turn}"] = (draw.randrange(90),)
            ids = draw.sample(list(running), draw.randrange(1, len(running) + 1))
            chunks = [chunk_of(id, 1, running[id], len(running[id]) * BLOCK - 1) for id in ids]
            tensors = step_tensors(StepBatch(tuple(chunks)), tables)
            for index, id in enumerate(ids):
                assert table_of(tensors, index, len(running[id])) == running[id]
            assert tensors.slots.tolist() == [running[id][-1] * BLOCK + BLOCK - 1 for id in ids]
            grown += tables.tensor is not before
    assert grown >= 2, "rows and columns were too few at first"
