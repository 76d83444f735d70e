"""Adapters that PEFT saved, through all services: each as if its weights were merged, whatever runs beside it or dies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import peft
import pytest
import torch
import transformers
from e2e.running import Running, run_kvern, until
from worker.test_worker_parity import assert_greedy

from kvern.v1 import adapter_pb2, generation_pb2, generation_pb2_grpc
from kvern_gateway.cli.make_model import make_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "a": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "b": {"r": 8, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True},
    "c": {"r": 2, "lora_alpha": 8, "target_modules": ["o_proj", "down_proj"]},
    "large": {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj"]},
}
BASE = "toy"


@dataclass
class Adapted:
    """A running stack, folders by adapter, and by name of what is asked the model that it stands for."""

    running: Running
    folders: dict[str, Path]
    models: dict[str, Any]

    @property
    def client(self) -> openai.OpenAI:
        http = httpx.Client(timeout=60, verify=False)
        return openai.OpenAI(base_url=f"{self.running.base_url}/v1", api_key="none", http_client=http)

    def tokens(self, model: str, prompt: list[int], count: int = 24) -> list[int]:
        answer = self.client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=count,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        assert answer.model == model
        return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.running.client.post(f"/v1/{route}_lora_adapter", json=body)


def save_adapter(base: Path, folder: Path, config: dict[str, Any]) -> Any:
    """PEFT's files of a random adapter in ``folder``; the model with the adapter merged into its weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
        adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **config))
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("lora")
    base = make_model(folder / BASE, "qwen3-toy").path
    models: dict[str, Any] = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        models[name] = save_adapter(base, folder / name, config)
    models[BASE] = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    folders = {name: folder / name for name in CONFIGS}
    # Two slots for three adapters.
    flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--allow-runtime-lora-updating"]
    modules = ["--lora-modules", f"a={folders['a']}", f'{{"name": "b", "path": "{folders["b"]}"}}']
    with run_kvern(folder, *flags, *modules, str(base), "--dtype", "float32") as running:
        adapted = Adapted(running, folders, models)
        answer = adapted.post("load", lora_name="c", lora_path=str(folders["c"]))
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'c' added successfully.")
        yield adapted


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(3, 1000, random.integers(3, 60)).tolist() for _ in range(count)]


def test_the_base_and_three_adapters_in_one_batch_equal_merged_weights(adapted: Adapted) -> None:
    asked = list(zip([BASE, "a", "b", "c"] * 3, prompts(12), strict=True))
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda one: adapted.tokens(*one), asked))
    for (name, prompt), tokens in zip(asked, together, strict=True):
        assert len(tokens) == 24
        assert_greedy(adapted.models[name], prompt, tokens)
        assert adapted.tokens(name, prompt) == tokens  # alone, its prompt's blocks found
    # Each is another model: of one prompt they say other things.
    assert len({tuple(adapted.tokens(name, asked[0][1])) for name in (BASE, "a", "b", "c")}) == 4


def test_names_are_those_of_the_models_list(adapted: Adapted) -> None:
    cards = {card.id: card for card in adapted.client.models.list()}
    assert set(cards) == {BASE, "a", "b", "c"}
    assert (cards["b"].parent, cards["b"].root) == (BASE, str(adapted.folders["b"]))  # type: ignore[attr-defined]
    assert cards[BASE].parent is None  # type: ignore[attr-defined]
    assert adapted.client.models.retrieve("a").id == "a"
    with pytest.raises(openai.NotFoundError, match=r"'nobody' is not served here; served: toy, a, b, c"):
        adapted.tokens("nobody", [5, 6])
    chat = adapted.client.chat.completions.create(
        model="a", messages=[{"role": "user", "content": "w5 w6"}], max_tokens=3
    )
    assert chat.model == "a"


def test_what_does_not_load_costs_nobody_else(adapted: Adapted) -> None:
    for body, said in (
        ({"lora_name": "large", "lora_path": str(adapted.folders["large"])}, "--max-lora-rank"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, "holds no adapter"),
        ({"lora_name": "a", "lora_path": str(adapted.folders["b"])}, "unload it first"),
        ({"lora_name": BASE, "lora_path": str(adapted.folders["b"])}, "name of the model"),
        ({"lora_name": "x"}, "lora_path is missing"),
    ):
        answer = adapted.post("load", **body)
        assert (answer.status_code, said in answer.text) == (400, True), answer.text
    assert adapted.post("unload", lora_name="x").status_code == 404
    prompt = prompts(1)[0]
    assert_greedy(adapted.models["a"], prompt, adapted.tokens("a", prompt))


