"""Any other causal language model that transformers knows: its own modelling code, on our paged attention and matrices.

transformers lets attention be registered by name. Ours gets the queries, keys and values of all tokens of a step, as one
sequence, stores keys and values in the paged cache and attends to what each token's own sequence has there. Norms, rotary
angles and experts are transformers' own. A model that does not call attention that way is refused when it is loaded.

A repository that brings code of its own runs it only under ``--trust-remote-code``.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kvern_kernels as kernels
from kvern.errors import KvernError, invalid
from kvern_worker.config import HfConfig, ModelConfig, model_fields, unsupported
from kvern_worker.layers.attention import KvCache, StepInputs, warm_up_step
from kvern_worker.layers.mlp import ACTIVATIONS
from kvern_worker.weights.loader import WeightLoader

# transformers reads the weights, and this packs them in floats.
QUANTIZATIONS = ()
DEVICES = ("cpu",)

_NAME = "kvern_paged"
# Modules of torch and transformers whose bits depend on where in a tensor an element is.
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class FallbackConfig(ModelConfig):
    """``folder`` is where transformers reads the model. ``windows``: per layer, 0 for all keys."""

    folder: str
    trust_remote_code: bool
    windows: tuple[int, ...]


def refusal(raw: HfConfig) -> KvernError | None:
    """Why transformers cannot serve an architecture, or None where it can."""
    name = raw.architecture
    auto = (raw.get("auto_map") or {}).get("AutoModelForCausalLM")
    if importlib.util.find_spec("transformers") is None:
        return unsupported(
            f"architecture {name} is not supported; install transformers (pip install 'kvern[transformers]') to run it "
            "by transformers' own code",
            field="architectures",
            value=name,
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if name in NAMES.values() or (auto and raw.trust_remote_code):
        return None
    if auto:
        return unsupported(
            f"architecture {name} is code of the repository itself ({auto}), which is not run unasked; read it, and "
            "give --trust-remote-code if you trust it",
            field="trust_remote_code",
            value=name,
        )
    return unsupported(
        f"architecture {name} is not supported: there is no file for it, and transformers knows no causal language "
        f"model of that name",
        field="architectures",
        value=name,
    )


def parse(raw: HfConfig) -> FallbackConfig:
    if raw.folder is None:
        raise invalid(
            "model", f"architecture {raw.architecture} is read by transformers, which needs a folder"
        )
    config = _config(raw.folder, raw.trust_remote_code)
    _check_class(raw, config)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Beyond the trained length these angles depend on the longest sequence of a batch.
        positions = min(positions, int(rope.get("original_max_position_embeddings") or positions))
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise unsupported(
            f"layers of type {', '.join(sorted(unknown))} are not supported for {raw.architecture}",
            field="layer_types",
            value=sorted(unknown)[0],
        )
    window = int(getattr(config, "sliding_window", None) or 0)
    fields = model_fields(raw.replace(vocab_size=config.vocab_size))
    return FallbackConfig(
        **{**fields, "tie_word_embeddings": bool(config.tie_word_embeddings)},
        hidden_size=config.hidden_size,
        num_layers=layers,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        max_positions=positions,
        folder=str(raw.folder),
        trust_remote_code=raw.trust_remote_code,
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in types),
    )


def build(config: FallbackConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> FallbackModel:
    return FallbackModel(config, _load(config, loader), cache)


class FallbackModel:
    """``model``: the transformers module with its head. See models/registry.py."""

    def __init__(self, config: FallbackConfig, model: Any, cache: KvCache) -> None:
        self._cache = cache
        self._windows = config.windows
        self._no_angles = torch.empty(config.max_positions, 0)
        self._step: StepInputs | None = None
        self._attended: set[int] = set()
        self._body = model.base_model
        self._head = model
        self._ready = _Ready()
        if self._body is model:
            raise unsupported(f"{config.architecture} has no head of its own", field="architectures")
        # Its own forward then goes on from the states that we give it: scales and caps of logits stay its own.
        setattr(model, model.base_model_prefix, self._ready)
        for module in [*self._body.modules()]:
            if isinstance(getattr(module, "layer_idx", None), int):
                module._kvern = self
        with torch.inference_mode():
            self.forward(warm_up_step())
        if len(self._attended) != config.num_layers:
            raise unsupported(
                f"{config.architecture} computes attention in its own way in {config.num_layers - len(self._attended)} "
                f"of {config.num_layers} layers, and cannot run on the paged cache",
                field="architectures",
                value=config.architecture,
            )

    def forward(self, step: StepInputs) -> Any:
        """The body's output for all tokens of the step."""
        self._step = step
        return self._body(
            input_ids=step.token_ids.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            return_dict=True,
        )

    def logits(self, states: Any, rows: Tensor | slice) -> Tensor:
        self._ready.output = type(states)(last_hidden_state=states.last_hidden_state[:, rows])
        return self._head(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits[0].float()

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, options: dict[str, Any]
    ) -> Tensor:
        """q [1, heads, T, D], k and v [1, KV heads, T, D] → [1, T, heads, D]."""
        keys, values = self._cache.layers[layer]
        expected = (keys.shape[1], keys.shape[3])
        for name, part in (("keys", k), ("values", v)):
            if (found := (part.shape[1], part.shape[3])) != expected:
                raise unsupported(
                    f"layer {layer} has {found[0]} {name} of {found[1]}, its configuration says {expected[0]} of "
                    f"{expected[1]}",
                    field="architectures",
                    value=layer,
                )
        step = self._step
        assert step is not None
        self._attended.add(layer)
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))
        q = kernels.rope_and_store(
            *(q, k, v, step.positions, self._no_angles, step.slot_mapping, keys, values)
        )
        mixed = kernels.paged_attention(
            *(q, keys, values, step.block_tables, step.query_start, step.seq_lens),
            kernels.AttentionOptions(
                scale,
                window or self._windows[layer],
                float(options.get("softcap") or 0.0),
                sinks=options.get("s_aux"),
            ),
        )
        return mixed.unsqueeze(0)


