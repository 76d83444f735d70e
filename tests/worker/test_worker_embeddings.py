"""Embeddings through the scheduler's core and the executor, against transformers and sentence-transformers' recipe."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from parity.local_engine import LocalEngine
from worker.conftest import Progress, load_executor

from kvern.errors import KvernError
from kvern.v1 import model_pb2, sampling_pb2
from kvern_scheduler.core.group import Limits
from kvern_worker.loading import LoadOptions, load
from kvern_worker.pooling import choose_pooling

VOCAB = 263
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "pad_token_id": 1,
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"max_position_embeddings": 128}),
    "roberta": ("Roberta", {"max_position_embeddings": 130, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"max_position_embeddings": 130, "hidden_act": "gelu_new"}),
}
DECODER = {
    "hidden_size": 80,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def make(family: str, **fields: Any) -> Any:
    torch.manual_seed(len(family))
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
    model = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower():
                parameter.normal_(0.0, 0.2 if parameter.dim() == 2 else 0.1)
    return model


def save(model: Any, folder: Path, mode: str = "", *, normalize: bool = True, **config: Any) -> Path:
    """With the files of sentence-transformers, where ``mode`` is given."""
    model.save_pretrained(folder)
    if config:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, **config}))
    if mode:
        types = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        modules = [
            {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"st.models.{kind}"}
            for i, kind in enumerate(types)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({mode: True, "pooling_mode_max": False}))
    return folder


def prompts(count: int = 12, longest: int = 90) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@torch.inference_mode()
def expected(model: Any, prompt: list[int], kind: str) -> np.ndarray:
    states = model(torch.tensor([prompt])).last_hidden_state[0]
    return {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[kind].numpy()


def embed(engine: LocalEngine, inputs: list[list[int]]) -> list[np.ndarray]:
    """One submitted after another, computed together."""
    requests = [engine.submit(prompt, 0, pooling=True) for prompt in inputs]
    engine.run()
    vectors = []
    for request in requests:
        finish = request.sequences[0].finish
        assert finish is not None
        assert (finish.reason, finish.num_output_tokens) == (sampling_pb2.FINISH_REASON_STOP, 0), finish.error
        vectors.append(np.frombuffer(finish.embedding, "<f4"))
    return vectors


@pytest.mark.parametrize("mode", ["mean", "cls"])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_equals_transformers(name: str, mode: str, tmp_path: Path) -> None:
    family, fields = ENCODERS[name]
    model = make(family, **fields)
    folder = save(model, tmp_path, f"pooling_mode_{mode}_token{'s' * (mode == 'mean')}")
    executor = load_executor(folder, threads=1, max_num_batched_tokens=100, max_num_seqs=8)
    engine = LocalEngine(executor, Limits(max_num_seqs=4, max_num_batched_tokens=100))
    inputs = prompts()
    for vector, prompt in zip(embed(engine, inputs), inputs, strict=True):
        np.testing.assert_allclose(vector, expected(model, prompt, mode), atol=2e-5, rtol=1e-4)
    # The next ones find blocks that held others.
    [again] = embed(engine, inputs[:1])
    np.testing.assert_allclose(again, expected(model, inputs[0], mode), atol=2e-5, rtol=1e-4)
    assert engine.group.num_prefix_hits == 0


def test_a_decoder_is_pooled_by_its_last_token_in_chunks_and_after_prefix_hits(tmp_path: Path) -> None:
    model = make("Qwen3", **DECODER)  # saved without "model." before its names, as embedding models are
    folder = save(model, tmp_path, "pooling_mode_lasttoken", architectures=["Qwen3ForCausalLM"])
    engine = LocalEngine(load_executor(folder, threads=1), Limits(max_num_seqs=4, max_num_batched_tokens=32))
    inputs = prompts()
    vectors = embed(engine, inputs)
    for vector, prompt in zip(vectors, inputs, strict=True):
        np.testing.assert_allclose(vector, expected(model, prompt, "last"), atol=2e-5, rtol=1e-4)
    again = embed(engine, inputs)
    assert engine.group.num_prefix_hits > 0
    for first, second in zip(vectors, again, strict=True):
        np.testing.assert_array_equal(first, second)


def test_an_input_that_no_step_holds_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = save(make("Bert", max_position_embeddings=128), tmp_path)
    engine = LocalEngine(load_executor(folder, threads=1, max_num_batched_tokens=64, max_num_seqs=8))
    with pytest.raises(KvernError, match=r"has 65 tokens.* at most 64.*max-num-batched-tokens") as refused:
        engine.submit([5] * 65, 0, pooling=True)
    assert (refused.value.value, refused.value.limit) == ("65", "64")
    assert len(embed(engine, [[5] * 64, [7] * 64, [8] * 3])) == 3


def test_an_encoder_does_not_generate_and_a_decoder_does_not_embed(tmp_path: Path) -> None:
    encoder = LocalEngine(load_executor(save(make("Bert"), tmp_path / "encoder"), threads=1))
    with pytest.raises(KvernError, match="gives embeddings; generation cannot be asked"):
        encoder.submit([5, 6], 4)
    decoder = save(make("Qwen3", **DECODER), tmp_path / "decoder", architectures=["Qwen3ForCausalLM"])
    generating = LocalEngine(load_executor(decoder, threads=1))
    with pytest.raises(KvernError, match="gives tokens; embeddings cannot be asked"):
        generating.submit([5, 6], 0, pooling=True)
    assert len(generating.generate([[5, 6]], 3)[0]) == 3
    # The flag decides where no file does.
    pooling = LocalEngine(load_executor(decoder, threads=1, runner="pooling"))
    [vector] = embed(pooling, [[5, 6]])
    assert vector.size == DECODER["hidden_size"]


def test_broken_numbers_cost_one_request(tmp_path: Path) -> None:
    model = make("Bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[9] = float("nan")
    engine = LocalEngine(load_executor(save(model, tmp_path), threads=1))
    broken, fine = (engine.submit(prompt, 0, pooling=True) for prompt in ([9, 3], [4, 3]))
    engine.run()
    assert broken.sequences[0].finish is not None and broken.sequences[0].finish.error is not None
    assert fine.sequences[0].finish is not None
    np.testing.assert_allclose(
        np.frombuffer(fine.sequences[0].finish.embedding, "<f4"), expected(model, [4, 3], "cls"), atol=1e-5
    )


@pytest.mark.parametrize(
    ("mode", "flags", "message"),
    [
        ("pooling_mode_max_tokens", {}, "pooling_mode_max_tokens is not supported"),
        ("pooling_mode_mean_tokens", {"runner": "generate"}, "an encoder gives embeddings"),
        ("", {"pooler_config": "{"}, "not valid JSON"),
        ("", {"pooler_config": '{"pooling_type": "MAX"}'}, "pooling_type max is unknown"),
        ("", {"pooler_config": '{"step": 3}'}, "pooler-config takes"),
    ],
)
def test_what_cannot_be_done_is_refused_before_weights_are_read(
    mode: str, flags: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save(make("Bert"), tmp_path, mode)
    with pytest.raises(KvernError, match=message):
        choose_pooling(folder, True, flags.get("runner", "auto"), flags.get("pooler_config"))


def test_what_the_files_say(tmp_path: Path) -> None:
    folder = save(
        make("Bert"), tmp_path, "pooling_mode_mean_tokens", normalize=False, matryoshka_dimensions=[16, 8]
    )
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    model = load(LoadOptions(str(folder), threads=1), Progress()).describe().model
    assert model.max_model_len == 40
    pooling = model.pooling
    assert (pooling.kind, pooling.size, pooling.normalized) == (model_pb2.POOLING_KIND_MEAN, 48, False)
    assert (pooling.truncatable, list(pooling.sizes), pooling.bidirectional) == (True, [8, 16], True)
    options = LoadOptions(
        str(folder), threads=1, max_model_len=128, pooler_config='{"pooling_type": "CLS", "normalize": true}'
    )
    model = load(options, Progress()).describe().model
    assert (model.pooling.kind, model.pooling.normalized) == (model_pb2.POOLING_KIND_CLS, True)
    assert model.max_model_len == 128
