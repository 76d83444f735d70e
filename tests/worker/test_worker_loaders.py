"""Every checkpoint format gives the same bits; what is wrong with a checkpoint is said by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from worker.conftest import load_executor
from worker.mini_scheduler import generate

from kvern.errors import KvernError
from kvern.v1 import error_pb2
from kvern_worker import device, loading
from kvern_worker.weights.checkpoint import Checkpoint, bundled_model, open_checkpoint
from kvern_worker.weights.dequantize import dequantize_into
from kvern_worker.weights.gguf_file import TENSOR_TYPES, GgufFile
from kvern_worker.weights.gguf_source import hugging_face_name
from kvern_worker.weights.safetensors_source import SafetensorsSource, file_system

Folders = Callable[[str], Path]
PROMPTS = [[3 + (i * 7 + j) % 200 for i in range(20)] for j in range(3)]


def read_all(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, info in checkpoint.source.infos.items():
        tensors[name] = torch.empty(info.shape, dtype=dtype)
        checkpoint.source.read_into(name, tensors[name])
    return tensors


def copy_config(source: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", target / "config.json")
    return target


def write_gguf(path: Path, folder: Path, tied: bool, quant: gguf.GGMLQuantizationType | None = None) -> Path:
    """A llama.cpp file of a Llama checkpoint, as its converter writes it."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float((config.get("rope_parameters") or {}).get("rope_theta", 10_000.0)))
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(2)
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    to_gguf = {
        hugging_face_name(name): name
        for layer in range(config["num_hidden_layers"])
        for part in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
        for name in (f"blk.{layer}.{part}.weight",)
    } | {hugging_face_name(name): name for name in ("token_embd.weight", "output_norm.weight", "output.weight")}  # fmt: skip
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tied and name == "lm_head.weight":
            continue
        value = tensor.float().numpy()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                count = config[heads]
                halves = value.reshape(count, 2, value.shape[0] // count // 2, value.shape[1])
                value = halves.swapaxes(1, 2).reshape(value.shape)
        if quant is not None and value.ndim == 2 and value.shape[1] % 32 == 0:
            writer.add_tensor(to_gguf[name], quantize(value, quant), raw_dtype=quant)
        else:
            writer.add_tensor(to_gguf[name], np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_formats_give_the_same_bits(checkpoint: Folders, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)

    sharded = copy_config(folder, tmp_path / "sharded")
    parts = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, sharded / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))

    pickled = copy_config(folder, tmp_path / "pickled")
    torch.save(tensors, pickled / "pytorch_model.bin")
    legacy = copy_config(folder, tmp_path / "legacy")
    torch.save(tensors, legacy / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    ggml = write_gguf(tmp_path / "model.gguf", folder, tied=False)

    expected = read_all(open_checkpoint(folder))
    assert set(expected) == set(names)
    for path, kind in [(sharded, "safetensors"), (pickled, "pt"), (legacy, "pt"), (ggml, "gguf")]:
        opened = open_checkpoint(path)
        assert opened.load_format == kind
        found = read_all(opened)
        assert set(found) == set(names)
        for name in names:
            assert torch.equal(found[name], expected[name]), (path, name)
    tokens = generate(load_executor(folder), PROMPTS, 8)
    assert generate(load_executor(ggml), PROMPTS, 8) == tokens
    assert generate(load_executor(pickled), PROMPTS, 8) == tokens


@pytest.mark.parametrize("strategy", ["eager", "prefetch"])
def test_safetensors_are_the_same_however_they_are_read(
    strategy: str, checkpoint: Folders, tmp_path: Path
) -> None:
    tensors = load_file(checkpoint("llama") / "model.safetensors")
    tensors["extra"] = torch.zeros(0, 3, dtype=torch.bfloat16)
    shards = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for index, shard in enumerate(shards):
        save_file(dict(sorted(tensors.items())[index::2]), shard, {"format": "pt"})
    source = SafetensorsSource(shards, strategy)
    for name in sorted(tensors):
        out = torch.empty(source.infos[name].shape, dtype=tensors[name].dtype)
        source.read_into(name, out)
        assert torch.equal(out, tensors[name]), name
    # Nothing of a shard stays in memory once all of it was read.
    assert source._whole == {}


def test_too_little_memory_is_told_by_its_parts(checkpoint: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_checkpoint(checkpoint("llama"))
    parts = loading.weight_parts(opened, torch.float32)
    assert parts["embedding and head"] == 2 * 263 * 144 * 4
    total = sum(tensor.nbytes for tensor in load_file(checkpoint("llama") / "model.safetensors").values())
    assert sum(parts.values()) == total == loading.weight_bytes(opened, torch.float32)
    monkeypatch.setattr(device, "available_memory", lambda: total)
    with pytest.raises(
        KvernError, match=r"embedding and head .* experts 0.00, other layers .* KV block .* free"
    ) as caught:
        load_executor(checkpoint("llama"))
    assert caught.value.limit == str(total)


def test_an_unknown_strategy_is_refused(checkpoint: Folders) -> None:
    with pytest.raises(KvernError, match="choose one of auto, lazy, eager, prefetch"):
        open_checkpoint(checkpoint("llama"), strategy="mmap")


def test_file_systems_are_told_apart() -> None:
    assert file_system(Path("/proc/self/status")) == "proc"


def test_a_quantized_gguf_serves(checkpoint: Folders, tmp_path: Path) -> None:
    """Q8_0 of a tied model whose width is a multiple of 32 is close to the original."""
    folder = checkpoint("llama-tied")
    path = write_gguf(tmp_path / "q8.gguf", folder, tied=True, quant=gguf.GGMLQuantizationType.Q8_0)
    exact, close = read_all(open_checkpoint(folder)), read_all(open_checkpoint(path))
    for name, value in exact.items():
        assert torch.allclose(close[name], value, atol=float(value.abs().max()) / 100)
    assert len(generate(load_executor(path), PROMPTS, 4)[0]) == 4


def random_blocks(kind: str, block_bytes: int, count: int) -> np.ndarray:
    """Random bytes, with finite float16 where the format has scales."""
    rng = np.random.default_rng(len(kind))
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    halves = rng.standard_normal((2, count)).astype(np.float16).view(np.uint8).reshape(2, count, 2)
    places = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}
    if kind in places:
        for at, half in zip(places[kind], halves, strict=False):
            blocks[:, at : at + 2] = half
    else:
        blocks[:, 0:2] = halves[0]
        if kind not in ("Q4_0", "Q5_0", "Q8_0"):
            blocks[:, 2:4] = halves[1]
    return blocks


@pytest.mark.parametrize(
    ("kind", "elements", "block_bytes"), [v for v in TENSOR_TYPES.values() if v[1] > 1], ids=lambda v: str(v)
)
def test_dequantized_bits_equal_the_gguf_package(kind: str, elements: int, block_bytes: int) -> None:
    blocks = random_blocks(kind, block_bytes, 5000)
    expected = dequantize(blocks, gguf.GGMLQuantizationType[kind])
    out = torch.empty(5000, elements)
    dequantize_into(torch.from_numpy(blocks.reshape(-1)), kind, out)
    assert np.array_equal(out.numpy().view(np.int32), expected.view(np.int32))
    half = torch.empty(5000, elements, dtype=torch.bfloat16)
    dequantize_into(torch.from_numpy(blocks.reshape(-1)), kind, half)
    assert torch.equal(half, out.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_ggml_types(dtype: torch.dtype) -> None:
    value = torch.randn(7, 5).to(dtype)
    out = torch.empty(7, 5)
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    dequantize_into(value.view(torch.uint8).reshape(-1), kind, out)
    assert torch.equal(out, value.float())


def test_gguf_metadata_equals_the_gguf_package() -> None:
    path = bundled_model()
    assert path is not None
    file = GgufFile(path)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["tokenizer.ggml.tokens.length"] == 49_152
    assert file.metadata["tokenizer.chat_template"].startswith("{% for message")
    assert len(file.tensors) == 272
    assert file.tensors["blk.0.ffn_down.weight"].shape == (576, 1536)
    config = open_checkpoint(path).config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rope.theta, config.max_positions, config.vocab_size) == (100_000.0, 8192, 49_152)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


def test_dummy_weights_need_no_weight_files(checkpoint: Folders, tmp_path: Path) -> None:
    folder = copy_config(checkpoint("qwen3"), tmp_path / "dummy")
    first = generate(load_executor(folder, load_format="dummy"), PROMPTS, 4)
    assert generate(load_executor(folder, load_format="dummy"), PROMPTS, 4) == first


def change(tensors: dict[str, torch.Tensor], edit: str) -> dict[str, torch.Tensor]:
    changed = dict(tensors)
    name = "model.layers.1.mlp.up_proj.weight"
    if edit == "missing":
        del changed[name]
    elif edit == "misshapen":
        changed[name] = torch.zeros(88, 145)
    elif edit == "unexpected":
        changed["model.layers.3.mlp.up_proj.weight"] = torch.zeros(1)
    return changed


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ("missing", ["model.layers.1.mlp.up_proj.weight", "[88, 144]", "missing"]),
        ("misshapen", ["model.layers.1.mlp.up_proj.weight", "[88, 145]", "[88, 144]", "model.safetensors"]),
        ("unexpected", ["model.layers.3.mlp.up_proj.weight", "do not belong"]),
    ],
)
def test_wrong_tensors_are_named(edit: str, words: list[str], checkpoint: Folders, tmp_path: Path) -> None:
    folder = copy_config(checkpoint("llama"), tmp_path / edit)
    save_file(
        change(load_file(checkpoint("llama") / "model.safetensors"), edit), folder / "model.safetensors"
    )
    with pytest.raises(KvernError) as caught:
        load_executor(folder)
    for word in words:
        assert word in caught.value.message


