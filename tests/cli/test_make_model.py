"""`kvern bench make-model` writes what other software reads; `kvern bench kernels` measures what it says."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvern_gateway.cli import make_model
from kvern_kernels import bench


@pytest.mark.parametrize("like", ["qwen3-toy", "qwen3-moe-toy"])
def test_a_made_model_is_one_that_transformers_knows(tmp_path: Path, like: str) -> None:
    made = make_model.make_model(tmp_path, like)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert made.parameters == sum(p.numel() for p in model.parameters())
    if like == "qwen3-toy":
        loaded, info = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        weight = loaded.model.layers[1].mlp.up_proj.weight.float()
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert loaded(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


def test_its_tokenizer_has_a_text_for_every_id(tmp_path: Path) -> None:
    make_model.make_model(tmp_path, "qwen3-toy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("Hei på deg")["input_ids"]) == "Hei på deg"
    assert all(tokenizer.decode([i]) for i in range(1024))
    assert tokenizer.eos_token_id == 1


@pytest.mark.parametrize(("quantization", "shapes"), [
    ("gptq", {"qweight": (8, 192), "qzeros": (1, 24), "scales": (1, 192), "g_idx": (64,)}),
    ("awq", {"qweight": (64, 24), "qzeros": (1, 24), "scales": (1, 192)}),
    ("w8a8", {"weight": (192, 64), "weight_scale": (192, 1)}),
])  # fmt: skip
def test_quantized_models_have_the_layout_of_their_format(
    tmp_path: Path, quantization: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    make_model.make_model(tmp_path, "qwen3-toy", quantization)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stem = "model.layers.0.mlp.up_proj."
        found = {
            name.removeprefix(stem): tuple(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118
            if name.startswith(stem)
        }
    assert found == shapes
    assert AutoConfig.from_pretrained(tmp_path).quantization_config["quant_method"]


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--like 'gpt-7': one of qwen3-0\.6b"):
        make_model.make_model(tmp_path, "gpt-7")
    with pytest.raises(ValueError, match=r"--quantization 'int3': one of none"):
        make_model.make_model(tmp_path, "qwen3-toy", "int3")


def test_kernel_benchmark_reports_each_kernel_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SECONDS", 0.01)
    monkeypatch.setattr(bench, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "ROWS", (1, 4))
    rows = bench.run("linear bfloat16")
    assert [row["shape"] for row in rows] == [
        f"{name} {m}x{n}x{k}" for name, (n, k) in bench.LINEARS.items() for m in (1, 4)
    ]
    for row in rows:
        assert row["us"] > 0 and row["limit_us"] > 0 and row["torch_ratio"] > 0
        assert row["limit_fraction"] == pytest.approx(row["limit_us"] / row["us"], rel=0.02, abs=2e-3)
