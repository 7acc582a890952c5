"""Weights of TorchTitan, in and out: folders by its written-out names, damage, and its own code."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small import DEEPSEEK, GPT, LLAMA, MOE, batch_of, filled
from test_hf_files import run_within
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from fivefold import cli
from fivefold.bridges.torchtitan_weights import VERSIONS, notes_on, refuse_others
from fivefold.core.errors import FivefoldError
from fivefold.core.layout.weight_table import weights
from fivefold.core.model import presets as models
from fivefold.core.model.shape import Rope, Shape
from fivefold.huggingface.config_export import as_hf
from fivefold.model.decoder import Decoder, from_config
from fivefold.train.checkpoint.checkpoints import Reader
from fivefold.train.checkpoint.folders import published

LLAMA3 = replace(LLAMA, name="llama3", layers=2, rope=Rope("llama3", 8.0, 8192), rope_theta=5e5)
QWEN3 = replace(
    LLAMA3, name="qwen3", family="qwen3", qk_norm="head", head_dim=8, norm_eps=1e-6, rope=None
)
# Of a layer: its name in 0.2.2, its name from 0.3 on, and ours.
BLOCK = [
    ("attention.wq", "attention.qkv_linear.wq", "attention.q"),
    ("attention.wk", "attention.qkv_linear.wk", "attention.k"),
    ("attention.wv", "attention.qkv_linear.wv", "attention.v"),
    ("attention.wo", "attention.wo", "attention.out"),
    ("feed_forward.w1", "feed_forward.w1", "mlp.gate"),
    ("feed_forward.w2", "feed_forward.w2", "mlp.down"),
    ("feed_forward.w3", "feed_forward.w3", "mlp.up"),
    ("attention_norm", "attention_norm", "attention_norm"),
    ("ffn_norm", "ffn_norm", "mlp_norm"),
]
QK_NORMS = ["attention.q_norm", "attention.k_norm"]
JUDGED = {  # format, and the model
    "llama3": ("torchtitan", LLAMA3),
    "llama3-tied": ("torchtitan", replace(LLAMA3, tied=True, kv_heads=4, rope=None)),
    "qwen3": ("torchtitan", QWEN3),
    "qwen3-tied": ("torchtitan", replace(QWEN3, tied=True)),
    "llama3-new": ("torchtitan-main", LLAMA3),
    "llama3-new-tied": ("torchtitan-main", replace(LLAMA3, tied=True, rope=None)),
    "qwen3-new": ("torchtitan-main", QWEN3),
    "qwen3-new-tied": ("torchtitan-main", replace(QWEN3, tied=True)),
}


def written_names(form: str, shape: Shape) -> dict[str, str]:
    """Every name of a folder, and ours."""
    is_new = form == "torchtitan-main"
    block = {new if is_new else old: ours for old, new, ours in BLOCK}
    block |= {name: name for name in QK_NORMS if shape.qk_norm == "head"}
    head = "lm_head.weight" if is_new else "output.weight"
    return {
        "tok_embeddings.weight": "embed.weight",
        "norm.weight": "norm.weight",
        head: "embed.weight" if shape.tied else "head.weight",
        **{
            f"layers.{i}.{theirs}.weight": f"blocks.{i}.{ours}.weight"
            for i in range(shape.layers)
            for theirs, ours in block.items()
        },
    }


def logits_of(decoder: Decoder) -> Tensor:
    batch = batch_of(decoder.shape, seq=24)
    assert decoder.head is not None
    decoder.head.cross_entropy = lambda logits, labels: logits
    with torch.no_grad():
        return decoder(batch.tokens, batch)


def of_run(run: Path, shape: Shape) -> Decoder:
    """The model of the only checkpoint of a run, in float64."""
    (checkpoint,) = published(run / "checkpoints")
    reader = Reader(checkpoint)
    decoder = from_config(shape, dtype=torch.float64)
    state = {key.removeprefix("model/"): reader.read(key) for key in reader.tensors}
    decoder.load_state_dict(state, strict=not shape.tied)
    return decoder


def titan_state(form: str, shape: Shape, decoder: Decoder) -> dict[str, Tensor]:
    """What a folder holds if its rows are those of this decoder."""
    state = decoder.state_dict()
    names = written_names(form, shape).items()
    return {theirs: state[ours].detach().clone() for theirs, ours in names}


def config_of(shape: Shape, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(as_hf(shape, "float32").config))
    return folder


def saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def loaded(folder: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """As its CheckpointManager loads a folder."""
    state = {name: torch.full_like(each, torch.nan) for name, each in like.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def fivefold(*words: object) -> None:
    assert cli.run([str(word) for word in words]) == 0


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.run([str(word) for word in words]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", JUDGED)
def test_there_and_back_by_written_names(name: str, tmp_path: Path) -> None:
    """Its llama3 rotates neighbours: our model computes the same if it does so too."""
    form, shape = JUDGED[name]
    theirs = filled(replace(shape, rope_interleaved=shape.qk_norm == "none"), torch.float32)
    state = titan_state(form, shape, theirs)
    folder = saved(tmp_path / "step-10", state)
    config = config_of(shape, tmp_path / "config")
    fivefold("import", tmp_path, "--model", config, "-o", tmp_path / "run")
    fivefold("export", tmp_path / "run", tmp_path / "out", "--format", form)

    ours = of_run(tmp_path / "run", models.load(str(tmp_path / "run" / "config.json")))
    torch.testing.assert_close(logits_of(ours), logits_of(theirs.double()), rtol=1e-10, atol=1e-10)
    back = loaded(tmp_path / "out", state)
    assert all(torch.equal(back[each], values) for each, values in state.items())
    written = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    assert written.state_dict_metadata.keys() == state.keys()
    assert loaded(folder, state).keys() == back.keys()


def save_on_two_ranks(rank: int, folder: Path, state: dict[str, Tensor]) -> None:
    dist.init_process_group("gloo", f"file://{folder}.store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    sharded = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in state.items()}
    moments = {f"state.{name}.exp_avg": torch.ones(2) for name in state}
    beside = {
        "optimizer": {**moments, "param_groups.norm.weight.lr": 0.1},
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": torch.tensor(3), "losses": [1.0, "text"]},
        "dataloader": {f"dp_rank_{rank}": pickle.dumps([rank])},
    }
    dcp.save({**sharded, **beside}, checkpoint_id=folder)
    dist.destroy_process_group()


def test_a_full_save_of_two_ranks(tmp_path: Path) -> None:
    """The tensors of 67 rows are cut unevenly; states beside them are never opened."""
    shape = replace(LLAMA3, tied=True)
    state = titan_state("torchtitan", shape, filled(shape, torch.bfloat16))
    for step in (3, 20):
        folder = tmp_path / "checkpoint" / f"step-{step}"
        folder.parent.mkdir(exist_ok=True)
        fork = multiprocessing.get_context("fork")
        marked = {name: each + step for name, each in state.items()}
        ranks = [fork.Process(target=save_on_two_ranks, args=(r, folder, marked)) for r in (0, 1)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(60)
        assert [each.exitcode for each in ranks] == [0, 0]
    config = config_of(shape, tmp_path / "config")
    fivefold("import", tmp_path / "checkpoint", "--model", config, "-o", tmp_path / "run")
    (checkpoint,) = published(tmp_path / "run" / "checkpoints")
    found = Reader(checkpoint).read("model/embed.weight")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, state["tok_embeddings.weight"] + 20)
    assert 'precision = "bf16"' in (tmp_path / "run" / "plan.toml").read_text()


def test_a_full_save_of_0_1(tmp_path: Path) -> None:
    state = titan_state("torchtitan", LLAMA3, filled(LLAMA3, torch.float32))
    folder = saved(tmp_path / "in", {"model": {**state, "freqs_cis": torch.ones(2)}})
    fivefold("import", folder, "--model", config_of(LLAMA3, tmp_path / "c"), "-o", tmp_path / "run")
    (checkpoint,) = published(tmp_path / "run" / "checkpoints")
    assert len(Reader(checkpoint).tensors) == len(weights(LLAMA3))


def test_a_preset_names_the_model(tmp_path: Path) -> None:
    shape = models.load("tiny")
    state = titan_state("torchtitan", shape, filled(shape, torch.float32))
    fivefold("import", saved(tmp_path / "in", state), "--model", "Tiny", "-o", tmp_path / "run")
    assert 'model = "Tiny"' in (tmp_path / "run" / "plan.toml").read_text()
    fivefold("export", tmp_path / "run", tmp_path / "hf")


@pytest.mark.sample(0.25)
def test_the_whole_model_is_never_in_memory(tmp_path: Path) -> None:
    """In a folder of one file, as one rank of TorchTitan saves it."""
    shape = replace(LLAMA3, layers=28, width=384, head_dim=96, ffn=1024, vocab=1000)
    state = titan_state("torchtitan", shape, filled(shape, torch.float32))
    saved(tmp_path / "in", state)
    size = sum(each.nbytes for each in state.values())
    words = f"--model {config_of(shape, tmp_path / 'config')} -o {tmp_path}/run"
    out = f"export {tmp_path}/run {tmp_path}/out --format torchtitan"
    run_within(2 * size // 5, size, f"import {tmp_path}/in {words}", out)
    back = loaded(tmp_path / "out", state)
    assert all(torch.equal(back[each], values) for each, values in state.items())


# What is refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = titan_state("torchtitan", LLAMA3, filled(LLAMA3, torch.float32))
    config_of(LLAMA3, tmp_path / "config")
    return saved(tmp_path / "in", state)


def test_the_model_is_named_and_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder.with_name("run")
    said = refused(capsys, "import", folder, "-o", run)
    assert "does not say what its model is: name it with --model, a preset, a config.json" in said
    config = config_of(replace(LLAMA3, ffn=41), folder.with_name("other"))
    said = refused(capsys, "import", folder, "--model", config, "-o", run)
    wanted = "layers.0.feed_forward.w1.weight has shape (40, 24), but other asks for (41, 24): give"
    assert wanted in said and "--model" in said
    config = config_of(QWEN3, folder.with_name("qwen3"))
    said = refused(capsys, "import", folder, "--model", config, "-o", run)
    assert "layers.1.attention.q_norm.weight is missing, and qwen3 has it" in said
    config = config_of(replace(LLAMA3, layers=1), folder.with_name("short"))
    said = refused(capsys, "import", folder, "--model", config, "-o", run)
    assert "layers.1.attention.wk.weight is not in short" in said
    said = refused(capsys, "import", folder.with_name("short"), "--model", "tiny", "-o", run)
    assert "its own config.json names the model" in said
    assert not run.exists()


def cut(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 40)


def overwrite(folder: Path) -> None:
    """What is inside of the file is no longer what torch wrote."""
    path = folder / "__0_0.distcp"
    path.write_bytes(b"\0" * path.stat().st_size)


def drop(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def interrupt(folder: Path) -> None:
    (folder / ".metadata").unlink()


def halve(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[: len(data) // 2])


class Evil:
    """A pickle that leaves a trace when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.trace),)


