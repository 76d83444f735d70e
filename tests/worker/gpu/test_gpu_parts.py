"""What of the GPU's path can be shown without a GPU: padding, sizes, refusals, and that a decode step never waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.families import FAMILIES
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import KvernError
from kvern.v1.sampling_pb2 import SamplingParams
from kvern_kernels import dispatch, reference
from kvern_worker import sampling
from kvern_worker.gpu import device as gpu_device
from kvern_worker.gpu.graphs import capture_sizes, padded
from kvern_worker.gpu.loading import check
from kvern_worker.gpu.memory import largest_step, pool_bytes
from kvern_worker.gpu.sampling import GpuSampler, GpuSamplingState
from kvern_worker.gpu.staging import Staging
from kvern_worker.layers.attention import KvCache, StepInputs, warm_up_step
from kvern_worker.models import registry
from kvern_worker.sampling_state import SamplingState
from kvern_worker.weights.checkpoint import open_checkpoint
from kvern_worker.weights.loader import WeightLoader

META = torch.device("meta")
CPU = torch.device("cpu")
# Every family that has a file and keeps no states.
ON_GPU = [
    name
    for name, family in FAMILIES.items()
    if registry.ARCHITECTURES.get(family.architecture, "bamba") not in ("bamba", "qwen3_next")
    and not family.state_block_size
]


def save_config(name: str, folder: Path) -> Path:
    config = FAMILIES[name].make().config
    config.architectures = [FAMILIES[name].architecture]
    config.save_pretrained(folder)
    return folder


def decode_step(count: int) -> StepInputs:
    return StepInputs(
        token_ids=torch.arange(count) + 5,
        positions=torch.arange(count) + 20,
        slot_mapping=torch.arange(count) * 7,
        block_tables=torch.arange(count * 2, dtype=torch.int32).view(count, 2) + 1,
        query_start=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=torch.arange(count, dtype=torch.int32) + 21,
        state_rows=torch.arange(count),
        fresh=torch.zeros(count, dtype=torch.bool),
    )


def tensors(step: StepInputs) -> dict[str, Tensor]:
    named = {field.name: getattr(step, field.name) for field in fields(step)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def test_padding_rows_have_no_query_and_are_stored_nowhere() -> None:
    step, wide = decode_step(3), padded(decode_step(3), 8, 5)
    assert wide.slot_mapping[3:].tolist() == [-1] * 5
    assert (wide.query_start.diff() == torch.tensor([1] * 3 + [0] * 5)).all()
    assert wide.seq_lens.tolist() == [21, 22, 23, 0, 0, 0, 0, 0]
    assert wide.block_tables.shape == (8, 5) and (wide.block_tables[:3, :2] == step.block_tables).all()
    assert not wide.block_tables[3:].any() and not wide.block_tables[:, 2:].any()
    assert wide.state_rows[3:].tolist() == [-1] * 5 and bool(wide.fresh[3:].all())
    for name, before in tensors(step).items():
        after = tensors(wide)[name]
        assert after.dtype == before.dtype
        assert before.dim() > 1 or torch.equal(after[: len(before)], before)


def test_sizes_to_capture() -> None:
    assert capture_sizes(None, 3) == [1, 2, 3]
    assert capture_sizes(None, 20) == [1, 2, 4, 8, 16, 20]
    assert capture_sizes(None, 4096)[-2:] == [480, 512]
    assert capture_sizes([8, 1, 8, 64], 16) == [1, 8]
    with pytest.raises(KvernError, match="must be positive"):
        capture_sizes([0], 16)


def test_staged_tensors_keep_values_types_and_addresses() -> None:
    staging = Staging(CPU)
    first = staging.put_step(padded(decode_step(4), 20, 9))
    addresses = [tensor.data_ptr() for tensor in tensors(first).values()]
    again = staging.put_step(padded(decode_step(20), 20, 9))
    assert [tensor.data_ptr() for tensor in tensors(again).values()] == addresses
    for name, expected in tensors(padded(decode_step(20), 20, 9)).items():
        found = tensors(again)[name]
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_the_cache_takes_what_is_left() -> None:
    gib = 2**30
    assert pool_bytes(80 * gib, 60 * gib, 4 * gib, 0.9) == 48 * gib
    assert pool_bytes(80 * gib, 60 * gib, 4 * gib, None) == 48 * gib
    with pytest.raises(
        KvernError, match=r"no room for a KV cache: 0\.9 of the GPU's 16\.00 GiB, less 15\.00 GiB in use"
    ):
        pool_bytes(16 * gib, gib, gib, 0.9)


def test_the_largest_step_is_whole_sequences_and_a_rest() -> None:
    step = largest_step(20, 8, 4)
    assert step.seq_lens.tolist() == [8, 8, 4] and step.query_start.tolist() == [0, 8, 16, 20]
    assert step.block_tables.shape == (3, 2) and step.positions[-4:].tolist() == [0, 1, 2, 3]
    assert (step.slot_mapping == -1).all()


def test_resized_cache_is_what_layers_hold() -> None:
    cache = KvCache([0, 1], 1, 2, 4, 8, torch.float32)
    keys, values = cache.layers[1]
    cache.resize(5)
    assert keys.shape == values.shape == (5, 2, 4, 8) and cache.num_blocks == 5
    keys[4] = 3.0
    assert (cache.layers[1][0][4] == 3.0).all() and not cache.layers[0][0].any()


def test_a_cache_is_made_where_it_is_to_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU, where each op looks at the device that it is given."""
    made = dispatch._by_device(
        "new_kv_cache", {"cpu": reference.new_kv_cache, "cuda": lambda *_, **__: "there"}
    )
    monkeypatch.setattr(kernels, "new_kv_cache", made)
    assert KvCache([0], 1, 2, 4, 8, torch.float32, device=torch.device("cuda")).layers == {0: "there"}
    assert KvCache([0], 1, 2, 4, 8, torch.float32).layers[0][0].device == CPU


