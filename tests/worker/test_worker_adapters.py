"""LoRA on the worker: equal to merged weights, each sequence as if alone, and files that cannot be served."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import merge, save_adapter
from safetensors.torch import load_file, save_file
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, greedy
from worker.test_worker_parity import assert_greedy, random_prompts

from kvern.errors import KvernError
from kvern.v1 import error_pb2, worker_pb2
from kvern_kernels import cpu
from kvern_worker.adapters.peft import Adapter, Pair
from kvern_worker.adapters.slots import AdapterSlots
from kvern_worker.executor import ModelExecutor

ATTENTION = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Targets, rank, further configuration.
ADAPTERS: list[tuple[list[str], int, dict[str, Any]]] = [
    (ATTENTION, 4, {}),
    (ALL, 8, {"use_rslora": True, "lora_alpha": 3}),
    (["k_proj", "up_proj", "down_proj"], 3, {"alpha_pattern": {"up_proj": 9}}),
]


def place(executor: ModelExecutor, path: Path, slot: int = 0) -> worker_pb2.PlaceAdapterResponse:
    return executor.place_adapter(worker_pb2.PlaceAdapterRequest(path=str(path), slot=slot))


@pytest.fixture
def adapters(reference: Callable[[str], Any], tmp_path: Path) -> Callable[[str], list[Path]]:
    def make(name: str) -> list[Path]:
        return [
            save_adapter(tmp_path / f"{name}-{seed}", reference(name), targets, rank, seed, **config)
            for seed, (targets, rank, config) in enumerate(ADAPTERS)
        ]

    return make


def traced(executor: ModelExecutor, chosen: list[int], chunk: int = 512) -> list[tuple[list[int], list[Any]]]:
    """Sequence i has the adapter of slot chosen[i] − 1, or none."""
    prompts = random_prompts(8)
    sequences = [
        Sequence(prompts[i % 8], greedy(logprobs=5), 12, adapter=slot) for i, slot in enumerate(chosen)
    ]
    MiniScheduler(executor, shuffle_seed=len(chosen)).run(sequences, chunk)
    assert all(sequence.error is None for sequence in sequences)
    return [(s.output, [list(lp.top_logprobs) for lp in s.logprobs]) for s in sequences]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_mixed_batch_equals_merged_weights(
    name: str, reference: Any, checkpoint: Any, adapters: Callable[[str], list[Path]]
) -> None:
    folders = adapters(name)
    executor = load_executor(checkpoint(name), max_loras=3)
    for slot, folder in enumerate(folders, 1):
        place(executor, folder, slot)
    models = [reference(name), *(merge(reference(name), folder) for folder in folders)]
    prompts = random_prompts(8)
    sequences = [Sequence(prompt, greedy(), 16, adapter=i % 4) for i, prompt in enumerate(prompts)]
    MiniScheduler(executor).run(sequences, chunk=16)
    for sequence in sequences:
        assert len(sequence.output) == 16
        assert_greedy(models[sequence.adapter], sequence.prompt, sequence.output)
    assert len({tuple(s.output[-8:]) for s in sequences}) == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_neither_on_other_adapters_nor_on_chunks(
    dtype: str, checkpoint: Any, adapters: Callable[[str], list[Path]]
) -> None:
    executor = load_executor(checkpoint("llama"), dtype=dtype, max_loras=3)
    for slot, folder in enumerate(adapters("llama"), 1):
        place(executor, folder, slot)
    chosen = [0, 1, 2, 3, 3, 2, 1, 0]
    together = traced(executor, chosen)
    assert traced(executor, chosen, chunk=16) == together
    prompts = random_prompts(8)
    for i, slot in enumerate(chosen):
        single = Sequence(prompts[i], greedy(logprobs=5), 12, adapter=slot)
        MiniScheduler(executor).run([single])
        assert (single.output, [list(lp.top_logprobs) for lp in single.logprobs]) == together[i]


def test_a_base_batch_is_what_it_is_without_lora(
    checkpoint: Any, adapters: Callable[[str], list[Path]]
) -> None:
    with_adapters = load_executor(checkpoint("llama"), dtype="bfloat16", max_loras=1)
    place(with_adapters, adapters("llama")[1], 1)
    plain = load_executor(checkpoint("llama"), dtype="bfloat16")
    assert traced(with_adapters, [0] * 4) == traced(plain, [0] * 4)


def test_a_slot_is_filled_anew_while_others_compute(
    checkpoint: Any, adapters: Callable[[str], list[Path]]
) -> None:
    first, second, third = adapters("llama")
    executor = load_executor(checkpoint("llama"), max_loras=2)
    place(executor, first, 1)
    place(executor, second, 2)
    expected = traced(executor, [1, 1])
    stop = threading.Event()

    def refill() -> None:
        while not stop.is_set():
            place(executor, third, 2)
            place(executor, second, 2)

    thread = threading.Thread(target=refill)
    thread.start()
    try:
        for _ in range(3):
            assert traced(executor, [1, 1]) == expected
    finally:
        stop.set()
        thread.join()
    place(executor, third, 1)
    place(executor, first, 2)
    assert traced(executor, [2, 2]) == expected  # nothing of what the slot held before is left


def test_over_a_quantized_base() -> None:
    """The delta is added to the output of a layer that stays quantized: equal to the same base, dequantized."""
    weight = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
    scales, a, b = torch.rand(48) * 0.01, torch.randn(4, 64), torch.randn(48, 4)
    slots = AdapterSlots(2, 8, torch.float32)
    packed = slots.adapt(cpu.pack_int8(weight, scales), ["layers.0.q"], [48], 64)
    slots.fill(1, Adapter(b"", 4, {"layers.0.q": Pair(a, b, 0.5)}))
    x = torch.randn(6, 64)
    chosen = torch.tensor([1, -1, 1], dtype=torch.int32).numpy()
    slots.begin(chosen, torch.tensor([2, 3, 1]).numpy())
    found = cpu.linear(x, packed)
    base = x @ (weight.float() * scales[:, None]).t()
    merged = base + x @ a.t() @ b.t() * 0.5
    rows = torch.tensor([True, True, False, False, False, True])
    torch.testing.assert_close(found[rows], merged[rows], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[~rows], base[~rows], rtol=1e-3, atol=1e-3)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    if tensors is not None:
        weights = folder / "adapter_model.safetensors"
        save_file({**load_file(weights), **tensors}, weights)


LAYER = "base_model.model.model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"use_dora": True}, None, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, None, "modules_to_save"),
        ({"bias": "all"}, None, "bias 'all'"),
        ({"peft_type": "IA3"}, None, "'IA3'"),
        ({"init_lora_weights": "pissa"}, None, "changed base model"),
        ({}, {f"{LAYER}.q_proj.lora_magnitude_vector": torch.ones(3)}, "DoRA"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3, 3)}, "embeddings"),
        ({}, {"base_model.model.lm_head.weight": torch.ones(3, 3)}, "vocabulary of their own"),
        ({}, {"base_model.model.lm_head.lora_A.weight": torch.ones(3, 3)}, "lm_head takes no adapter"),
        ({}, {f"{LAYER}.q_proj.lora_A.weight": torch.ones(4, 5)}, "is it one of this model"),
        ({}, {f"{LAYER}.o_proj.lora_A.weight": torch.ones(4, 144)}, "lacks lora_A or lora_B"),
        ({}, {f"{LAYER}.q_proj.lora_B.weight": torch.full((144, 4), torch.nan)}, "NaN"),
    ],
)
def test_what_cannot_be_served_is_named(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor] | None,
    said: str,
    checkpoint: Any,
    reference: Any,
    tmp_path: Path,
) -> None:
    executor = load_executor(checkpoint("llama"), max_loras=1)
    folder = save_adapter(tmp_path / "broken", reference("llama"), ATTENTION, 4, 1)
    rewrite(folder, tensors, **config)
    with pytest.raises(KvernError, match=said):
        place(executor, folder)


def test_rank_missing_files_and_changed_files(checkpoint: Any, reference: Any, tmp_path: Path) -> None:
    executor = load_executor(checkpoint("llama"), max_loras=1, max_lora_rank=4)
    with pytest.raises(KvernError, match="rank 5, this worker takes up to 4"):
        place(executor, save_adapter(tmp_path / "five", reference("llama"), ATTENTION, 5, 1))
    with pytest.raises(KvernError, match="holds no adapter that PEFT saved"):
        place(executor, tmp_path / "nowhere")
    folder = save_adapter(tmp_path / "four", reference("llama"), ATTENTION, 4, 1)
    digest = place(executor, folder).digest
    (folder / "adapter_model.safetensors").write_bytes(b"no safetensors")
    again = worker_pb2.PlaceAdapterRequest(path=str(folder), digest=digest, slot=1)
    assert executor.place_adapter(again).digest == digest  # it is held in memory
    with pytest.raises(KvernError, match=r"adapter_model\.safetensors"):
        place(executor, folder)
    save_adapter(folder, reference("llama"), ATTENTION, 4, 2)
    place(executor, folder)  # another one now, which pushes the first out of memory
    with pytest.raises(KvernError, match="not those that were loaded"):
        executor.place_adapter(again)


def test_pickled_adapters_are_read_as_weights_only(checkpoint: Any, reference: Any, tmp_path: Path) -> None:
    executor = load_executor(checkpoint("llama"), max_loras=2)
    folder = save_adapter(tmp_path / "a", reference("llama"), ATTENTION, 4, 1)
    place(executor, folder, 1)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    place(executor, folder, 2)
    assert traced(executor, [1]) == traced(executor, [2])
    torch.save({"x": Path}, folder / "adapter_model.bin")
    with pytest.raises(KvernError, match=r"adapter_model\.bin"):
        place(executor, folder)


def test_a_worker_without_lora_says_so(checkpoint: Any, tmp_path: Path) -> None:
    executor = load_executor(checkpoint("llama"))
    with pytest.raises(KvernError) as caught:
        place(executor, tmp_path)
    assert caught.value.code == error_pb2.ERROR_CODE_UNIMPLEMENTED
