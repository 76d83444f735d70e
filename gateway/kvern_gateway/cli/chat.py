"""`kvern chat`: a conversation in the terminal with any OpenAI-compatible server."""

from __future__ import annotations

import base64
import json
import mimetypes
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import httpx

HELP = "/exit ends the chat, /clear forgets it; Ctrl-C interrupts an answer."


class ChatFailed(Exception):
    """The server cannot be reached or refused; the message says why."""


class Chat:
    """Keeps the history. An interrupted answer stays in it as far as it came; a refused question does not."""

    def __init__(
        self, client: httpx.Client, model: str | None = None, system: str = "", **sampling: Any
    ) -> None:
        self._client = client
        self._model = self._served(model)
        self._system = [{"role": "system", "content": system}] if system else []
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self.messages: list[dict[str, Any]] = list(self._system)

    @property
    def model(self) -> str:
        return self._model

    def clear(self) -> None:
        self.messages = list(self._system)

    def ask(self, text: str, images: Sequence[str] = ()) -> Iterator[str]:
        """Pieces of the answer as they come; ``images``: URLs that the question is about. Raises :class:`ChatFailed`."""
        content: Any = text
        if images:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
            content = [*parts, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {"model": self._model, "messages": self.messages, "stream": True, **self._sampling}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body, timeout=None) as response:
                if response.status_code != 200:
                    raise ChatFailed(_error_message(response.read().decode("utf-8", "replace")))
                for line in response.iter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise ChatFailed(_error_message(line[5:]))
                    for choice in event.get("choices", []):
                        if content := choice["delta"].get("content"):
                            yield content
        except httpx.TransportError as error:
            raise ChatFailed(
                f"cannot reach {self._client.base_url}: {error}; is `kvern up` running?"
            ) from error

    def _served(self, model: str | None) -> str:
        """The asked model, or the server's first."""
        try:
            response = self._client.get("/v1/models")
            names: list[str] = [entry["id"] for entry in response.raise_for_status().json()["data"]]
            if model is None:
                return names[0]
        except (httpx.HTTPError, LookupError) as error:
            raise ChatFailed(
                f"cannot reach {self._client.base_url}: {error}; is `kvern up` running?"
            ) from error
        if model not in names:
            raise ChatFailed(f"there is no model {model}; served are {', '.join(names)}")
        return model


def _error_message(body: str) -> str:
    try:
        message: str = json.loads(body)["error"]["message"]
        return message
    except (ValueError, LookupError, TypeError):
        return body[:500]


def image_url(image: str) -> str:
    """A URL as it is, a file's contents as a data URL. Raises :class:`ChatFailed`."""
    if image.partition(":")[0] in ("http", "https", "data", "file"):
        return image
    try:
        data = base64.b64encode(Path(image).read_bytes()).decode()
    except OSError as error:
        raise ChatFailed(f"cannot read {image}: {error.strerror}") from error
    kind = mimetypes.guess_type(image)[0] or "image/png"
    return f"data:{kind};base64,{data}"


def converse(
    chat: Chat,
    read: Callable[[str], str] = input,
    out: TextIO = sys.stdout,
    images: Sequence[str] = (),
) -> bool:
    """Question and answer until /exit or the end of input. ``images``: URLs that the first question is about. Returns
    whether the last question was answered."""
    answered = True
    print(f"{chat.model}. {HELP}", file=out)
    while True:
        try:
            text = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=out)
            return answered
        if text in ("/exit", "/quit"):
            return answered
        if text == "/help":
            print(HELP, file=out)
            continue
        if text == "/clear":
            chat.clear()
            continue
        if not text:
            continue
        answer, images = chat.ask(text, images), ()
        answered = True
        try:
            for piece in answer:
                print(piece, end="", flush=True, file=out)
            print(file=out)
        except KeyboardInterrupt:
            # Closing the stream closes the connection, which cancels the request.
            print(" [interrupted]", file=out)
        except ChatFailed as error:
            answered = False
            print(error, file=sys.stderr)
        finally:
            answer.close()  # type: ignore[attr-defined]
