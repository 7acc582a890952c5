"""What is recorded of a training run: its steps, where the time went, and a summary.

`StepRecord` is one line of `metrics.jsonl`. A run may be started several times. Steps that a
restart repeats are lost: they count as time, but not as training. Other modules of this package
write the run folder (`run_folder`), read it back (`run_reader`), describe what the ranks did in a
step (`spans`), and compare a measured step with the plan (`deviation`). Nothing here loads torch.
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