def forge(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Evil(folder.with_name("ran"))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def thin(folder: Path) -> None:
    """As if a rank had not saved its half."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    chunk = metadata.state_dict_metadata["norm.weight"].chunks[0]
    chunk.sizes = torch.Size([12])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def shift(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    chunk = metadata.state_dict_metadata["norm.weight"].chunks[0]
    chunk.offsets = torch.Size([12])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def shift_rows(folder: Path) -> None:
    """Outside of one dimension, inside of the other."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    chunk = metadata.state_dict_metadata["output.weight"].chunks[0]
    chunk.offsets = torch.Size([1, 0])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def forget(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    found = [each for each in metadata.storage_data if each.fqn == "norm.weight"]
    del metadata.storage_data[found[0]]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "copy this file again"),
        (overwrite, "cannot be read"),
        (drop, "names the file __0_0.distcp, which is none of its files"),
        (interrupt, "has no .metadata: its save was not finished"),
        (halve, "is no metadata of a checkpoint: copy the folder again"),
        (forge, "could run any program; it was not opened"),
        (thin, "norm.weight is not complete"),
        (shift, "norm.weight has values outside of its shape (24,)"),
        (shift_rows, "output.weight has values outside of its shape ("),
        (forget, "norm.weight is in no file"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_folder(
    folder: Path, damage: Callable[[Path], None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    run = folder.with_name("run")
    said = refused(capsys, "import", folder, "--model", folder.with_name("config"), "-o", run)
    assert words in said
    assert not folder.with_name("ran").exists()
    assert not [path for path in run.rglob("*") if path.is_file()]
    assert not published(run / "checkpoints")


def test_folders_of_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = folder.with_name("config"), folder.with_name("run")
    fivefold("import", folder, "--model", config, "-o", run)
    capsys.readouterr()
    own, other = run / "checkpoints" / "step-00000000", folder.with_name("other")
    said = refused(capsys, "import", own, "--model", config, "-o", other)
    assert "is a checkpoint of fivefold: train, generate and export take its run" in said
    saved(folder.with_name("foreign"), {"decoder.weight": torch.ones(2)})
    words = ("import", folder.with_name("foreign"), "--model", config, "-o", other)
    said = refused(capsys, *words)
    assert "has no tok_embeddings.weight" in said and "decoder.weight" in said
    numbers = loaded(folder, {"norm.weight": torch.ones(24)})["norm.weight"].long()
    state = titan_state("torchtitan", LLAMA3, filled(LLAMA3, torch.float32))
    saved(folder.with_name("whole"), {**state, "norm.weight": numbers})
    said = refused(capsys, "import", folder.with_name("whole"), "--model", config, "-o", other)
    assert "norm.weight has type torch.int64" in said
    assert not other.exists()


def test_a_head_that_learned_on_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(replace(LLAMA3, tied=True), folder.with_name("tied"))
    said = refused(capsys, "import", folder, "--model", config, "-o", folder.with_name("run"))
    assert "output.weight differs from tok_embeddings.weight" in said
    assert "tie_word_embeddings false" in said


def test_export_refuses_and_tells(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = folder.with_name("run"), folder.with_name("out")
    fivefold("import", folder, "--model", folder.with_name("config"), "-o", run)
    capsys.readouterr()
    assert "did you mean torchtitan" in refused(capsys, "export", run, out, "--format", "titan")
    words = ("export", run, out, "--format", "torchtitan")
    assert "leave one out" in refused(capsys, *words, "--adapter")
    assert "is there already" in refused(capsys, "export", run, folder, *words[3:])
    assert not out.exists()
    fivefold(*words, "--dtype", "bf16")
    said = capsys.readouterr().out
    assert f'TorchTitan up to 0.2.2 loads it with checkpoint.initial_load_path = "{out}"' in said
    assert not list(out.glob("*.json")) and len(list(out.iterdir())) == 22


def test_families() -> None:
    old, new = VERSIONS["torchtitan"], VERSIONS["torchtitan-main"]
    for preset in ("llama-2-7b", "llama-3.1-405b", "llama-3.2-1b", "qwen3-0.6b", "qwen3-32b"):
        refuse_others(models.load(preset), old)
        refuse_others(models.load(preset), new)
    for shape in (GPT, MOE, DEEPSEEK, models.load("qwen2.5-7b"), models.load("qwen3-30b-a3b")):
        with pytest.raises(FivefoldError, match=r"neither a dense Llama .*\.initial_load_in_hf"):
            refuse_others(shape, old)
    with pytest.raises(FivefoldError, match="qkv_bias = True"):
        refuse_others(models.load("qwen2.5-7b"), new)
    wide = replace(LLAMA3, head_dim=8)
    refuse_others(wide, new)
    with pytest.raises(FivefoldError, match="head_dim = 8"):
        refuse_others(wide, old)
    assert notes_on(LLAMA3, old) == [] == notes_on(QWEN3, old)
    (note,) = notes_on(replace(LLAMA3, rope=None), old)
    assert "scaling_factor=1.0" in note
    scaled, untied = notes_on(models.load("llama-3.2-1b"), old)
    assert "scaling_factor=32.0" in scaled and "output.weight is a copy" in untied
    assert notes_on(models.load("llama-3.2-1b"), new) == []
