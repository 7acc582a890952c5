"""Attention over pages beside the plain kernel: decode, prompts, masks, caps, sinks, latents.

On a machine without a GPU, `TRITON_INTERPRET=1 python3 tests/gpu/test_paged_cuda.py` runs the same
checks where Triton is installed, slowly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from itertools import accumulate, product

import pytest
import torch
from torch import Tensor

from fivefold.core.model import BLOCK, blocks_of
from fivefold.generate.cache import LayerPages, attend_sequence, first_seen
from fivefold.generate.step_tensors import PART_KEYS, SequenceRows
from fivefold.launch.backend import num_gpus
from fivefold.model import AttentionInfo

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# Keys before the tokens of each sequence, and tokens.
DECODE = ((0, 1), (15, 1), (127, 1), (128, 1), (700, 1), (37, 1))
PROMPTS = ((0, 1), (300, 1), (0, 40), (0, 150), (130, 7), (513, 66), (0, 16))
FEW_TOKENS = ((3000, 5), (2100, 20), (0, 3))
HEADS = {  # query heads, key heads, width
    "heads of 128": (8, 2, 128),
    "heads of 64": (6, 6, 64),
    "heads of 96": (6, 2, 96),
    "heads of 8": (4, 2, 8),
    "heads of 256": (4, 1, 256),
    "groups of 5": (10, 2, 80),
}
LATENTS = {"latents": (16, 512, 64), "latents of many heads": (80, 512, 64), "narrow": (4, 32, 16)}
MASKS = {
    "all": {},
    "window": {"window": 50},
    "chunks": {"chunk": 64},
    "cap": {"cap": 0.7},
    "sinks": {"sinks": True},
    "all of it": {"window": 130, "cap": 2.0, "sinks": True},
}


def info_of(heads: int, mask: dict[str, int | float | bool]) -> AttentionInfo:
    values: dict[str, object] = dict(mask)
    if values.pop("sinks", False):
        generator = torch.Generator().manual_seed(3)
        values["sinks"] = torch.randn(heads, generator=generator).to(DEVICE)
    none = torch.zeros(0, device=DEVICE)
    return AttentionInfo(none, None, values.pop("window", None), **values)  # type: ignore[arg-type]


def attended(
    queries: Tensor, pages: LayerPages, lengths: list[tuple[int, int]],
    tables: Tensor, info: AttentionInfo, capacity: int = 0,
) -> Tensor:  # fmt: skip
    """What the kernels give for sequences of these lengths; those of one token come first."""
    from fivefold.generate import paged_kernel as paged

    stops = [before + tokens for before, tokens in lengths]
    starts = [0, *accumulate(tokens for _, tokens in lengths)]
    int32 = partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    step = SequenceRows(tables, int32(list(range(len(lengths)))), int32(starts), int32(stops))
    mask = paged.LayerMask.of(info.window, info.chunk, info.cap, info.sinks)
    out = queries.new_full((*queries.shape[:2], pages.values.shape[3]), float("nan"))
    singles = sum(1 for _, tokens in lengths if tokens == 1)
    group = queries.shape[1] // pages.keys.shape[2]
    unit = paged.tile_tokens(queries.shape[2], queries.element_size(), group)
    tiles = [
        (sequence, token)
        for sequence, (_, tokens) in enumerate(lengths)
        for token in range(0, tokens, unit)
        if tokens > 1
    ]
    if tiles:
        numbers = (int32(list(column)) for column in zip(*tiles, strict=True))
        keys = max(stops[singles:])
        prompt = paged.PromptTiles(*numbers, len(tiles), starts[singles], keys)
        paged.attend_prompts(queries, pages, step, prompt, mask, out)
    if singles:
        bound = capacity or sum(-(-stop // PART_KEYS) for stop in stops[:singles])
        parts = paged.cut_keys(step.lengths[:singles], bound, mask)
        paged.attend_decode(queries, pages, step, parts, mask, out)
    return out


def expected(
    queries: Tensor, pages: LayerPages, lengths: list[tuple[int, int]],
    tables: Tensor, info: AttentionInfo,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The plain kernel in float64, the same of the sizes of values, and by how much float32 moves
    odds."""
    outputs: list[Tensor] = []
    sizes: list[Tensor] = []
    roundings: list[Tensor] = []
    start = 0
    for (before, tokens), table in zip(lengths, tables, strict=True):
        stop = before + tokens
        read = pages.read(table.long()[: blocks_of(stop)], torch.float64)
        keys, values = (part[:stop].double() for part in read)
        unseen = first_seen(before, info)  # may be of others
        keys[:unseen], values[:unseen] = 0, 0
        rows = queries[start : start + tokens].double()
        outputs.append(attend_sequence(rows, keys, values, info, 0))
        sizes.append(attend_sequence(rows, keys, values.abs(), info, 0))
        roundings.append(float32_rounding(rows, keys))
        start += tokens
    return torch.cat(outputs), torch.cat(sizes), torch.cat(roundings)


