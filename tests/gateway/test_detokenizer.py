"""Text comes out whole, once, and equal to decoding everything at the end."""

from __future__ import annotations

from itertools import pairwise

import pytest
from gateway.test_tokenizer import BYTES, SAMPLES, sentencepiece_metadata
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvern_gateway.text.detokenizer import DecoderFactory, StopMatcher, TextStream
from kvern_gateway.text.gguf_tokenizer import build_tokenizer
from kvern_gateway.text.tokenizer import TextModel


def stream_all(stream: TextStream, ids: list[int]) -> list[str]:
    out = []
    for token_id in ids:
        if stream.stopped is not None:
            break
        out.append(stream.push(token_id))
    return [*out, stream.finish()]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 60_000), st.integers(0, 300)), max_size=30), skip=st.booleans())
def test_random_ids_give_what_decode_gives(smollm2: TextModel, ids: list[int], skip: bool) -> None:
    stream = TextStream(DecoderFactory(smollm2).create(skip))
    assert "".join(stream_all(stream, ids)) == smollm2.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=("Cs",)), max_size=30))
def test_no_half_character_is_emitted(smollm2: TextModel, text: str) -> None:
    """Bytes as single tokens: every character of more than one byte is split."""
    found = [smollm2.tokenizer.token_to_id(BYTES[byte]) for byte in text.encode()]
    assume(None not in found)
    ids = [token_id for token_id in found if token_id is not None]
    stream = TextStream(DecoderFactory(smollm2).create(True))
    parts = stream_all(stream, ids)
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts).replace("\ufffd", "", text.count("\ufffd"))
    assert parts[-1] == ""


@pytest.mark.parametrize("text", SAMPLES)
def test_real_text_comes_back(smollm2: TextModel, text: str) -> None:
    ids = smollm2.encode(text, False)
    assert "".join(stream_all(TextStream(DecoderFactory(smollm2).create(True)), ids)) == text


def test_an_unfinished_character_ends_as_a_replacement(smollm2: TextModel) -> None:
    ids = smollm2.encode("🎉", False)
    assert len(ids) > 1
    parts = stream_all(TextStream(DecoderFactory(smollm2).create(True)), ids[:-1])
    assert parts[:-1] == [""] * (len(ids) - 1)
    assert parts[-1] == smollm2.decode(ids[:-1], True) == "\ufffd"


def test_special_tokens_are_shown_on_demand(smollm2: TextModel) -> None:
    factory = DecoderFactory(smollm2)
    ids = [1, *smollm2.encode("hi", False), 2]
    assert "".join(stream_all(TextStream(factory.create(True)), ids)) == "hi"
    assert "".join(stream_all(TextStream(factory.create(False)), ids)) == "<|im_start|>hi<|im_end|>"


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="low ernésé🎉", max_size=20))
def test_other_tokenizers_stream_too(text: str) -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata())
    model = TextModel(tokenizer, {}, {})
    assert not model.byte_level
    ids = tokenizer.encode(text).ids
    parts = stream_all(TextStream(DecoderFactory(model).create(True)), ids)
    assert "".join(parts) == model.decode(ids, True)
    assert "\ufffd" not in "".join(parts)


# Stop strings.


class Spelled:
    """A decoder whose tokens are pieces of a given text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return ""


def first_to_end(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The meaning, character by character: the first stop string to be complete, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


SMALL = st.text(alphabet="ab\n", min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="ab\n", max_size=24),
    stops=st.lists(SMALL, min_size=1, max_size=5),
    cuts=st.sets(st.integers(0, 24)),
    include=st.booleans(),
)
def test_stop_strings_cut_the_same_however_tokens_fall(
    text: str, stops: list[str], cuts: set[int], include: bool
) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    spelled = [text[a:b] for a, b in pairwise(bounds)]
    stream = TextStream(Spelled(spelled), StopMatcher(stops), include)
    shown: list[str] = []
    for token_id in range(len(spelled)):
        shown.append(stream.push(token_id))
        # What has been shown is never part of a stop string that is still possible.
        if not include:
            assert "".join(shown) == first_to_end(text, stops)[0][: len("".join(shown))]
        if stream.stopped is not None:
            break
    shown.append(stream.finish())
    expected, stop = first_to_end(text, stops)
    assert stream.stopped == stop
    assert "".join(shown) == expected + (stop if include and stop else "")


def test_only_a_possible_stop_string_is_held_back() -> None:
    pieces = ["Hello\n", "\nthere\n", "\n\n", "more"]
    stream = TextStream(Spelled(pieces), StopMatcher(["\n\n\n"]))
    assert stream.push(0) == "Hello"
    assert stream.push(1) == "\n\nthere"
    assert stream.push(2) == ""
    assert stream.stopped == "\n\n\n"
    assert stream.finish() == ""


def test_stop_strings_wait_for_min_tokens() -> None:
    stream = TextStream(Spelled(["a", "b", "a", "c"]), StopMatcher(["a"]), min_tokens=2)
    assert [stream.push(i) for i in range(3)] == ["a", "b", ""]
    assert stream.stopped == "a"
