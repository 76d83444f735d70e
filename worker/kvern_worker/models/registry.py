"""Which file knows an architecture, by the name that ``config.json`` gives it.

A model file is a module with two functions::

    def parse(raw: HfConfig) -> ModelConfig                                     # no weights, no memory
    def build(config, loader: WeightLoader, cache: KvCache, num_positions: int) -> Model

and, where it does not read its matrices by ``loader.linear``, the quantization methods that it reads:
``QUANTIZATIONS = ("mxfp4",)``. ``TENSOR_NAMES``: rules by which a checkpoint's names become those that it reads
(weights.source.Renamed). ``DEVICES = ("cpu",)``: it runs on no GPU.
A model that takes images is an ``images.Seeing``, too.
Packages add their own by an entry point of the group ``kvern.models``: its name is the architecture, its value the module.
"""

from __future__ import annotations

import importlib
import json
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvern.errors import invalid
from kvern_worker.config import HfConfig, ModelConfig, token_ids, unsupported
from kvern_worker.quantization import parse_quantization

if TYPE_CHECKING:
    from torch import Tensor

    from kvern_worker.layers.attention import KvCache, StepInputs
    from kvern_worker.weights.loader import WeightLoader

GROUP = "kvern.models"

# What ``loader.linear`` reads.
LINEAR_METHODS = ("gptq", "awq", "fp8", "compressed-tensors")

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite",
    "GraniteMoeSharedForCausalLM": "granite",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen_moe",
    "Qwen3MoeForCausalLM": "qwen_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "BambaForCausalLM": "bamba",
    "GraniteMoeHybridForCausalLM": "granite",
    "OlmoeForCausalLM": "olmoe",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Llama4ForCausalLM": "llama4",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GPT2LMHeadModel": "gpt2",
    "BertModel": "bert",
    "RobertaModel": "bert",
    "XLMRobertaModel": "bert",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
}

# Models that see images, of which the text part is served.
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
}


class Model(Protocol):
    """Weights on their KV cache."""

    def forward(self, step: StepInputs) -> Any:
        """Runs the layers and fills the cache; what it returns is for :meth:`logits` alone."""

    def logits(self, states: Any, rows: Tensor | slice) -> Tensor:
        """Logits [rows, vocab_size] float32 of those tokens of the step."""


@runtime_checkable
class Embedder(Protocol):
    """A model that can give embeddings, too."""

    def hidden(self, states: Any, rows: Tensor | slice) -> Tensor:
        """Final hidden states [rows, hidden_size] float32 of those tokens of the step."""


class ModelFile(Protocol):
    """See the module's text. ``parse`` and ``build`` raise KvernError with what is wrong with the checkpoint."""

    def parse(self, raw: HfConfig) -> ModelConfig: ...

    def build(self, config: Any, loader: WeightLoader, cache: KvCache, num_positions: int) -> Model: ...


def known() -> list[str]:
    """Every architecture that has a file."""
    return [*ARCHITECTURES, *(name for name in _plugins() if name not in ARCHITECTURES)]


def find(architecture: str) -> ModelFile | None:
    """The file of an architecture; a plug-in's goes before ours."""
    if (plugin := _plugins().get(architecture)) is not None:
        return importlib.import_module(plugin)
    if architecture in ARCHITECTURES:
        return importlib.import_module(f"kvern_worker.models.{ARCHITECTURES[architecture]}")
    return None


def file_of(raw: HfConfig) -> ModelFile:
    """The file of a configuration's architecture; where there is none, transformers' own code, if that can serve it.
    Raises KvernError when nothing can."""
    if (file := find(raw.architecture)) is not None:
        return file
    from kvern_worker.models import transformers_fallback

    if (refusal := transformers_fallback.refusal(raw)) is not None:
        refusal.message += f"; models with a file are {', '.join(known())}"
        raise refusal
    return transformers_fallback


@lru_cache
def _plugins() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def load_hf_config(folder: Path, trust_remote_code: bool = False) -> tuple[ModelFile, ModelConfig]:
    """Reads ``folder/config.json`` (and ``generation_config.json`` for end tokens): the model's file, and what it makes
    of them. Raises KvernError."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = token_ids(raw.get("eos_token_id"))
    if generation.exists():
        eos += token_ids(_read_json(generation).get("eos_token_id"))
    return parse_hf_config(HfConfig(raw, tuple(dict.fromkeys(eos)), folder, trust_remote_code))


def parse_hf_config(raw: HfConfig) -> tuple[ModelFile, ModelConfig]:
    """Raises KvernError naming the key at fault."""
    if raw.architecture in TEXT_PARTS and "text_config" in raw:
        raw = _text_part(raw)
    file = file_of(raw)
    quantization, methods = parse_quantization(raw), quantizations(file)
    if quantization is not None and quantization.method not in methods:
        raise unsupported(
            f"checkpoints of {raw.architecture} quantized with {quantization.method} are not supported; supported: "
            f"{', '.join(('unquantized ones', *methods))}",
            field="quantization_config",
            value=quantization.method,
        )
    return file, file.parse(raw)


def quantizations(file: ModelFile) -> tuple[str, ...]:
    """The methods that an architecture's checkpoints may be quantized with."""
    return getattr(file, "QUANTIZATIONS", LINEAR_METHODS)


def _text_part(raw: HfConfig) -> HfConfig:
    """The configuration of the text part, with what only the whole one says."""
    text = {"architectures": [TEXT_PARTS[raw.architecture]]}
    shared = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
    outer = {key: raw[key] for key in shared if key in raw}
    return HfConfig(
        {**raw["text_config"], **outer, **text},
        raw.eos_token_ids or token_ids(raw["text_config"].get("eos_token_id")),
        raw.folder,
        raw.trust_remote_code,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid("model", f"cannot read {path}: {error.strerror}", value=path) from error
    except ValueError as error:
        raise invalid("model", f"{path} is not valid JSON: {error}", value=path) from error
    if not isinstance(content, dict):
        raise invalid("model", f"{path} must hold a JSON object", value=path)
    return content
