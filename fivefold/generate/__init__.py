"""Generation: text from a trained model, with the modules that trained it.

One step is schedule → forward → sample. The scheduler takes tokens of many sequences into one
`StepBatch` (new prompts in chunks, and the last token of every other sequence), the forward runs
the model's own modules over it as one row, and the sampler draws the next token of each sequence
that is complete so far. Keys and values are kept in pages (`cache.py`), which enter the model by
the seam of its attention; blocks of pages are counted in `blocks.py`.

Scheduler, blocks and sampler know no device and no rank: a layout replaces only the forward.
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
