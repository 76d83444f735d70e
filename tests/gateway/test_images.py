"""Images in chats: what is fetched and what is refused, and what reaches the scheduler."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from gateway.conftest import Serve, Served
from gateway.fake_scheduler import FakeScheduler
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from kvern.block_hash import hash_prompt, join_hashes
from kvern.errors import KvernError
from kvern.media import MAX_MEDIA_BYTES, keys_of
from kvern.rpc.packing import unpack_i32
from kvern.v1 import generation_pb2, generation_pb2_grpc
from kvern_gateway.media.fetch import Fetcher, MediaRules, is_public
from kvern_gateway.media.images import ImageLimits, Images, Source, load_images
from kvern_gateway.text.tokenizer import TextModel

IMAGE_ID = 3
WORDS = ["<unk>", "a", "b", "<image>", "USER:", "ASSISTANT:", "what", "is", "this", "?"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} "
    "{% endif %}{% endfor %}{% endfor %}ASSISTANT:"
)
ANY = MediaRules(is_public=lambda address: True)


def picture(width: int = 60, height: int = 40, seed: int = 0, **how: Any) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, how.pop("format", "PNG"), **how)
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat(*urls: str, text: str = "what is this ?") -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
        "max_tokens": 2,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA's configuration and image processor; no weights."""
    path = tmp_path_factory.mktemp("llava")
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": IMAGE_ID,
        "vision_config": {"patch_size": 14, "image_size": 28},
    }
    (path / "config.json").write_text(json.dumps(config))
    transformers.CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    ).save_pretrained(path)
    return path


@pytest.fixture
def text() -> TextModel:
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextModel(tokenizer, {"default": TEMPLATE}, {})


@pytest.fixture
async def seeing(serve: Serve, folder: Path, text: TextModel) -> AsyncIterator[Served]:
    scheduler = FakeScheduler(lambda submit, choice: [1, 2], vocab_size=len(WORDS))
    scheduler.welcome.model.images = True
    images = load_images(folder, text.token_text, TEMPLATE, ANY, ImageLimits(max_images=2, max_pixels=10_000))
    yield await serve(scheduler, text=text, images=images)


