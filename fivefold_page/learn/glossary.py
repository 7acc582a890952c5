"""The words of the page: each is defined once, here, and shown wherever a chapter first uses it.

`linked` finds the words in a text. A part of a linked text is {"text"}, and has "term", the key of
`GLOSSARY`, where it is the first use of a word, or "code" where it was between backticks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fivefold_page import View

GLOSSARY: dict[str, str] = {
    # The training step.
    "parameter": "One trained number of a model.",
    "weight": "A matrix of parameters: what a layer has learned.",
    "token": "A bit of text, about a short word, that the model reads as one number.",
    "sequence": "Consecutive tokens that the model reads together: one row of a batch.",
    "batch": "All sequences of one step, over all ranks: microbatch · accumulation · dp.",
    "microbatch": "The sequences that a rank computes at once. A step may have many of them.",
    "accumulation": "Adding up the gradients of several microbatches before the optimizer step.",
    "activation": "What a layer computes in the forward pass, and keeps for the backward pass.",
    "gradient": "How the loss changes with each parameter; the backward pass computes it.",
    "weight gradient": "The half of a backward pass that computes how to change the weights.",
    "input gradient": "The half of a backward pass that the layer before is waiting for.",
    "optimizer": "The rule that changes weights by their gradients. AdamW keeps two averages, "
    "the moments, for each parameter.",
    "optimizer state": "What an optimizer keeps from step to step, for each parameter.",
    "recomputation": "Dropping activations in the forward pass and computing them again in the "
    "backward pass: less memory, more time.",
    "gradient clipping": "Scaling all gradients down if together they are too large.",
    "loss scaling": "Multiplying the loss so that small gradients survive in few bits.",
    "bf16": "A number format of 2 bytes, with the range of float32 and fewer digits.",
    "FLOP": "One multiplication or addition. An H100 does almost 10¹⁵ in a second, in bf16.",
    "MFU": "Model FLOPs utilisation: the share of the GPU's peak that goes into the model's own "
    "arithmetic; recomputation does not count.",
    "matmul": "A multiplication of two matrices (GEMM): most of the arithmetic of a transformer.",
    "GiB": "2³⁰ bytes, about 1.07 billion.",
    "prefill": "The forward of a whole prompt, before the first token of an answer is drawn.",
    "decode": "The forwards after it, each with one new token of every answer.",
    "KV cache": "Keys and values of all earlier tokens, in every layer: what decode attends to.",
    # The ranks and the wires.
    "rank": "One process with one GPU, and its number among all of them.",
    "node": "One computer with several GPUs, usually 8.",
    "NVLink": "The fast links between the GPUs of a node.",
    "group": "The ranks that take part in a collective together.",
    "communicator": "NCCL's object for a group: who is in it, and its buffers.",
    "collective": "One communication call that all ranks of a group make together.",
    "all-reduce": "A collective: all ranks get the sum of what each of them has.",
    "all-gather": "A collective: all ranks get the shards of all of them, one after another.",
    "reduce-scatter": "A collective: the sum is computed, and each rank gets one shard of it.",
    "all-to-all": "A collective: every rank has a message for every other rank.",
    "broadcast": "A collective: one rank gives the same to all others.",
    "send and receive": "A message from one rank to another; nobody else takes part.",
    "overlap": "Communication that runs while the GPU computes something else.",
    "prefetch": "Fetching what is needed next while the present is being computed.",
    # The splits.
    "layout": "The degrees of all axes: how a job is spread over its ranks.",
    "axis": "One dimension of parallelism: dp, tp, pp, cp or ep.",
    "degree": "The number of ranks along an axis.",
    "coord": "The place of a rank on an axis.",
    "shard": "One rank's part of a tensor.",
    "data parallelism": "Every rank has the model and reads its own sequences (dp).",
    "tensor parallelism": "Every matrix is sharded over ranks that compute one layer together "
    "(tp).",
    "sequence parallelism": "Between sharded matrices each tp rank holds its own tokens, instead "
    "of a copy of all.",
    "pipeline parallelism": "Layers are cut into stages; microbatches pass from one to the next "
    "(pp).",
    "context parallelism": "The tokens of one sequence are sharded (cp).",
    "expert parallelism": "The experts of a layer are on different ranks, and tokens travel to "
    "them (ep).",
    "dp": "The degree of data parallelism.",
    "tp": "The degree of tensor parallelism.",
    "pp": "The degree of pipeline parallelism: the number of pipeline ranks.",
    "cp": "The degree of context parallelism.",
    "ep": "The degree of expert parallelism.",
    "edp": "How many copies of each expert there are: the ranks of a stage, divided by the ranks "
    "that share the experts.",
    "etp": "The degree of tensor parallelism inside of each expert.",
    "ZeRO": "Sharding what data-parallel ranks would all hold: optimizer states (stage 1), "
    "gradients too (stage 2), weights too (stage 3).",
    "flat unit": "Weights that are gathered together, and whose gradients are reduced together; "
    "most often one layer.",
    "offload": "Keeping what is not needed now in the memory of the host.",
    # The pipeline, the context, the experts.
    "stage": "Consecutive layers of the model: what one pipeline rank computes.",
    "chunk": "One of several stages on the same pipeline rank.",
    "schedule": "The order in which a pipeline rank computes its microbatches, forward and back.",
    "1F1B": "The usual schedule: one forward pass, then one backward pass, in turn.",
    "bubble": "The share of a step in which pipeline ranks wait for others.",
    "keys and values": "What attention stores of each token, so that later tokens can look it up.",
    "Ulysses": "Context parallelism by all-to-all: before attention each rank gets all tokens of "
    "some heads, and after it gives them back.",
    "zigzag": "Dealing a sequence out so that each rank has an early and a late part: all have "
    "the same work.",
    "expert": "One of several MLPs of a layer, of which a token uses only a few.",
    "router": "The small matrix that chooses the experts of each token.",
    # What is known about a run.
    "planner": "What estimates all layouts of a job and ranks them: `fivefold plan`.",
    "estimate": "A number that the planner computed, without running anything.",
    "peak memory": "The largest number of bytes that a rank's tensors take at once in a step.",
    "allocated": "Memory of live tensors, as torch counts it.",
    "reserved": "Memory that torch took from the GPU, whether or not a tensor uses it now.",
}
# Other forms of a word; plurals with s are found without them.
_FORMS = {
    "axes": "axis",
    "batches": "batch",
    "microbatches": "microbatch",
    "GEMM": "matmul",
    "dimension": "axis",
    "all-to-alls": "all-to-all",
    "optimizer states": "optimizer state",
    "sends and receives": "send and receive",
    "layouts": "layout",
    "data-parallel": "data parallelism",
    "recomputes": "recomputation",
    "accumulate": "accumulation",
    "gradients": "gradient",
    "states of the optimizer": "optimizer state",
}


def _pattern() -> re.Pattern[str]:
    forms = sorted([*GLOSSARY, *_FORMS], key=len, reverse=True)
    return re.compile(
        rf"(?<![\w-])({'|'.join(map(re.escape, forms))})(s?)(?![\w-]| \d)", re.IGNORECASE
    )


_WORDS = _pattern()
_KEYS = {form.lower(): form for form in GLOSSARY} | {
    form.lower(): term for form, term in _FORMS.items()
}


def linked(text: str, seen: set[str]) -> list[View]:
    """The text in parts; words that are not in `seen` are linked, and added to it.

    >>> linked("Two ranks, one `rank 0`.", set())
    [{'text': 'Two '}, {'text': 'ranks', 'term': 'rank'}, {'text': ', one '}, {'text': 'rank 0', \
'code': True}, {'text': '.'}]
    """
    parts: list[View] = []
    for index, piece in enumerate(text.split("`")):
        parts += [{"text": piece, "code": True}] if index % 2 else _words(piece, seen)
    return [part for part in parts if part["text"]]


def _words(text: str, seen: set[str]) -> Iterator[View]:
    start = 0
    for match in _WORDS.finditer(text):
        term = _KEYS[match[1].lower()]
        if term in seen:
            continue
        seen.add(term)
        yield {"text": text[start : match.start()]}
        yield {"text": match[0], "term": term}
        start = match.end()
    yield {"text": text[start:]}
