"""The tokenizer of the data is that of the model and of the run, or nothing is trained."""

from __future__ import annotations

from pathlib import Path

from fivefold.core import FivefoldError
from fivefold.core.model import TOKENIZER_FILES, files_in, model_folder, tokenizer_in
from fivefold.core.plan import Plan
from fivefold.data import Source, tokenizers_of
from fivefold.records import naming_file, tokenizer_of_run


def require_same_tokenizer(plan: Plan, data: str, folder: Path | None) -> None:
    """Refuse data whose tokenizer is not that of the model or of earlier steps."""
    where = model_folder(plan.options.model)
    model = None if where is None else tokenizer_in(where)
    before = None if folder is None else tokenizer_of_run(folder)
    for name, tokenizer in tokenizers_of(data).items():
        if model is not None and model.fingerprint != tokenizer.fingerprint:
            raise FivefoldError(
                f"{name} has other tokens than the model: the data is from {tokenizer}, and "
                f"{where} has {model}; write the data again with `fivefold tokens TEXT --tokenizer "
                f"{where} -o FOLDER`, and give it with --set data=FOLDER"
            )
        if before is not None and before.fingerprint != tokenizer.fingerprint:
            raise FivefoldError(
                f"{name} has other tokens than the run: the data is from {tokenizer}, and {folder} "
                f"was trained with {before}; give data of that tokenizer, or another folder with "
                "--out"
            )


def keep_tokenizer(folder: Path, source: Source) -> None:
    """Copy the tokenizer of the data to the run, which may be exported without the data."""
    for name, data in files_in(source.folders, TOKENIZER_FILES).items():
        if not (folder / name).exists():
            with naming_file(folder / name):
                (folder / name).write_bytes(data)