async def refused(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert not served.scheduler.submits
    return dict(answer.json()["error"])


async def test_an_image_becomes_its_tokens_and_keys_the_block_hashes(seeing: Served) -> None:
    client = seeing.openai()
    for seed in (1, 1, 2):
        body = chat(data_url(picture(seed=seed)), text="what is this ? " * 8)
        await client.chat.completions.create(model="test-model", **body)
    first, again, other = seeing.scheduler.submits
    tokens = unpack_i32(first.prompt_token_ids).tolist()
    assert tokens[:6] == [4, 3, 3, 3, 3, 6]
    (item,) = first.media
    assert (item.offset, item.length, item.tiles, item.height, item.width) == (1, 4, 1, 28, 28)
    assert len(item.pixels) == 28 * 28 * 3
    assert first.block_hashes == join_hashes(hash_prompt(tokens, 16, images=keys_of(first.media)))
    assert first.block_hashes == again.block_hashes and len(first.block_hashes) >= 64
    assert first.prompt_token_ids == other.prompt_token_ids
    assert first.block_hashes[:32] != other.block_hashes[:32]
    assert first.block_hashes[:32] != join_hashes(hash_prompt(tokens, 16))[:32]


async def test_grpc_takes_image_bytes_and_urls(seeing: Served) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(seeing.channel)
    data = picture()
    part = generation_pb2.ContentPart
    for image in (part(image=data), part(image_url=data_url(data))):
        message = generation_pb2.ChatMessage(role="user", parts=[image, part(text="what is this ?")])
        request = generation_pb2.GenerateRequest(chat=generation_pb2.ChatInput(messages=[message]))
        request.sampling.max_tokens = 2
        assert [event async for event in stub.Generate(request)]
    first, second = seeing.scheduler.submits
    assert first.media == second.media and first.media[0].length == 4


async def test_what_is_no_image_or_too_much_is_refused_by_name(seeing: Served) -> None:
    whole = picture()
    for url, said in (
        (data_url(b"hello"), "no image of a known format"),
        (data_url(whole[:-200]), "damaged"),
        (data_url(picture(101, 100)), "101 × 100 pixels"),
        ("data:image/png;base64,!!!!", "base64 is damaged"),
        ("data:image/png,abc", "without base64"),
        ("ftp://example.com/a.png", "must be a data:"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
    ):
        error = await refused(seeing, chat(url))
        assert said in error["message"] and error["param"].startswith("messages[0].content[0].image_url"), (
            error
        )
    error = await refused(seeing, chat(*[data_url(whole)] * 3))
    assert "3 images; 2 are allowed" in error["message"]
    error = await refused(seeing, chat(data_url(whole), text="is <image> this ?"))
    assert "2 places for 1 images" in error["message"]
    # It serves on.
    assert (await seeing.http.post("/v1/chat/completions", json=chat(data_url(whole)))).status_code == 200


async def test_bombs_cost_nothing(seeing: Served) -> None:
    """Files of a few hundred bytes that would decode to gigabytes, or whose head says so."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**6)))
    error = await refused(seeing, chat(data_url(bomb)))
    assert "50000 × 50000 pixels" in error["message"]
    # Few pixels, much text: the decoder's own bound holds.
    small = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    texts = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(80 * 2**20)))
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", small) + texts + chunk(b"IDAT", zlib.compress(bytes(8 * 25)))
    assert "damaged" in (await refused(seeing, chat(data_url(bomb))))["message"]


async def test_a_text_model_refuses_images(served: Served) -> None:
    answer = await served.http.post("/v1/chat/completions", json=chat(data_url(picture())))
    assert answer.status_code == 501 or answer.status_code == 400, answer.text
    assert "takes none" in answer.json()["error"]["message"]
    assert not served.scheduler.submits


# -- fetching -----------------------------------------------------------------------------------------------------------


class Site:
    """A web server on the loopback address that answers with what it is told to."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.asked: list[bytes] = []

    async def __aenter__(self) -> Site:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        await writer.drain()
        writer.close()

    def url(self, host: str = "127.0.0.1", path: str = "/a.png") -> str:
        return f"http://{host}:{self.port}{path}"


def ok(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"connection: close", *headers, b"", body])


def moved(url: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {url}\r\ncontent-length: 0\r\n\r\n".encode()


async def test_an_image_is_fetched_within_its_bounds() -> None:
    async with Site(ok(b"x" * 1000)) as site:
        assert await Fetcher(ANY).fetch("image", site.url()) == b"x" * 1000
        assert site.asked[0].startswith(b"GET /a.png HTTP/1.1\r\n")
        for rules in (MediaRules(is_public=ANY.is_public, max_bytes=999),):
            with pytest.raises(KvernError, match="more than 999 bytes"):
                await Fetcher(rules).fetch("image", site.url())
    async with Site(ok(b"", b"content-length: 999999999")) as site:
        with pytest.raises(KvernError, match="more than"):
            await Fetcher(ANY).fetch("image", site.url())
    async with Site(ok(b"", b"content-length: 10")) as site:  # and then nothing
        with pytest.raises(KvernError, match=r"could not be fetched|took longer"):
            await Fetcher(MediaRules(is_public=ANY.is_public, timeout_s=0.5)).fetch("image", site.url())
    async with Site(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n") as site:
        with pytest.raises(KvernError, match="status 404"):
            await Fetcher(ANY).fetch("image", site.url())


async def test_private_addresses_are_never_asked_however_they_are_spelled() -> None:
    async with Site(ok(b"secret")) as site:
        fetcher = Fetcher(MediaRules())
        for host in (
            "127.0.0.1",
            "localhost",
            "2130706433",
            "0x7f.1",
            "127.1",
            "[::ffff:127.0.0.1]",
            "0.0.0.0",
        ):
            with pytest.raises(KvernError, match=r"not public|could not be fetched|no plain"):
                await fetcher.fetch("image", site.url(host))
        for url in (
            f"http://example.com\\@127.0.0.1:{site.port}/",
            f"http://user@127.0.0.1:{site.port}/",
            f"http://127.0.0.1:{site.port}/ HTTP/1.1",
            "http:///a.png",
            "http://169.254.169.254/latest/meta-data/",
        ):
            with pytest.raises(KvernError):
                await fetcher.fetch("image", url)
        assert not site.asked


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_addresses_that_are_public() -> None:
    assert all(is_public(address) for address in ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"))


async def test_redirects_are_checked_like_the_first_url() -> None:
    async with Site(ok(b"image")) as target, Site(b"") as first:
        first.answer = moved(target.url())
        assert await Fetcher(ANY).fetch("image", first.url()) == b"image"
        target.asked.clear()
        # Only the first one's address may be asked: "localhost" and 127.0.0.1 are the same, the rule sees both.
        only = MediaRules(allowed_domains=frozenset({"localhost"}), is_public=ANY.is_public)
        with pytest.raises(KvernError, match="allowed-media-domains"):
            await Fetcher(only).fetch("image", first.url("localhost"))
        first.answer = moved("file:///etc/passwd")
        with pytest.raises(KvernError, match="no plain"):
            await Fetcher(ANY).fetch("image", first.url())
        first.answer = moved(first.url())
        with pytest.raises(KvernError, match="redirected more often"):
            await Fetcher(ANY).fetch("image", first.url())
        assert not target.asked


async def test_only_listed_domains_are_asked() -> None:
    rules = MediaRules(allowed_domains=frozenset({"example.com"}), is_public=ANY.is_public)
    async with Site(ok(b"image")) as site:
        for host in ("127.0.0.1", "localhost", "example.com.localhost"):
            with pytest.raises(KvernError, match="allowed-media-domains"):
                await Fetcher(rules).fetch("image", site.url(host))
        assert not site.asked


async def test_files_are_read_under_one_folder_only(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "secret"
    inside.mkdir()
    (inside / "a b.png").write_bytes(b"image")
    outside.write_bytes(b"secret")
    (inside / "link").symlink_to(outside)
    fetcher = Fetcher(MediaRules(local_path=inside))
    assert await fetcher.fetch("image", f"file://{inside}/a%20b.png") == b"image"
    for url in (
        f"file://{outside}",
        f"file://{inside}/../secret",
        f"file://{inside}/%2e%2e/secret",
        f"file://{inside}/link",
        f"file://{inside}",
        f"file://{inside}/none",
        f"file://host{inside}/a%20b.png",
        "file:a.png",
    ):
        with pytest.raises(KvernError):
            await fetcher.fetch("image", url)


async def test_an_image_of_a_good_camera_is_made_small_enough(tmp_path: Path, text: TextModel) -> None:
    """The model's own bound lets one image be more than a request may have."""
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "image_token_id": IMAGE_ID}
    (tmp_path / "config.json").write_text(json.dumps(config))
    transformers.Qwen2VLImageProcessor(min_pixels=3136, max_pixels=12_845_056).save_pretrained(tmp_path)
    images = load_images(tmp_path, text.token_text, TEMPLATE, ANY, ImageLimits())
    assert images is not None
    file = io.BytesIO()
    Image.new("RGB", (4032, 3024), (200, 30, 90)).save(file, "JPEG")
    try:
        (item,) = await images.prepare([Source("image", data=file.getvalue())])
    finally:
        await images.close()
    assert 0.9 * MAX_MEDIA_BYTES < len(item.pixels) <= MAX_MEDIA_BYTES
    assert abs(item.width / item.height - 4 / 3) < 0.05


def test_flags_that_make_no_sense_are_refused(folder: Path, text: TextModel) -> None:
    with pytest.raises(ValueError, match="mm-processor-kwargs: image_mean"):
        load_images(folder, text.token_text, TEMPLATE, ANY, ImageLimits(), {"image_mean": [0, 0, 0]})
    made = load_images(folder, text.token_text, TEMPLATE, ANY, ImageLimits(), {"size": {"shortest_edge": 56}})
    assert isinstance(made, Images)