class _Ready(nn.Module):
    """Stands where the body was, and gives what it gave."""

    output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


class _Packed(nn.Module):
    """A linear layer on our kernels."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = kernels.pack_linear(linear.weight, linear.bias)
        # Some code asks for the dtype.
        self.register_buffer("weight", torch.empty(0, dtype=linear.weight.dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x.flatten(0, -2), self._packed).view(*x.shape[:-1], -1)


class _Activation(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._function = ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    model: FallbackModel = module._kvern
    return model.attend(module.layer_idx, query, key, value, scale, int(sliding_window or 0), options), None


def _config(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise invalid(
            "model", f"transformers cannot read {folder}/config.json: {error}", value=folder
        ) from error
    return config.get_text_config()


def _check_class(raw: HfConfig, config: Any) -> None:
    import transformers

    known = getattr(transformers, raw.architecture, None)
    if known is None:
        return  # the repository's own; what it does shows when it is loaded
    if getattr(known, "_is_stateful", False) or not getattr(known, "_supports_attention_backend", False):
        raise unsupported(
            f"{raw.architecture} does not let attention be replaced (or keeps state beside it), and so cannot run on "
            "the paged cache",
            field="architectures",
            value=raw.architecture,
        )


def _load(config: FallbackConfig, loader: WeightLoader) -> Any:
    """The module with its weights; matrices and activations are ours. Raises KvernError naming what is missing."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    model: Any
    AttentionInterface.register(_NAME, _attention)
    options: Any = {"trust_remote_code": config.trust_remote_code, "attn_implementation": _NAME}
    if not loader.has_files:
        whole = _config(Path(config.folder), config.trust_remote_code)
        model = AutoModelForCausalLM.from_config(whole, dtype=loader.dtype, **options)
    else:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                *(config.folder,),
                dtype=loader.dtype,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise invalid(
                "model", f"transformers cannot load {config.folder}: {error}", value=config.folder
            ) from error
        model, info = loaded
        for problem in ("missing_keys", "mismatched_keys"):
            if found := sorted(map(str, info[problem])):
                raise invalid(
                    "model",
                    f"{len(found)} tensors of {config.folder} are {problem.removesuffix('_keys')}, the first is {found[0]}",
                    value=found[0],
                )
    model.eval().requires_grad_(False)
    loader.took_all(sum(p.numel() for p in model.parameters()), sum(p.nbytes for p in model.parameters()))
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if type(child) is nn.Linear:
                setattr(parent, name, _Packed(child))
            elif (kind := _ACTIVATIONS.get(type(child).__name__)) is not None:
                setattr(parent, name, _Activation(kind))
    return model
