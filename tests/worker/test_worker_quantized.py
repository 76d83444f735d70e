"""Quantized checkpoints: the tensors mean what an independent packing says, and the model says what transformers does with
the dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantize import SCHEMES, is_linear, quantize_tensors, write_checkpoint
from safetensors.torch import load_file, save_file
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, generate, greedy

from kvern.errors import KvernError
from kvern_worker.quantization import Asked
from kvern_worker.weights.checkpoint import open_checkpoint
from kvern_worker.weights.loader import WeightLoader

SIZES: dict[str, Any] = {
    "vocab_size": 263,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 32,
}
GROUP = 32
PROMPT = [3 + 7 * i % 250 for i in range(40)]
Made = Callable[[str], tuple[Any, Path]]


def make(config: Any, folder: Path) -> tuple[Any, Path]:
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" not in name:
                value.normal_(0, 0.08)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made: dict[str, tuple[Any, Path]] = {}

    def get(family: str) -> tuple[Any, Path]:
        if family not in made:
            config = (
                transformers.LlamaConfig(**SIZES)
                if family == "llama"
                else transformers.Qwen3MoeConfig(**{**SIZES, **EXPERTS})
            )
            made[family] = make(config, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def quantized(folder: Path, like: Path, scheme: str) -> tuple[Path, dict[str, torch.Tensor]]:
    made = SCHEMES[scheme](GROUP)
    stored, meant = quantize_tensors(load_file(like / "model.safetensors"), made)
    return write_checkpoint(folder, like, stored, made), meant


def logprobs(executor: Any) -> torch.Tensor:
    """[prompt − 1, vocab], of each next token."""
    sequence = Sequence(PROMPT, greedy(prompt_logprobs=263), 1)
    MiniScheduler(executor).run([sequence], chunk=16)
    rows = torch.empty(len(PROMPT) - 1, 263)
    for index in range(1, len(PROMPT)):
        found = sequence.prompt_logprobs[index]
        rows[index - 1, list(found.top_token_ids)] = torch.tensor(list(found.top_logprobs))
    return rows


def by_token(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """What compressed-tensors does to x where activations are int8, dynamic, by token, symmetric."""
    (x,) = inputs
    scale = x.abs().amax(-1, keepdim=True) / 127
    return ((x / scale).round() * scale,)


@torch.inference_mode()
def expected(
    family: str, plain: Made, meant: dict[str, torch.Tensor], folder: Path, activations: bool = False
) -> torch.Tensor:
    _, like = plain(family)
    folder.mkdir()
    (folder / "config.json").write_text((like / "config.json").read_text())
    save_file(meant, folder / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if activations:
        for module in model.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(by_token)
    return model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_dequantized_weights(scheme: str, plain: Made, tmp_path: Path) -> None:
    path, meant = quantized(tmp_path / "q", plain("llama")[1], scheme)
    found = logprobs(load_executor(path))
    wanted = expected("llama", plain, meant, tmp_path / "meant")
    if scheme != "w8a8":
        assert (found - wanted).abs().max() < 2e-4
        return
    # x is quantized too. A sum that differs in its last bit may round x to the next of 255 steps, so that no bound holds
    # for the worst element; but the first token's logits, and all of them on average, are those of the method.
    rounded = expected("llama", plain, meant, tmp_path / "rounded", activations=True)
    assert (found - rounded).abs().mean() < (found - wanted).abs().mean() / 2
    assert (found - rounded)[0].abs().max() < 2e-4


@pytest.mark.parametrize(
    "scheme", ["gptq-4-asym-reordered", "awq", "w8a16", "fp8-native-block", "w4a16", "mxfp4"]
)
def test_experts_are_quantized_too(scheme: str, plain: Made, tmp_path: Path) -> None:
    path, meant = quantized(tmp_path / "q", plain("moe")[1], scheme)
    assert sum("experts" in name and is_linear(name, value) for name, value in meant.items()) == 24
    found = logprobs(load_executor(path))
    wanted = expected("moe", plain, meant, tmp_path / "meant")
    assert (found - wanted).abs().max() < 2e-4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpacking_gives_the_bits_of_an_independent_one(scheme: str, plain: Made, tmp_path: Path) -> None:
    path, meant = quantized(tmp_path / "q", plain("llama")[1], scheme)
    opened = open_checkpoint(path)
    loader = WeightLoader(
        opened.source, torch.float32, lambda _: None, quantization=opened.config.quantization
    )
    for name, value in meant.items():
        if is_linear(name, value):
            assert torch.equal(loader.read(name, *value.shape), value), name


def test_bfloat16_serves_packed_weights_in_less_memory(plain: Made, tmp_path: Path) -> None:
    """Half precision with integer sums: the same tokens, packed or dequantized, of a model that is sure of itself."""
    path, _ = quantized(tmp_path / "q", plain("llama")[1], "gptq-4")
    sizes = {}
    for keep in (True, False):
        opened = open_checkpoint(path)
        loader = WeightLoader(
            *(opened.source, torch.bfloat16, lambda _: None, 1, keep),
            quantization=opened.config.quantization,
        )
        loader.linear(["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"], [512, 512], 256, False)
        sizes[keep] = loader.num_bytes
        assert loader.num_parameters == 2 * 512 * 256
    assert sizes[True] < 0.35 * sizes[False]


def test_layers_that_were_left_out_stay_plain(plain: Made, tmp_path: Path) -> None:
    """Whatever the lists of exceptions say, the tensors tell; also inside of one fused projection."""
    like = plain("llama")[1]
    scheme = SCHEMES["gptq-4"](GROUP)
    tensors = load_file(like / "model.safetensors")
    stored, meant = quantize_tensors(tensors, scheme)
    prefix = "model.layers.0.self_attn.k_proj"
    stored = {name: value for name, value in stored.items() if not name.startswith(prefix)}
    stored[f"{prefix}.weight"] = meant[f"{prefix}.weight"] = tensors[f"{prefix}.weight"]
    path = write_checkpoint(tmp_path / "q", like, stored, scheme)
    wanted = expected("llama", plain, meant, tmp_path / "meant")
    assert (logprobs(load_executor(path)) - wanted).abs().max() < 2e-4


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        ("scales", None, ["q_proj.scales [8, 256] is missing", "model.safetensors"]),
        ("qweight", torch.zeros(31, 256, dtype=torch.int32), ["q_proj.qweight", "[31, 256]", "[32, 256]"]),
        ("g_idx", torch.full((256,), 9, dtype=torch.int32), ["q_proj.g_idx", "groups 9 to 9", "there are 8"]),
    ],
)
def test_wrong_tensors_are_named(
    suffix: str, change: torch.Tensor | None, words: list[str], plain: Made, tmp_path: Path
) -> None:
    scheme = SCHEMES["gptq-4"](GROUP)
    stored, _ = quantize_tensors(load_file(plain("llama")[1] / "model.safetensors"), scheme)
    name = f"model.layers.0.self_attn.q_proj.{suffix}"
    del stored[name]
    if change is not None:
        stored[name] = change
    path = write_checkpoint(tmp_path / "q", plain("llama")[1], stored, scheme)
    with pytest.raises(KvernError) as caught:
        load_executor(path)
    for word in words:
        assert word in caught.value.message


def test_codes_without_a_word_about_them_are_refused(plain: Made, tmp_path: Path) -> None:
    path, _ = quantized(tmp_path / "q", plain("llama")[1], "w8a8")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(KvernError, match=r"_proj.weight in .* is int8, and nothing says how it is quantized"):
        load_executor(path)


def test_dummy_weights_of_a_quantized_checkpoint_are_refused(plain: Made, tmp_path: Path) -> None:
    path, _ = quantized(tmp_path / "q", plain("llama")[1], "w8a8")
    with pytest.raises(KvernError, match="dummy makes no quantized weights"):
        load_executor(path, load_format="dummy")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked("awq"), "--quantization awq contradicts the checkpoint, which is quantized with gptq"),
        (Asked("fp8"), "--quantization fp8 contradicts the checkpoint, which is quantized with gptq"),
        (Asked("int3"), "quantization int3 is unknown"),
        (Asked(gptq_bits=8), "--gptq-bits 8 contradicts the checkpoint, which has gptq with 4"),
        (
            Asked(gptq_group_size=128),
            "--gptq-group-size 128 contradicts the checkpoint, which has gptq with 32",
        ),
        (Asked(awq_bits=4), "--awq-bits 4 contradicts the checkpoint, which has gptq"),
    ],
)
def test_flags_that_contradict_the_checkpoint_are_refused(
    asked: Asked, words: str, plain: Made, tmp_path: Path
) -> None:
    path, _ = quantized(tmp_path / "q", plain("llama")[1], "gptq-4")
    assert open_checkpoint(path, asked=Asked("gptq_marlin", 4, 32)).online is None
    with pytest.raises(KvernError) as caught:
        open_checkpoint(path, asked=asked)
    assert words in caught.value.message
    with pytest.raises(KvernError, match=r"--quantization gptq contradicts .* which is not quantized"):
        open_checkpoint(plain("llama")[1], asked=Asked("gptq"))


@pytest.mark.parametrize(
    ("asked", "scheme"),
    [
        ("fp8", "fp8-tensor"),
        ("fp8_per_channel", "fp8-channel"),
        ("fp8_per_block", "fp8-block"),
        ("int8", "w8a16"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "moe"])
def test_quantizing_at_load_is_as_good_as_before(
    asked: str, scheme: str, family: str, plain: Made, tmp_path: Path
) -> None:
    """The weights become what a tool that rounds to nearest makes of them."""
    _, meant = quantized(tmp_path / "q", plain(family)[1], scheme)
    found = logprobs(load_executor(plain(family)[1], quantization=asked))
    wanted = expected(family, plain, meant, tmp_path / "meant")
    assert (found - wanted).abs().max() < 2e-3
    digests = {open_checkpoint(plain(family)[1], asked=Asked(name)).digest for name in (None, asked)}
    assert len(digests) == 2


def test_greedy_tokens_of_a_quantized_checkpoint(plain: Made, tmp_path: Path) -> None:
    path, meant = quantized(tmp_path / "q", plain("llama")[1], "awq")
    expected("llama", plain, meant, tmp_path / "meant")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "meant", dtype=torch.float32).eval()
    [output] = generate(load_executor(path), [PROMPT], 24, chunk=16)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    gaps = logits.amax(-1) - logits[torch.arange(24), torch.tensor(output)]
    assert gaps.max() < 1e-4
