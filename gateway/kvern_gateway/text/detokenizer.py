"""Token ids to text, a token at a time.

Whatever has been emitted is never taken back or sent again: bytes of an unfinished character and text that may be
the beginning of a stop string are held until the next token, or the end, decides. The text in all equals the
tokenizer's ``decode`` of all the ids (up to the stop string).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from kvern_gateway.text.tokenizer import TextModel

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_of_character()


class TokenBytes(dict[int, bytes]):
    """Token id → the bytes it stands for, found on first use. Skipped and unknown ids give b""."""

    def __init__(self, model: TextModel, skip_special_tokens: bool) -> None:
        super().__init__()
        self._model = model
        self._skip = skip_special_tokens

    def __missing__(self, token_id: int) -> bytes:
        token = self._model.tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None or (self._skip and token_id in self._model.special_ids):
            value = b""
        else:
            try:
                value = bytes([_BYTE_OF[character] for character in token])
            except KeyError:
                value = token.encode()
        self[token_id] = value
        return value


class TokenText(dict[int, str | None]):
    """Token id → its text where its bytes are whole characters, else None."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        super().__init__()
        self._bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        try:
            value = self._bytes[token_id].decode()
        except UnicodeDecodeError:
            value = None
        self[token_id] = value
        return value


class Decoder(Protocol):
    """Turns tokens into text incrementally."""

    def push(self, token_id: int) -> str:
        """The text that this token completes: whole characters only."""
        ...

    def finish(self) -> str:
        """What is left. An unfinished character becomes U+FFFD."""
        ...


class ByteLevelDecoder:
    """For byte-level BPE, from tables that all requests share."""

    __slots__ = ("_bytes", "_pending", "_texts", "_utf8")

    def __init__(self, token_bytes: TokenBytes, texts: TokenText) -> None:
        self._bytes = token_bytes
        self._texts = texts
        self._utf8 = _Utf8Decoder("replace")
        self._pending = False

    def push(self, token_id: int) -> str:
        if not self._pending:
            text = self._texts[token_id]
            if text is not None:
                return text
        text = self._utf8.decode(self._bytes[token_id])
        self._pending = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        self._pending = False
        return self._utf8.decode(b"", True)


class GenericDecoder:
    """For any other tokenizer, through the library's own stream."""

    __slots__ = ("_ids", "_length", "_model", "_skip", "_stream")

    def __init__(self, model: TextModel, skip_special_tokens: bool) -> None:
        self._model = model
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._length = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._stream.step(self._model.tokenizer, token_id) or ""
        self._length += len(text)
        return text

    def finish(self) -> str:
        return self._model.decode(self._ids, self._skip)[self._length :]


class DecoderFactory:
    """Makes decoders of one model; owns the shared tables."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._tables = {}
        for skip in (False, True):
            token_bytes = TokenBytes(model, skip)
            self._tables[skip] = (token_bytes, TokenText(token_bytes))

    def create(self, skip_special_tokens: bool) -> Decoder:
        if self._model.byte_level:
            return ByteLevelDecoder(*self._tables[skip_special_tokens])
        return GenericDecoder(self._model, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special tokens shown."""
        if self._model.byte_level:
            return self._tables[False][0][token_id]
        return self._model.token_text(token_id).encode()


class StopMatcher:
    """Finds the first of several strings to end in a stream of text: an Aho-Corasick automaton.

    The depth of the current state is the length of the longest suffix that may yet grow into a stop string: just
    what has to be held back. Built once per request, shared by its choices.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        # The longest stop string that ends in this state.
        self.match: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self.beginnings = frozenset(self.next[0])
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.next[state].get(character)
            if following is None:
                following = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
                self.next[state][character] = following
            state = following
        self.match[state] = stop

    def _link(self) -> None:
        self.fail = [0] * len(self.next)
        queue = list(self.next[0].values())
        for state in queue:
            for character, following in self.next[state].items():
                self.fail[following] = self.step(self.fail[state], character)
                if self.match[following] is None:
                    self.match[following] = self.match[self.fail[following]]
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        while True:
            following = self.next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


class TextStream:
    """The text of one choice as its tokens come.

    ``stopped`` names the stop string that ended it; tokens pushed after that are ignored. ``min_tokens`` tokens must
    have come before a stop string counts.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_state",
        "num_tokens",
        "stopped",
    )

    def __init__(
        self,
        decoder: Decoder,
        matcher: StopMatcher | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = decoder
        self._matcher = matcher
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._state = 0
        self._held = ""
        self.num_tokens = 0
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """The text that may be shown now; may be empty."""
        self.num_tokens += 1
        text = self._decoder.push(token_id)
        if self._matcher is None:
            return text
        return self._scan(text) if text else ""

    def skip(self) -> str:
        """Counts a token that has no text: an end token."""
        self.num_tokens += 1
        return ""

    def finish(self) -> str:
        """The text still held, when no more tokens come."""
        if self.stopped is not None:
            return ""
        text = self._decoder.finish()
        if self._matcher is None:
            return text
        text = self._scan(text) if text else ""
        if self.stopped is None:
            text += self._held
            self._held = ""
        return text

    def _scan(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        matcher = self._matcher
        assert matcher is not None
        state = self._state
        if state == 0 and matcher.beginnings.isdisjoint(text):
            return text
        armed = self.num_tokens > self._min_tokens
        for index, character in enumerate(text):
            state = matcher.step(state, character)
            stop = matcher.match[state]
            if stop is None:
                continue
            if not armed:
                # It doesn't count, so it's held back only if it may grow into a longer one.
                while matcher.match[state] is not None and not matcher.next[state]:
                    state = matcher.fail[state]
            else:
                self.stopped = stop
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen if self._include_stop else seen[: -len(stop)]
        self._state = state
        seen = self._held + text
        cut = len(seen) - matcher.depth[state]
        self._held = seen[cut:]
        return seen[:cut]
