"""A tiny Qwen2.5-VL through all services: transformers' tokens for a picture in a chat, whatever dies meanwhile."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from e2e.running import Running, Stream, run_kvern
from parity.families import VOCAB
from parity.vision_families import IMAGE_TOKEN, VISION_FAMILIES, picture
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

FAMILY = VISION_FAMILIES["Qwen 2.5 VL"]
TEMPLATE = (
    "{% for message in messages %}w10 w11 {% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}w12 <image> w13 {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}w14"
)
TOKENS = 300
TEXT = " ".join(f"w{index}" for index in range(20, 60))


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.set_num_threads(1)
    return FAMILY.make()


@pytest.fixture(scope="module")
def seeing(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = FAMILY.save(reference, tmp_path_factory.mktemp("qwen"))
    words = {("<image>" if index == IMAGE_TOKEN else f"w{index}"): index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with run_kvern(tmp_path_factory.mktemp("seeing"), str(folder), "--dtype", "float32") as running:
        yield running


def body(image: Image.Image, max_tokens: int = 12, **more: Any) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
    messages = [{"role": "user", "content": parts}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}


@torch.inference_mode()
def greedy(reference: Any, image: Image.Image, length: int) -> list[int]:
    """transformers' own, one token after the other."""
    height, width = FAMILY.tensors([image])["image_grid_thw"][0, 1:].tolist()
    placed = [IMAGE_TOKEN] * (height * width // 4)
    tokens = [10, 11, 12, *placed, 13, *range(20, 60), 14]
    start = len(tokens)
    for _ in range(length):
        logits = reference(**FAMILY.arguments(tokens, [image])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[start:]


def test_openai_s_client_gets_transformers_tokens(seeing: Running, reference: Any) -> None:
    http = httpx.Client(timeout=60, verify=False)
    client = openai.OpenAI(base_url=f"{seeing.base_url}/v1", api_key="none", http_client=http)
    first, other = picture(1, 90, 60), picture(2, 90, 60)
    model, cached = client.models.list().data[0].id, []
    for image in (first, first, other):
        asked = body(image)
        answer = client.chat.completions.create(model=model, extra_body={"ignore_eos": True}, **asked)
        words = " ".join(f"w{token}" for token in greedy(reference, image, asked["max_tokens"]))
        assert answer.choices[0].message.content == words
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    # The same image twice hits the prefix cache; another one with the same text does not.
    assert cached[0] == 0 and cached[1] >= 32 and cached[2] == 0


class Chat(Stream):
    PATH = "/v1/chat/completions"

    @staticmethod
    def _text(choice: dict[str, Any]) -> str:
        return choice["delta"].get("content") or ""


@pytest.mark.parametrize("victim", ["worker", "scheduler", "store"])
def test_a_stream_about_an_image_outlives_a_death(seeing: Running, victim: str) -> None:
    asked = body(picture(3, 120, 70), TOKENS, ignore_eos=True, stream=True)
    expected = Chat(seeing.base_url, asked).result()
    stream = Chat(seeing.base_url, asked)
    stream.until_events(20)
    old = seeing.kill(victim)
    assert stream.num_events < TOKENS
    assert stream.result() == expected
    seeing.until_restarted(victim, old)
    seeing.until_healthy()
