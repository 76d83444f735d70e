"""Which code serves an architecture: ours, a plug-in's, transformers', or the repository's own if that is trusted."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from worker.conftest import COMMON, load_executor
from worker.mini_scheduler import generate
from worker.test_worker_parity import assert_greedy

from kvern.errors import KvernError
from kvern_worker.config import HfConfig
from kvern_worker.models import llama, registry

Folders = Callable[[str], Path]
PROMPTS = [[3 + (i * 7 + j) % 200 for i in range(20)] for j in range(3)]
SMALL = {**COMMON, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}

# A model that no one else knows, as a repository would bring it: OLMo under another name.
REMOTE_CODE = """
from transformers import OlmoConfig, OlmoForCausalLM

class MillstoneConfig(OlmoConfig):
    model_type = "millstone"

class MillstoneForCausalLM(OlmoForCausalLM):
    config_class = MillstoneConfig
"""


def changed(source: Path, target: Path, **values: Any) -> Path:
    """A copy of a folder with other values in its config.json."""
    target.mkdir(exist_ok=True)
    save_file(load_file(source / "model.safetensors"), target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **values}))
    return target


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that transformers' code serves."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("olmo")
    transformers.OlmoForCausalLM(transformers.OlmoConfig(**SMALL)).save_pretrained(folder)
    return folder


def test_a_plug_in_serves_its_architecture(
    checkpoint: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = types.ModuleType("windmill")
    plugin.parse = lambda raw: llama.parse(raw.replace(architectures=["LlamaForCausalLM"]))  # type: ignore[attr-defined]
    plugin.build = llama.build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "windmill", plugin)
    entry = types.SimpleNamespace(name="WindmillForCausalLM", value="windmill")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "kvern.models" else [])
    registry._plugins.cache_clear()
    try:
        folder = changed(checkpoint("llama"), tmp_path, architectures=["WindmillForCausalLM"])
        assert "WindmillForCausalLM" in registry.known()
        found = generate(load_executor(folder), PROMPTS, 8)
        assert found == generate(load_executor(checkpoint("llama")), PROMPTS, 8)
    finally:
        registry._plugins.cache_clear()


def test_code_of_the_repository_runs_only_when_it_is_trusted(olmo: Path, tmp_path: Path) -> None:
    auto = {
        "AutoConfig": "modeling_millstone.MillstoneConfig",
        "AutoModelForCausalLM": "modeling_millstone.MillstoneForCausalLM",
    }
    names = {"architectures": ["MillstoneForCausalLM"], "model_type": "millstone", "auto_map": auto}
    folder = changed(olmo, tmp_path / "millstone", **names)
    marker = tmp_path / "was-run"
    (folder / "modeling_millstone.py").write_text(f"open({str(marker)!r}, 'w')\n{REMOTE_CODE}")
    with pytest.raises(KvernError, match="--trust-remote-code") as caught:
        load_executor(folder)
    assert caught.value.field == "trust_remote_code"
    assert not marker.exists()
    found = generate(load_executor(folder, trust_remote_code=True), PROMPTS, 8)
    assert marker.exists()
    assert found == generate(load_executor(olmo), PROMPTS, 8)


def test_our_file_serves_what_it_knows_whatever_code_the_repository_brings(
    checkpoint: Folders, tmp_path: Path
) -> None:
    folder = changed(checkpoint("llama"), tmp_path, auto_map={"AutoModelForCausalLM": "missing.Model"})
    found = generate(load_executor(folder), PROMPTS, 8)
    assert found == generate(load_executor(checkpoint("llama")), PROMPTS, 8)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # It knows no other attention than its own.
        (transformers.StableLmConfig(**SMALL), "does not let attention be replaced"),
        # It keeps a state beside the cache.
        (transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1), "keeps state"),
    ],
)
def test_what_cannot_run_on_the_paged_cache_is_refused(config: Any, words: str, tmp_path: Path) -> None:
    prefix = type(config).__name__.removesuffix("Config")
    config.architectures = [f"{prefix}ForCausalLM"]
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(KvernError, match=words):
        registry.parse_hf_config(HfConfig(raw, folder=tmp_path))


def test_the_fallback_names_what_is_missing(olmo: Path, tmp_path: Path) -> None:
    tensors = load_file(olmo / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_text((olmo / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        KvernError, match=r"1 tensors .* missing, the first is model.layers.1.mlp.up_proj.weight"
    ):
        load_executor(tmp_path)


def test_the_fallback_serves_random_weights(olmo: Path) -> None:
    outputs = generate(load_executor(olmo, load_format="dummy"), PROMPTS, 4)
    assert [len(output) for output in outputs] == [4, 4, 4]


def test_the_text_part_of_a_model_that_sees_images_is_served(tmp_path: Path) -> None:
    text = {**SMALL, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(2)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, eos_token_id=2)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(tmp_path)
    executor = load_executor(tmp_path)
    assert executor.describe().model.architecture == "Gemma3ForCausalLM"
    for prompt, output in zip(PROMPTS, generate(executor, PROMPTS, 8), strict=True):
        assert_greedy(model, prompt, output)
