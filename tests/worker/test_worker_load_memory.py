"""What loading takes above what it leaves: at most one shard."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from kvern_gateway.cli.make_model import make_model

SHARD = 48 * 10**6

# Its own process: what others have freed would hide what loading takes. Pages of mapped files are the kernel's to drop.
PROBE = """
import json, sys, threading
from kvern_worker.loading import LoadOptions, load
from kvern_worker.service import Progress

def held():
    lines = open("/proc/self/status").read().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))

def options(model, form, strategy, dtype):
    return LoadOptions(model, load_format=form, safetensors_load_strategy=strategy, dtype=dtype, threads=1,
                       kv_cache_memory_bytes=2**23, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)

load(options(sys.argv[5], "auto", "auto", "auto"), Progress())  # what is imported meanwhile is not the model's
before, peak, stop = held(), 0, threading.Event()

def watch():
    global peak
    while not stop.wait(0.001):
        peak = max(peak, held())

watching = threading.Thread(target=watch, daemon=True)
watching.start()
executor = load(options(*sys.argv[1:5]), Progress())
stop.set()
watching.join()
print(json.dumps({"final": held() - before, "peak": peak - before, "weights": executor.weight_bytes}))
"""


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("form", "strategy", "dtype"),
    [
        ("safetensors", "lazy", "float32"),
        ("safetensors", "lazy", "bfloat16"),
        ("safetensors", "eager", "float32"),
        ("pt", "auto", "float32"),
    ],
)
def test_peak_memory_is_one_shard_above_the_final_size(
    model: transformers.PreTrainedModel, form: str, strategy: str, dtype: str, tmp_path: Path
) -> None:
    folder, toy = tmp_path / "model", make_model(tmp_path / "toy", "qwen3-toy").path
    model.save_pretrained(folder, max_shard_size=SHARD)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) >= 4
    if form == "pt":
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        state = model.state_dict()
        for shard in shards:
            names = [name for name, file in index["weight_map"].items() if file == shard.name]
            torch.save({name: state[name] for name in names}, shard.with_suffix(".bin"))
            shard.unlink()
        index["weight_map"] = {n: f.replace(".safetensors", ".bin") for n, f in index["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors.index.json").unlink()
    argv = [sys.executable, "-c", PROBE, str(folder), form, strategy, dtype, str(toy)]
    found = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout)
    assert found["final"] >= found["weights"] >= (4 if dtype == "float32" else 2) * SHARD
    # Beside the weights it holds the cache and a step's buffers.
    assert found["peak"] - found["weights"] <= SHARD + 2**24, found
