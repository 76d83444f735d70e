"""`kvern chat`: a conversation in the terminal with any OpenAI-compatible server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
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
        self._model = model or self._first_model()
        self._system = [{"role": "system", "content": system}] if system else []
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self.messages: list[dict[str, str]] = list(self._system)

    @property
    def model(self) -> str:
        return self._model

    def clear(self) -> None:
        self.messages = list(self._system)

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer as they come. Raises :class:`ChatFailed`."""
        self.messages.append({"role": "user", "content": text})
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

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
            name: str = response.raise_for_status().json()["data"][0]["id"]
            return name
        except (httpx.HTTPError, LookupError) as error:
            raise ChatFailed(
                f"cannot reach {self._client.base_url}: {error}; is `kvern up` running?"
            ) from error


def _error_message(body: str) -> str:
    try:
        message: str = json.loads(body)["error"]["message"]
        return message
    except (ValueError, LookupError, TypeError):
        return body[:500]


def converse(chat: Chat, read: Callable[[str], str] = input, out: TextIO = sys.stdout) -> bool:
    """Question and answer until /exit or the end of input. Returns whether the last question was answered."""
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
        if text == "/clear":
            chat.clear()
            continue
        if not text:
            continue
        answer = chat.ask(text)
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