def test_layers_are_loaded_where_they_run(tmp_path: Path) -> None:
    source = open_checkpoint(str(save_config("Llama", tmp_path)), "dummy").source
    loader = WeightLoader(source, torch.bfloat16, lambda count: None, 2, device=META)
    found = loader.side_by_side(lambda: torch.arange(3), lambda: loader.tensor("model.norm.weight", 64))
    assert [tensor.device for tensor in found] == [META, META]


def test_without_a_gpu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(KvernError, match="built for CPUs only; install one with CUDA"):
        gpu_device.open_gpu()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with pytest.raises(KvernError, match="torch finds no GPU; see that `nvidia-smi` lists one"):
        gpu_device.open_gpu()


def test_what_runs_on_cpus_only_is_refused_by_name(tmp_path: Path) -> None:
    def refused(name: str, message: str, kv_dtype: str = "bf16") -> None:
        folder = tmp_path / name
        opened = open_checkpoint(str(save_config(name, folder)), "dummy")
        with pytest.raises(KvernError, match=message):
            check(opened.file, opened.config, kv_dtype)

    refused("Llama", "kv-cache-dtype int8 is not supported on a GPU", kv_dtype="int8")
    opened = open_checkpoint(str(save_config("Llama", tmp_path / "wide")), "dummy")
    with pytest.raises(KvernError, match="attention heads of 576 components"):
        check(opened.file, replace(opened.config, head_dim=576), "bf16")
    refused("Bamba", "keeps states beside its KV cache")


def test_sampler_equals_the_hosts() -> None:
    """Rows with every parameter, a row with NaN and one whose parameters leave no token."""
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 3, (8, 300)).astype(np.float32)
    logits[6, 11] = np.nan
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=5, seed=1),
        SamplingParams(temperature=1.1, top_p=0.5, seed=2, allowed_token_ids=[4, 9, 20, 31]),
        SamplingParams(temperature=0.9, min_p=0.2, seed=3, logit_bias={7: 9.0, 8: -3.0}),
        SamplingParams(temperature=0.0, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5),
        SamplingParams(temperature=0.0, min_tokens=99, stop_token_ids=[int(logits[5].argmax())]),
        SamplingParams(temperature=0.5, logit_bias={11: 1.0}),
        SamplingParams(temperature=0.5, allowed_token_ids=[4, 5], bad_token_ids=[4, 5]),
    ]
    tokens = rng.integers(0, 300, (8, 12)).astype(np.int32)
    tokens[4, 8:] = np.argsort(logits[4])[-4:]
    here, there = SamplingState(9, 300, (2,)), GpuSamplingState(9, 300, (2,), CPU)
    slots, num_tokens = np.array([3, 0, 8, 1, 7, 2, 5, 4]), np.full(8, 12)
    sampler = GpuSampler(CPU)
    for state in (here, there):
        for slot, one, known in zip(slots.tolist(), params, tokens, strict=True):
            state.add(slot, one, known, 8)
    for _ in range(3):
        expected = sampling.sample(logits, slots, num_tokens, here)
        found = sampler.sample(torch.from_numpy(logits), slots, num_tokens, there)
        assert expected.broken.tolist() == found.broken.tolist() == [False] * 6 + [True, False]
        assert expected.empty.tolist() == found.empty.tolist() == [False] * 7 + [True]
        assert expected.token_ids[:6].tolist() == found.token_ids[:6].tolist()
        for state in (here, there):
            state.record(slots[:6], expected.token_ids[:6])
        num_tokens = num_tokens + 1


class InOneThread(WeightLoader):
    """torch's inference mode belongs to a thread."""

    def side_by_side(self, *builds: Callable[[], Any]) -> list[Any]:
        return [build() for build in builds]


@pytest.mark.parametrize("name", ON_GPU)
@torch.inference_mode()
def test_a_decode_step_never_waits_for_the_device(name: str, tmp_path: Path) -> None:
    """On tensors without values a look at one fails, and so does a graph; what is launched lies on one device."""
    from kvern_kernels.triton.launch import CHIPS, record

    opened = open_checkpoint(str(save_config(name, tmp_path)), "dummy")
    config = opened.config
    with META:
        cache = KvCache(
            config.kv_layers, 1, config.num_kv_heads, 16, config.head_dim, torch.bfloat16, device=META
        )
        loader = InOneThread(opened.source, torch.bfloat16, lambda count: None, 1, True, device=META)
        model = opened.file.build(config, loader, cache, 64)
    step = padded(warm_up_step(), 4, 4)
    step = replace(step, **{name: tensor.to(META) for name, tensor in tensors(step).items()})
    launches = record(CHIPS["sm_90"], lambda: model.logits(model.forward(step), slice(0, 4)))
    assert len(launches) > 5 * len(config.kv_layers)
    for launch in launches:
        assert {arg.device.type for arg in launch.args if isinstance(arg, Tensor)} == {"meta"}, launch.kernel