def float32_rounding(queries_THd: Tensor, keys_SKd: Tensor) -> Tensor:
    """By how much, relative to their sizes, odds and their sums may be off in float32: (T, H, 1).

    A sum of n rounded terms is off by at most λ·√n·2⁻²⁴ of the sum of their sizes, but for a share
    of 2·exp(−λ²/2) of all sums (Higham and Mary, SIAM J. Sci. Comput. 41, 2019). An odd is off by
    as much as its score, and so is the sum of odds that divides.
    """
    factor, unit, (seq, _, width) = 7.0, 2.0**-24, keys_SKd.shape
    keys_SHd = keys_SKd.repeat_interleave(queries_THd.shape[1] // keys_SKd.shape[1], dim=1)
    sizes_THS = torch.einsum("thd,shd->ths", queries_THd.abs(), keys_SHd.abs()) * width**-0.5
    of_scores = width**0.5 * sizes_THS.amax(-1, keepdim=True)
    return 2 * factor * unit * (of_scores + seq**0.5)


def empty_codes(keys: Tensor, values: Tensor, latent: bool) -> LayerPages:
    """Pages in fp8 with room for these numbers, on their device."""
    blocks, _, heads, _ = keys.shape
    codes = [torch.zeros_like(tensor, dtype=torch.uint8) for tensor in (keys, values)]
    scales = [keys.new_zeros(blocks, heads, BLOCK, dtype=torch.float32) for _ in range(2)]
    of_pages = [tensor.transpose(1, 2) for tensor in scales]
    if latent:
        codes[1], of_pages[1] = codes[0][..., : values.shape[3]], of_pages[0]
    return LayerPages(*codes, *of_pages)


def coded(keys: Tensor, values: Tensor, latent: bool) -> LayerPages:
    """Pages of these numbers in fp8, written by `write`; heads of tokens differ much in size."""
    of_keys, of_values = (drawn_scales(keys.shape[:3], *span) for span in ((-1, 0.3), (-2, 2)))
    pages = empty_codes(keys, values, latent)
    slots = torch.arange(len(keys) * BLOCK, device=DEVICE)
    rows = (keys * of_keys.to(keys)).flatten(0, 1), (values * of_values.to(values)).flatten(0, 1)
    pages.write(slots, *rows)
    return pages


def drawn_scales(size: torch.Size, low: float, high: float) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return 10 ** (low + (high - low) * torch.rand(*size, 1, generator=generator))


def forget_unseen(
    pages: LayerPages, tables: Tensor, lengths: tuple[tuple[int, int], ...], info: AttentionInfo
) -> None:
    """Blocks before a window become a block of another sequence, whose scales are huge."""
    assert pages.key_scales is not None and pages.value_scales is not None
    others = len(pages.keys) - 1
    pages.key_scales[others] = pages.value_scales[others] = 1e30
    for row, (before, _) in enumerate(lengths):
        tables[row, : first_seen(before, info) // BLOCK] = others


def same_attention(
    sizes: tuple[int, int, int], latent: bool, lengths: tuple[tuple[int, int], ...],
    mask: dict[str, int | float | bool], dtype: torch.dtype, codes: bool = False,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    if latent:
        (heads, rank, rotated), kv_heads = sizes, 1
        width = rank + rotated
    else:
        (heads, kv_heads, width), rank = sizes, sizes[2]
    blocks = sum(blocks_of(sum(pair)) for pair in lengths)
    order, most = torch.randperm(blocks, generator=generator), max(map(sum, lengths))
    tables = torch.full((len(lengths), blocks_of(most)), -1, dtype=torch.int32)
    first = 0
    for row, pair in enumerate(lengths):
        count = blocks_of(sum(pair))
        tables[row, :count] = order[first : first + count]
        first += count
    size = (blocks + 1, BLOCK, kv_heads, width)
    keys = torch.randn(size, generator=generator).to(DEVICE, dtype)
    values = torch.randn(size, generator=generator).to(DEVICE, dtype)
    values = keys[..., :rank] if latent else values
    pages = coded(keys, values, latent) if codes else LayerPages(keys, values)
    tokens = sum(pair[1] for pair in lengths)
    queries = torch.randn((tokens, heads, width), generator=generator).to(DEVICE, dtype)
    info, tables = info_of(heads, mask), tables.to(DEVICE)
    if codes:
        forget_unseen(pages, tables, lengths, info)
    output = attended(queries, pages, list(lengths), tables, info)
    exact, weighted, in_float32 = expected(queries, pages, list(lengths), tables, info)
    rounding = 2e-6 * max(1, width / 128) ** 0.5 if dtype == torch.float32 else 2e-2
    if codes:
        # Queries and codes are exact in float16, odds are rounded to it, and the result once.
        unit = in_float32 if dtype == torch.float32 else 2.0**-11 + 1e-5
        finfo = torch.finfo(dtype)
        bound = unit * weighted + 1.01 * finfo.eps / 2 * (exact.abs() + finfo.tiny)
        wrong = ((output.double() - exact).abs() / bound).amax((1, 2))
        assert wrong.max() < 1, wrong
    else:
        wrong = (output.double() - exact).abs().amax((1, 2))
        assert wrong.max() < rounding, wrong
    singles = sum(1 for _, count in lengths if count == 1)
    for row in range(singles):  # alone, and with room for more parts, to the bit
        pair, at = lengths[row], slice(row, row + 1)
        alone = attended(queries[at], pages, [pair], tables[at], info, capacity=40)
        assert torch.equal(alone[0], output[row]), pair


def same_codes(latent: bool, dtype: torch.dtype) -> None:
    """The kernel writes the codes and scales that the CPU writes, to slots in any order."""
    from fivefold.generate.paged_kernel import write_pages

    generator, sizes = torch.Generator().manual_seed(2), (3, BLOCK, 1 if latent else 2)
    k, v = (torch.randn(*sizes, width, generator=generator) for width in (80, 48))
    k, v = (part * drawn_scales(part.shape[:3], -25, 25) for part in (k, v))
    k[1, 5], v = 0, k[..., :48] if latent else v
    plain, kernels = (
        empty_codes(k.to(device), v.to(device), latent) for device in (torch.device("cpu"), DEVICE)
    )
    slots = torch.randperm(3 * BLOCK, generator=generator)[:40]
    k, v = (part.flatten(0, 1)[:40].to(dtype) for part in (k, v))
    plain.write(slots, k, v)
    write_pages(kernels, slots.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
    for one, other in zip(kernels.stored, plain.stored, strict=True):
        # The interpreter's cast forgets to carry from a full mantissa.
        carried = (other.int() - one.cpu().int() == 8) & (other.int() % 8 == 0)
        carried &= INTERPRETED and other.dtype == torch.uint8
        assert (carried | (one.cpu() == other)).all()


def checks() -> dict[str, partial[None]]:
    dtypes = (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16)
    cases: dict[str, partial[None]] = {}
    for dtype in dtypes:
        for kinds, latent in ((HEADS, False), (LATENTS, True)):
            for kind, sizes in kinds.items():
                for name, mask in MASKS.items():
                    if kind != "heads of 128" and name in ("cap", "sinks", "chunks"):
                        continue
                    for steps, lengths in (("decode", DECODE), ("prompts", PROMPTS)):
                        case = f"{steps}, {kind}, {name}, {str(dtype)[6:]}"
                        cases[case] = partial(same_attention, sizes, latent, lengths, mask, dtype)
        for name in ("all", "sinks", "all of it"):
            case = f"few tokens after many, {name}, {str(dtype)[6:]}"
            sizes = HEADS["heads of 128"]
            cases[case] = partial(same_attention, sizes, False, FEW_TOKENS, MASKS[name], dtype)
    for dtype, latent in product(dtypes, (False, True)):  # the interpreter rounds ties otherwise
        case = f"fp8 codes of {'latents' if latent else 'heads'}, {str(dtype)[6:]}"
        cases[case] = partial(same_codes, latent, dtype)
    for dtype in (torch.float32, torch.float16) if INTERPRETED else dtypes:
        for kind in ("heads of 128", "heads of 96", "groups of 5", "latents", "narrow"):
            latent, sizes = kind in LATENTS, {**HEADS, **LATENTS}[kind]
            for name in ("all", "window", "chunks", "all of it"):
                for steps, lengths in (("decode", DECODE), ("prompts", PROMPTS)):
                    case = f"fp8 {steps}, {kind}, {name}, {str(dtype)[6:]}"
                    about = (sizes, latent, lengths, MASKS[name], dtype, True)
                    cases[case] = partial(same_attention, *about)
    return cases


@pytest.mark.parametrize("name", checks())
def test_attention_on_a_gpu(name: str) -> None:
    """In a process of its own: later tests fork, which no CUDA survives."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    failed = 0
    for case in sys.argv[1:] or checks():
        try:
            checks()[case]()
        except Exception as error:
            failed += 1
            print("FAILED ", case, type(error).__name__, str(error)[-600:], flush=True)
        else:
            print("passed ", case, flush=True)
    sys.exit(failed > 0)