def test_unloaded_while_a_stream_runs(adapted: Adapted) -> None:
    """The stream goes on to its end; new requests are refused; the name is free for other weights."""
    name, count = "fleeting", 400
    prompt = prompts(2)[1]
    expected = adapted.tokens("a", prompt, count)
    adapted.post("load", lora_name=name, lora_path=str(adapted.folders["a"])).raise_for_status()
    stream = adapted.running.stream(prompt, model=name, max_tokens=count, ignore_eos=True)
    stream.until_events(5)
    adapted.post("unload", lora_name=name).raise_for_status()
    with pytest.raises(openai.NotFoundError):
        adapted.tokens(name, prompt)
    adapted.post("load", lora_name=name, lora_path=str(adapted.folders["b"])).raise_for_status()
    # Nothing is found of what the other weights cached under this name.
    assert_greedy(adapted.models["b"], prompt, adapted.tokens(name, prompt))
    text = adapted.running.client.post("/detokenize", json={"tokens": expected}).json()["prompt"]
    assert stream.result() == text
    # In place: vLLM's way to other weights under a name in use.
    body = {"lora_name": name, "lora_path": str(adapted.folders["c"])}
    assert adapted.post("load", **body).status_code == 400
    adapted.post("load", **body, load_inplace=True).raise_for_status()
    assert_greedy(adapted.models["c"], prompt, adapted.tokens(name, prompt))
    adapted.post("unload", lora_name=name).raise_for_status()


def test_grpc_loads_lists_and_generates(adapted: Adapted) -> None:
    prompt = prompts(3)[2]
    with grpc.insecure_channel(adapted.running.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        path = str(adapted.folders["b"])
        loaded = stub.LoadAdapter(adapter_pb2.LoadAdapterRequest(name="g", path=path)).adapter
        assert (loaded.name, loaded.path, loaded.rank) == ("g", path, 8)
        listed = stub.ListAdapters(adapter_pb2.ListAdaptersRequest()).adapters
        assert [adapter.name for adapter in listed] == ["a", "b", "c", "g"]
        request = generation_pb2.GenerateRequest(
            model="g", prompt_token_ids=generation_pb2.TokenIds(ids=prompt), request_id="lora-over-grpc"
        )
        request.sampling.temperature, request.sampling.max_tokens, request.sampling.ignore_eos = 0, 16, True
        events = list(stub.Generate(request))
        tokens = [token for event in events for token in event.delta.token_ids]
        assert events[0].accepted.model == "g"
        assert_greedy(adapted.models["b"], prompt, tokens)
        stub.UnloadAdapter(adapter_pb2.UnloadAdapterRequest(name="g"))
        # It was admitted before: it can still be read.
        again = [
            event.event for event in stub.Stream(generation_pb2.StreamRequest(request_id="lora-over-grpc"))
        ]
        assert again[0].accepted.model == "g"
        assert [token for event in again for token in event.delta.token_ids] == tokens
        request.request_id = ""
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("victim", ["scheduler", "worker", "store"])
def test_streams_with_adapters_outlive_a_death(adapted: Adapted, victim: str) -> None:
    prompt, count = prompts(4)[3], 400
    expected = {
        name: adapted.running.complete(prompt, model=name, max_tokens=count, ignore_eos=True)
        for name in "abc"
    }
    streams = {
        name: adapted.running.stream(prompt, model=name, max_tokens=count, ignore_eos=True) for name in "abc"
    }
    until(lambda: sum(stream.num_events for stream in streams.values()) > 30, "tokens")
    old = adapted.running.kill(victim)
    for name, stream in streams.items():
        assert stream.result() == expected[name]["choices"][0]["text"]
    adapted.running.until_restarted(victim, old)
    adapted.running.until_healthy()
    # Those loaded by a call are there like those of flags.
    assert {card.id for card in adapted.client.models.list()} == {BASE, "a", "b", "c"}
    scraped = adapted.running.client.get("/metrics")
    assert scraped.status_code == 200