def test_broken_files_are_named(checkpoint: Folders, tmp_path: Path) -> None:
    folder = copy_config(checkpoint("llama"), tmp_path / "truncated")
    whole = (checkpoint("llama") / "model.safetensors").read_bytes()
    for name, content in [
        ("model.safetensors", whole[: len(whole) // 2]),
        ("pytorch_model.bin", b"not a pickle"),
        ("model.gguf", b"GGUF\x03\x00\x00\x00"),
    ]:
        for old in folder.glob("*model*"):
            old.unlink()
        (folder / name).write_bytes(content)
        with pytest.raises(KvernError, match="cannot read") as caught:
            open_checkpoint(folder / name if name.endswith(".gguf") else folder)
        assert name in caught.value.message
    truncated = write_gguf(tmp_path / "short.gguf", checkpoint("llama"), tied=False)
    truncated.write_bytes(truncated.read_bytes()[:-1000])
    with pytest.raises(KvernError, match="past the end"):
        open_checkpoint(truncated)


def test_a_pickle_that_runs_code_is_refused(checkpoint: Folders, tmp_path: Path) -> None:
    folder = copy_config(checkpoint("llama"), tmp_path / "evil")
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(KvernError, match="cannot read"):
        open_checkpoint(folder)
    assert not marker.exists()


def test_missing_shards_folders_and_formats(checkpoint: Folders, tmp_path: Path) -> None:
    folder = copy_config(checkpoint("llama"), tmp_path / "m")
    with pytest.raises(KvernError, match="holds no weights"):
        open_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    with pytest.raises(KvernError, match=r"gone.safetensors is named by .* and missing"):
        open_checkpoint(folder)
    with pytest.raises(KvernError, match="choose one of auto, safetensors, pt, gguf, dummy"):
        open_checkpoint(folder, "tensorizer")
    with pytest.raises(KvernError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(KvernError, match="neither a config"):
        open_checkpoint(tmp_path)
    with pytest.raises(KvernError) as caught:
        open_checkpoint(checkpoint("llama"), "pt")
    assert caught.value.code == error_pb2.ERROR_CODE_INVALID_ARGUMENT


def test_the_digest_tells_checkpoints_apart(checkpoint: Folders) -> None:
    same = [open_checkpoint(checkpoint("llama")).digest for _ in range(2)]
    assert same[0] == same[1]
    assert len(same[0]) == 32
    assert same[0] != open_checkpoint(checkpoint("qwen3")).digest
