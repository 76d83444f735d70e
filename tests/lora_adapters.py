"""Random LoRA adapters in PEFT's layout, and the weights that they make when merged, in numpy."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."


def save_adapter(
    folder: Path, model: Any, targets: list[str], rank: int, seed: int, size: float = 0.25, **config: Any
) -> Path:
    """An adapter of every linear layer of ``model`` whose name ends with one of ``targets``; ``config`` are further
    keys of adapter_config.json."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in targets and isinstance(module, torch.nn.Linear):
            for side, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                values = random.normal(0, size, shape).astype(np.float32)
                tensors[f"{PREFIX}{name}.lora_{side}.weight"] = values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **config}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def merge(model: Any, folder: Path) -> Any:
    """A copy of ``model`` with W + B·A·scale, computed in float64."""
    merged = copy.deepcopy(model)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, module in merged.named_modules():
        a = tensors.get(f"{PREFIX}{name}.lora_A.weight")
        if a is None:
            continue
        b, rank = tensors[f"{PREFIX}{name}.lora_B.weight"], a.shape[0]
        alpha = config["lora_alpha"]
        for ending, other in config.get("alpha_pattern", {}).items():
            alpha = other if name.endswith(ending) else alpha
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weight = module.weight.detach().numpy().astype(np.float64)
        with torch.no_grad():
            module.weight.copy_(
                torch.from_numpy(weight + b.astype(np.float64) @ a.astype(np.float64) * scale)
            )
    return merged
