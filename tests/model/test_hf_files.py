"""Import and export: models that `transformers` saved come back equal, broken folders do not."""

from __future__ import annotations

import errno
import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small import DEEPSEEK, LLAMA, batch_of, filled, state_from_hf
from test_hf_parity import CONFIGS, Float64Everywhere

from fivefold import cli
from fivefold.core.errors import BadFile
from fivefold.core.layout.weight_table import buffers, weights
from fivefold.core.model import presets as models
from fivefold.core.model.shape import Moe, Shape
from fivefold.core.plan import plan
from fivefold.huggingface.config_export import as_hf
from fivefold.huggingface.files import HfFolder, write_model
from fivefold.model.decoder import Decoder, from_config
from fivefold.train.checkpoint.checkpoints import Reader
from fivefold.train.checkpoint.folders import published

F32 = torch.float32
ANY_SIZE = 10**9


def built(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )


def shaken(name: str) -> Any:
    """A model of the package with random weights, none of them 1 or 0."""
    torch.manual_seed(0)
    theirs = built(CONFIGS[name]())
    with torch.no_grad():
        for each in theirs.parameters():
            each.add_(0.1 * torch.randn_like(each))
        for each_name, each in theirs.named_buffers():
            if each_name.endswith("e_score_correction_bias"):
                each.copy_(0.1 * torch.randn_like(each))
    return theirs.eval()


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """What the package makes of a folder, and what it missed or did not expect there."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )


def imported(run: Path) -> Decoder:
    """Our model in float64, from the only checkpoint of a run."""
    shape = models.load(str(run / "config.json"))
    ours = from_config(shape, dtype=torch.float64)
    (checkpoint,) = published(run / "checkpoints")
    reader = Reader(checkpoint)
    state = {key.removeprefix("model/"): reader.read(key) for key in reader.tensors}
    ours.load_state_dict(state, strict=not shape.tied)
    return ours


def fivefold(*words: object) -> None:
    assert cli.run([str(word) for word in words]) == 0


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def in_float64(theirs: Any) -> Any:
    """A model of the package that computes in float64 throughout, its rotary tables too."""
    with Float64Everywhere():
        wide = built(theirs.config).double()
    wide.load_state_dict(theirs.state_dict())
    return wide.eval()


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    theirs, given, run, out = shaken(name), *(tmp_path / each for each in ("in", "run", "out"))
    theirs.save_pretrained(given, max_shard_size="50KB")
    fivefold("import", given, "-o", run)
    fivefold("export", run, out, "--shard-gb", 5e-5)

    expected, found = all_tensors(given), all_tensors(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[each], tensor) for each, tensor in expected.items())
    back, told = loaded(out)
    assert not any(told.values()), told
    ours = imported(run)
    batch = batch_of(ours.shape, seq=24)
    with torch.no_grad():
        assert torch.equal(back(batch.tokens).logits, theirs(batch.tokens).logits)
        with Float64Everywhere():
            logits = in_float64(theirs)(batch.tokens).logits
        assert ours.head is not None
        ours.head.cross_entropy = lambda logits, labels: logits
        mine = ours(batch.tokens, batch)
    torch.testing.assert_close(mine, logits.flatten(0, 1), rtol=1e-10, atol=1e-10)


# Folders


def written(folder: Path, shape: Shape, dtype: torch.dtype = F32, most: int = ANY_SIZE) -> Decoder:
    """A model of ours, and a folder of it."""
    decoder = filled(shape, F32)
    state = decoder.state_dict()
    config = as_hf(shape, "float32").config
    write_model(folder, shape, config, state.__getitem__, dtype, most)
    return decoder


def changed(file: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(file) | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, file)


def edited(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def problems(folder: Path, shape: Shape) -> list[str]:
    with pytest.raises(BadFile) as caught:
        HfFolder(folder, shape)
    return caught.value.problems


def test_layers_ahead_go_out_under_their_published_names_and_come_back(tmp_path: Path) -> None:
    decoder = written(tmp_path / "model", DEEPSEEK, most=20_000)
    source = HfFolder(tmp_path / "model", DEEPSEEK)
    state = decoder.state_dict()
    for weight in (*weights(DEEPSEEK), *buffers(DEEPSEEK)):
        assert torch.equal(source.weight(weight, F32), state[weight.name])
    _, told = loaded(tmp_path / "model")
    assert told["unexpected_keys"], "the package knows of layers ahead now: load them too"
    assert all(name.startswith("model.layers.3.") for name in told["unexpected_keys"])
    assert not told["missing_keys"] and not told["mismatched_keys"]


def test_shards_are_as_small_as_asked_and_indexed(tmp_path: Path) -> None:
    written(tmp_path / "model", DEEPSEEK, torch.bfloat16, most=8_000)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    held = {file.name: load_file(file) for file in files}
    sizes = {name: sum(each.nbytes for each in inner.values()) for name, inner in held.items()}
    assert all(size <= 8_000 or len(held[name]) == 1 for name, size in sizes.items())
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert index["weight_map"] == {each: name for name, inner in held.items() for each in inner}
    kinds = {each: tensor.dtype for inner in held.values() for each, tensor in inner.items()}
    bias = {each for each in kinds if each.endswith("e_score_correction_bias")}
    assert {each for each, dtype in kinds.items() if dtype == F32} == bias != set()


def test_blocks_of_8_bits_are_widened(tmp_path: Path) -> None:
    folder, block = tmp_path / "model", (16, 8)
    written(folder, DEEPSEEK)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    edited(folder / "config.json", **config)
    tensors = load_file(folder / "model.safetensors")
    expected = {name: each for name, each in tensors.items() if "_proj.weight" not in name}
    for name in tensors.keys() - expected.keys():
        each = tensors[name]
        rows, columns = (-(-size // part) for size, part in zip(each.shape, block, strict=True))
        scale = torch.rand(rows, columns) + 0.5
        small = each.to(torch.float8_e4m3fn)
        expected[name] = small.float()
        for i in range(each.shape[0]):
            for j in range(each.shape[1]):
                expected[name][i, j] *= scale[i // block[0], j // block[1]]
        tensors |= {name: small, f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors")
    source, wanted = HfFolder(folder, DEEPSEEK), state_from_hf(DEEPSEEK, expected)
    for weight in (*weights(DEEPSEEK), *buffers(DEEPSEEK)):
        assert torch.equal(source.weight(weight, F32), wanted[weight.name])

    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    (only,) = problems(folder, DEEPSEEK)
    assert only.startswith(f"{name} has type F8_E4M3 and no {name}_scale_inv")
    edited(folder / "config.json", quantization_config={"quant_method": "gptq"})
    assert "quant_method = 'gptq'" in problems(folder, DEEPSEEK)[0]


def test_weights_of_16_bits_stay_so(tmp_path: Path) -> None:
    decoder = written(tmp_path / "model", DEEPSEEK, torch.bfloat16)
    fivefold("import", tmp_path / "model", "-o", tmp_path / "run")
    fivefold("import", tmp_path / "model", "-o", tmp_path / "wide", "--dtype", "float32")
    narrow = Reader(*published(tmp_path / "run" / "checkpoints"))
    wide = Reader(*published(tmp_path / "wide" / "checkpoints"))
    for name, each in decoder.state_dict().items():
        dtype = F32 if name.endswith("router.bias") else torch.bfloat16
        assert narrow.tensors[f"model/{name}"] == (tuple(each.shape), dtype)
        assert torch.equal(narrow.read(f"model/{name}"), each.to(dtype))
        assert torch.equal(wide.read(f"model/{name}"), each.to(dtype).float())
    assert plan.read(tmp_path / "run" / "plan.toml").precision == "bf16"
    assert plan.read(tmp_path / "wide" / "plan.toml").precision == "fp32"
    assert plan.resolve(plan.read(tmp_path / "run" / "plan.toml")).layout.world == 1
    assert not plan.says_layout(
        str(tmp_path / "run" / "plan.toml")
    )  # for the GPUs of whoever trains


def test_every_problem_of_a_folder_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    written(folder, DEEPSEEK, most=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    norm, up = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"
    gone, cut = index["model.embed_tokens.weight"], index["lm_head.weight"]
    assert len({gone, cut, index[norm], index[up]}) >= 3 and index[norm] not in (gone, cut)
    changed(folder / index[norm], {norm: None})
    changed(folder / index[up], {up: torch.zeros(41, 24), "model.stranger": torch.zeros(2)})
    (folder / gone).unlink()
    with (folder / cut).open("r+b") as file:
        file.truncate(9_000)
    assert cli.run(["import", str(folder), "-o", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"{gone} is not there, and model.safetensors.index.json names it" in said
    assert f"{cut} is no whole safetensors file" in said
    assert f"{norm} is missing" in said
    assert f"{up} has shape (41, 24), but the config asks for (40, 24)" in said
    assert "model.stranger is not in the model" in said
    assert len(said.splitlines()) == 6, "what a lost file held is no further problem"
    assert not (tmp_path / "run").exists()


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    written(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    (only,) = problems(tmp_path, LLAMA)
    assert "pytorch_model.bin is a pickle, which can run any program" in only
    assert "save_pretrained" in only


def test_two_values_for_one_weight_are_refused(tmp_path: Path) -> None:
    tied = replace(LLAMA, tied=True)
    written(tmp_path / "tied", tied)
    embedding = load_file(tmp_path / "tied" / "model.safetensors")["model.embed_tokens.weight"]
    changed(tmp_path / "tied" / "model.safetensors", {"lm_head.weight": embedding})
    HfFolder(tmp_path / "tied", tied)
    changed(tmp_path / "tied" / "model.safetensors", {"lm_head.weight": embedding + 1})
    (only,) = problems(tmp_path / "tied", tied)
    assert only.startswith("lm_head.weight differs from model.embed_tokens.weight")

    written(tmp_path / "twice", LLAMA)
    file = tmp_path / "twice" / "model.safetensors"
    file.with_name("other.safetensors").write_bytes(file.read_bytes())
    (only,) = problems(tmp_path / "twice", LLAMA)
    assert only.startswith("other.safetensors has ") and "as model.safetensors has" in only


def test_other_types_and_a_broken_index_are_refused(tmp_path: Path) -> None:
    written(tmp_path, LLAMA)
    name = "model.layers.0.self_attn.q_proj.weight"
    changed(tmp_path / "model.safetensors", {name: torch.zeros(24, 24, dtype=torch.int8)})
    (only,) = problems(tmp_path, LLAMA)
    assert only.startswith(f"{name} has type I8")
    for text in ("{", "[]", "{}", '{"weight_map": {"a": "../a.safetensors"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        assert "download it again" in problems(tmp_path, LLAMA)[0]


# Runs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    written(tmp_path / "model", LLAMA)
    fivefold("import", tmp_path / "model", "-o", tmp_path / "run")
    return tmp_path / "run"


def test_export_takes_the_step_asked_for_or_the_newest_good_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = run / "checkpoints" / "step-00000010"
    shutil.copytree(run / "checkpoints" / "step-00000000", later)
    (later / "manifest.json").write_text("{}")
    capsys.readouterr()
    fivefold("export", run, tmp_path / "out", "--json")
    said = capsys.readouterr()
    assert json.loads(said.out)["step"] == 0 and json.loads(said.out)["files"]
    assert "step-00000010" in said.err
    assert cli.run(["export", str(run), str(tmp_path / "b"), "--step", "10"]) == 2
    assert cli.run(["export", str(run), str(tmp_path / "b"), "--step", "7"]) == 2
    assert "no checkpoint of step 7: choose from 0, 10" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert cli.run(["export", str(run), str(tmp_path / "b")]) == 2
    assert not (tmp_path / "b").exists()


def test_nothing_is_overwritten(run: Path, tmp_path: Path) -> None:
    assert cli.run(["import", str(tmp_path / "model"), "-o", str(run)]) == 2
    assert cli.run(["export", str(run), str(tmp_path / "model")]) == 2
    (tmp_path / "empty").mkdir()
    fivefold("export", run, tmp_path / "empty", "--dtype", "float32")


def test_a_checkpoint_of_another_model_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(run / "config.json", intermediate_size=44, num_hidden_layers=5)
    assert cli.run(["export", str(run), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "blocks.0.mlp.up.weight has shape (40, 24), and the plan asks for (44, 24)" in said
    assert "more" in said and len(said.splitlines()) < 10


def test_a_full_disk_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fivefold.huggingface.files.os.fsync", full)
    assert cli.run(["export", str(run), str(tmp_path / "out")]) == 2
    assert "No space left on device; free some room" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


# Memory

BIG = replace(
    LLAMA,
    family="mixtral",
    layers=12,
    width=256,
    head_dim=64,
    ffn=512,
    vocab=1000,
    moe=Moe(experts=8, top_k=2, ffn=512, renormalise=True),
)
WITHIN = """
import resource, sys, torch
from fivefold import cli
from fivefold.commands import titan_weights
torch.set_num_threads(1)
room, size = map(int, sys.argv[1:3])
used = next(line for line in open("/proc/self/status") if line.startswith("VmData:"))
resource.setrlimit(resource.RLIMIT_DATA, (int(used.split()[1]) * 1024 + room,) * 2)
try:
    torch.empty(size, dtype=torch.uint8)
except RuntimeError:
    pass
else:
    sys.exit("the limit does not hold")
for words in sys.argv[3:]:
    assert cli.run(words.split()) == 0
"""


def run_within(room: int, size: int, *commands: str) -> None:
    """Commands in a process that gets no more memory than `room`, where the model has `size`."""
    command = [sys.executable, "-c", WITHIN, str(room), str(size), *commands]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.sample(0.25)
def test_the_whole_model_is_never_in_memory(tmp_path: Path) -> None:
    sizes = {each.name: each.shape for each in weights(BIG)}
    config = as_hf(BIG, "float32").config
    given, out = tmp_path / "in", tmp_path / "out"
    write_model(given, BIG, config, lambda name: torch.randn(sizes[name]), F32, 3_000_000)
    size = sum(file.stat().st_size for file in given.glob("*.safetensors"))
    room = 2 * size // 5
    run = tmp_path / "run"
    run_within(room, size, f"import {given} -o {run}", f"export {run} {out} --shard-gb 0.003")
    files = sorted(given.glob("*.safetensors"))
    assert len(files) > 30 and room > 3 * max(math.prod(each) for each in sizes.values()) * 4
    assert all(file.read_bytes() == (out / file.name).read_bytes() for file in files)
