"""Bad checkpoints: each is refused before anything is loaded, in one error that says why."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers_checkpoints import make_checkpoint, rewrite_config
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moeserve.model.checkpoint import CheckpointError, open_checkpoint, read_tensor
from moeserve.model.loader import load_experts, open_weights, required_tensors
from moeserve.model.spec import read_spec

NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("good"), "qwen3_moe")


@pytest.fixture(scope="module")
def good_shards(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    return make_checkpoint(path, "qwen3_moe", max_shard_size="300KB")


@pytest.fixture
def folder(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


@pytest.fixture
def shards(good_shards, tmp_path) -> Path:
    return Path(shutil.copytree(good_shards, tmp_path / "copy"))


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_weights(folder, read_spec(folder), torch.float32)
    return str(error.value)


def test_a_good_one_is_read_whole_and_expert_by_expert(good, good_shards):
    spec = read_spec(good)
    tensors = load_file(good / "model.safetensors")
    for path in (good, good_shards):
        source = open_weights(path, spec, torch.float32)
        for name, shape in required_tensors(spec, tensors).items():
            assert torch.equal(source.take(name, shape), tensors[name])
        w13, w2 = source.expert(1, 3)
        prefix = "model.layers.1.mlp.experts.3"
        gate, up, down = (tensors[f"{prefix}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        assert torch.equal(w13, torch.cat((gate, up)))
        assert torch.equal(w2, down)


def test_fused_experts_are_the_same(good, tmp_path):
    spec = read_spec(make_checkpoint(tmp_path, "qwen3_moe", fused=True))
    fused = open_weights(tmp_path, spec, torch.float32)
    single = open_weights(good, spec, torch.float32)
    for expert in range(spec.num_experts):
        for got, want in zip(fused.expert(1, expert), single.expert(1, expert), strict=True):
            assert torch.equal(got, want)


def test_a_rank_reads_its_own_experts_only(good):
    source = open_weights(good, read_spec(good), torch.float32)
    asked: list[tuple[int, int]] = []

    class Spy:
        take, has = source.take, source.has

        def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            asked.append((layer, expert))
            return source.expert(layer, expert)

    loaded: list[tuple[int, int]] = []
    load_experts(
        Spy(), {0: (5, None, 2), 1: ()}, lambda layer, slot, *_: loaded.append((layer, slot))
    )
    assert asked == [(0, 5), (0, 2)]
    assert loaded == [(0, 0), (0, 2)]


def test_missing_tensors(folder):
    edit(folder, **{NAME: None, "model.norm.weight": None})
    text = refusal(folder)
    assert "2 tensors missing: model.norm.weight, " + NAME in text


def test_left_over_tensors(folder):
    edit(folder, **{"model.layers.9.mlp.gate.weight": torch.zeros(2)})
    assert "1 tensors left over: model.layers.9.mlp.gate.weight" in refusal(folder)


def test_a_config_with_other_sizes(folder):
    rewrite_config(folder, hidden_size=40)
    text = refusal(folder)
    assert "tensors of the wrong shape: model.embed_tokens.weight has [4096, 32], must be " in text
    assert "more" in text


def test_all_problems_at_once(folder):
    changes = {NAME: None, "extra": torch.zeros(1), "model.norm.weight": torch.zeros(3)}
    edit(folder, **changes)
    text = refusal(folder)
    assert f"1 tensors missing: {NAME}" in text
    assert "1 tensors left over: extra" in text
    assert "1 tensors of the wrong shape: model.norm.weight has [3], must be [32]" in text


def test_wrong_dtype(folder):
    edit(folder, **{"model.norm.weight": torch.ones(32, dtype=torch.int64)})
    assert "wrong dtype: model.norm.weight is torch.int64, must be float32" in refusal(folder)


def test_harmless_left_overs(folder):
    edit(
        folder,
        **{
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            "lm_head.weight": torch.zeros(4096, 32),
        },
    )
    rewrite_config(folder, tie_word_embeddings=True)
    open_weights(folder, read_spec(folder), torch.float32)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.999])
def test_cut_short(folder, keep):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: keep if keep >= 1 or keep == 0 else int(len(content) * keep)])
    assert "model.safetensors: not a whole safetensors file" in refusal(folder)


def test_cut_short_while_being_read(folder):
    """Found when a tensor is read; an error, not a dead process."""
    source = open_weights(folder, read_spec(folder), torch.float32)
    os.truncate(folder / "model.safetensors", 9000)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight: the file ends \d+ bytes early"
    ):
        source.take("model.embed_tokens.weight", (4096, 32))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_headers(tmp_path_factory, data):
    """Whatever the header says: entries inside the file, or a CheckpointError."""
    header = data.draw(
        st.dictionaries(
            st.text(max_size=3),
            st.fixed_dictionaries(
                {
                    "dtype": st.sampled_from(["F32", "BF16", "X", 3]),
                    "shape": st.lists(st.integers(-2, 3) | st.just(2**62), max_size=3),
                    "data_offsets": st.lists(st.integers(-4, 40), min_size=1, max_size=3),
                }
            ),
            max_size=3,
        )
        | st.sampled_from([[], 3, {"a": 1}, {"a": None}])
    )
    encoded = json.dumps(header).encode()
    folder = tmp_path_factory.mktemp("damaged")
    file = folder / "model.safetensors"
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(16))
    try:
        entries = open_checkpoint(folder)
    except CheckpointError:
        return
    for name, entry in entries.items():
        read_tensor(entry, name, dtype=torch.float32)


def test_missing_shard(shards):
    next(shards.glob("*-00002-of-*")).unlink()
    assert "model-00002-of-" in (text := refusal(shards)) and text.endswith("missing")


def rewrite_index(folder: Path, **changes: str) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= changes
    index.write_text(json.dumps(content))


def test_index_names_a_tensor_that_is_not_there(shards):
    rewrite_index(shards, ghost="model-00001-of-00003.safetensors")
    assert "ghost is not there" in refusal(shards)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", ".."]
)
def test_index_points_out_of_the_folder(shards, name):
    (shards.parent / "secret.safetensors").write_bytes(b"x")
    rewrite_index(shards, ghost=name)
    assert "is not a file name inside the folder" in refusal(shards)


def test_link_out_of_the_folder(folder):
    target = folder.parent / "elsewhere.safetensors"
    shutil.move(folder / "model.safetensors", target)
    (folder / "model.safetensors").symlink_to(target)
    assert "is not a file name inside the folder" in refusal(folder)


def test_links_of_a_hugging_face_cache(good, tmp_path):
    """There, the files of a snapshot are links to blobs beside the snapshots."""
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in good.iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    open_weights(snapshot, read_spec(snapshot), torch.float32)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_not_a_regular_file(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert "not a regular file" in refusal(folder)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_bad_index(shards, text):
    (shards / "model.safetensors.index.json").write_text(text)
    assert "weight_map" in refusal(shards)


def test_pickle_only(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pickle and never read; convert it to safetensors" in refusal(folder)


def test_nothing_there(folder):
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


def test_unknown_load_format(folder):
    with pytest.raises(
        ValueError, match="load_format = 'gguf': must be auto, safetensors or dummy"
    ):
        open_weights(folder, read_spec(folder), torch.float32, load_format="gguf")
