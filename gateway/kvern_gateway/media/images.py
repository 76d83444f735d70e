"""The images of chats: found in messages, fetched, prepared, and put into the prompt as the tokens that stand for them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvern.errors import invalid
from kvern.media import MAX_MEDIA_BYTES, image_processor_config
from kvern.v1 import media_pb2
from kvern_gateway.media.fetch import Fetcher, MediaRules
from kvern_gateway.media.prepare import KWARGS, Unprepared, preparation
from kvern_gateway.processes import ProcessFailed, ProcessPool
from kvern_gateway.validation import unimplemented

log = logging.getLogger(__name__)

_WORKER = "kvern_gateway.media.image_worker"
_MAX_PROCESSES = 2
# Wall time that an image may take, in limits of CPU time: machines are busy.
_PATIENCE = 10
# A template that takes a message's parts one by one.
_ITERATES = re.compile(r"in\s+\w+(\[['\"]content['\"]\]|\.content\b)")


@dataclass(frozen=True, slots=True)
class Source:
    """An image part of a message: the field it stands in, and its URL or its bytes."""

    name: str
    url: str = ""
    data: bytes = b""


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """``max_images`` of a request; ``max_pixels`` of an image before it is decoded; CPU seconds to prepare one."""

    max_images: int = 16
    max_pixels: int = 2**25
    timeout_s: float = 5.0


@dataclass(eq=False, kw_only=True)
class Images:
    """What a model that takes images needs. ``token_id``: in the prompt, of each token that stands for one; ``token``:
    its text."""

    model: Mapping[str, Any]
    processor: Mapping[str, Any]
    token_id: int
    token: str
    template: str
    rules: MediaRules = field(default_factory=MediaRules)
    limits: ImageLimits = field(default_factory=ImageLimits)

    def __post_init__(self) -> None:
        self._fetcher = Fetcher(self.rules)
        self._takes_parts = bool(_ITERATES.search(self.template))
        setup = {
            "model": dict(self.model),
            "processor": dict(self.processor),
            "timeout_s": self.limits.timeout_s,
            "max_pixels": self.limits.max_pixels,
        }
        patience = _PATIENCE * self.limits.timeout_s
        self._pool = ProcessPool(_WORKER, json.dumps(setup).encode(), _MAX_PROCESSES, patience)

    async def start(self) -> None:
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    def for_template(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the model's template wants them: in parts, or as one text with the image's token in it."""
        return [{**message, "content": self._content(message["content"])} for message in messages]

    def _content(self, content: Any) -> Any:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if self._takes_parts:
            return [{"type": "image"} if part["type"] == "image" else part for part in parts]
        return "\n".join(self.token if part["type"] == "image" else part["text"] for part in parts)

    async def prepare(self, sources: Sequence[Source]) -> list[media_pb2.MediaItem]:
        """All of them, or a KvernError for the first that cannot be had."""
        if len(sources) > self.limits.max_images:
            limit = self.limits.max_images
            message = f"the messages hold {len(sources)} images; {limit} are allowed (--limit-mm-per-prompt)"
            raise invalid("messages", message, value=len(sources), limit=limit)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_or_error(self._one(source))) for source in sources]
        items = []
        for task in tasks:
            done = task.result()
            if isinstance(done, Exception):
                raise done
            items.append(done)
        total = sum(len(item.pixels) for item in items)
        if total > MAX_MEDIA_BYTES:
            message = (
                f"the images have {total} bytes of pixels as the model takes them, and a request may have "
                f"{MAX_MEDIA_BYTES}; send fewer or smaller ones"
            )
            raise invalid("messages", message, value=total, limit=MAX_MEDIA_BYTES)
        return items

    async def _one(self, source: Source) -> media_pb2.MediaItem:
        data = source.data or await self._fetcher.fetch(source.name, source.url)
        if len(data) > self.rules.max_bytes:
            message = f"{source.name} has more than {self.rules.max_bytes} bytes"
            raise invalid(source.name, message, value=len(data), limit=self.rules.max_bytes)
        try:
            answer = await self._pool.ask(data)
        except ProcessFailed:
            limit = f"{self.limits.timeout_s:g} s"
            message = f"{source.name} took more than {limit}, or too much memory, to decode"
            raise invalid(source.name, message, limit=limit) from None
        if answer[:1] != b"\0":
            raise invalid(source.name, f"{source.name} {answer[1:].decode()}")
        return media_pb2.MediaItem.FromString(answer[1:])

    def expand(self, token_ids: Sequence[int], items: Sequence[media_pb2.MediaItem]) -> list[int]:
        """The prompt with each image's one token repeated as often as it takes; ``offset`` of the items is set. Raises
        KvernError where the text itself has such tokens."""
        found = token_ids.count(self.token_id)
        if found != len(items):
            message = f"the chat template made {found} places for {len(items)} images; the text must not hold {self.token!r}"
            raise invalid("messages", message, value=found, limit=len(items))
        expanded: list[int] = []
        rest = iter(items)
        for token in token_ids:
            if token != self.token_id:
                expanded.append(token)
                continue
            item = next(rest)
            item.offset = len(expanded)
            expanded += [token] * item.length
        return expanded


async def _or_error(preparing: Any) -> Any:
    """Errors as values, so that the others are not cancelled half-way through a process."""
    try:
        return await preparing
    except Exception as error:
        return error


def take_sources(messages: Sequence[dict[str, Any]]) -> list[Source]:
    """The images of parsed messages, in their order."""
    return [
        part["source"]
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]


def no_images(name: str) -> Exception:
    return unimplemented(name, f"{name} is an image, and this model takes none")


def load_images(
    folder: str | Path,
    token_text: Any,
    template: str,
    rules: MediaRules,
    limits: ImageLimits,
    kwargs: Mapping[str, Any] | None = None,
) -> Images | None:
    """Of the model's folder; None where it takes no images. ``token_text``: a token's text by its id. Raises ValueError
    with what is wrong with the files, or with ``kwargs`` (of --mm-processor-kwargs)."""
    path = Path(folder)
    if not path.is_dir() or not (path / "config.json").exists():
        return None
    model = json.loads((path / "config.json").read_text(encoding="utf-8"))
    unknown = sorted(set(kwargs or {}) - set(KWARGS))
    if unknown:
        raise ValueError(
            f"--mm-processor-kwargs: {unknown[0]} is not supported; supported are {', '.join(KWARGS)}"
        )
    processor = {**image_processor_config(path), **(kwargs or {})}
    try:
        found = preparation(model, processor)
    except (Unprepared, KeyError, TypeError) as error:
        raise ValueError(f"the image processor in {path}: {error}") from error
    if found is None:
        return None
    if found.kind == "qwen" and found.size["longest_edge"] * 3 > MAX_MEDIA_BYTES:
        # Else every photograph of a good camera would be refused.
        processor |= {"min_pixels": found.size["shortest_edge"], "max_pixels": MAX_MEDIA_BYTES // 3}
        log.warning(
            "images are resized to at most %d pixels, not %d: a request has at most %d bytes of them",
            *(MAX_MEDIA_BYTES // 3, found.size["longest_edge"], MAX_MEDIA_BYTES),
        )
    token_id = model.get("image_token_id", model.get("image_token_index"))
    token_id = token_id if token_id is not None else 151_655 if found.kind == "qwen" else 32_000
    return Images(
        model=model,
        processor=processor,
        token_id=int(token_id),
        token=token_text(int(token_id)),
        template=template,
        rules=rules,
        limits=limits,
    )
