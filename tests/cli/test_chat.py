"""The terminal chat against a scripted server."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvern_gateway.cli.chat import Chat, ChatFailed, converse, image_url


class Script:
    """Answers each question with the next list of pieces, and keeps the bodies it got."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, object]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "scripted"}]})
        self.bodies.append(json.loads(request.content))
        if not self.answers:
            return httpx.Response(503, json={"error": {"message": "no worker is ready"}})
        deltas = [
            {"role": "assistant", "content": ""},
            *({"content": piece} for piece in self.answers.pop(0)),
            {},
        ]
        events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
        return httpx.Response(200, content="".join(events) + "data: [DONE]\n\n")


def make_chat(script: Script, **more: object) -> Chat:
    return Chat(httpx.Client(transport=httpx.MockTransport(script), base_url="http://server"), **more)  # type: ignore[arg-type]


def say(*lines: str) -> Iterator[str]:
    yield from lines
    raise EOFError


def run(chat: Chat, *lines: str, answered: bool = True) -> str:
    typed = iter(say(*lines))
    out = io.StringIO()
    assert converse(chat, read=lambda _: next(typed), out=out) == answered
    return out.getvalue()


def test_the_first_question_is_about_the_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    urls = [image_url(str(tmp_path / "a.png")), image_url("https://example.com/b.jpg")]
    script = Script(["A mill."], ["Yes."])
    typed = iter(say("What is this?", "Sure?"))
    assert converse(make_chat(script), read=lambda _: next(typed), out=io.StringIO(), images=urls)
    first, _, second = script.bodies[1]["messages"]  # type: ignore[misc]
    assert [part.get("image_url", part.get("text")) for part in first["content"]] == [
        {"url": "data:image/png;base64,cGljdHVyZQ=="},
        {"url": "https://example.com/b.jpg"},
        "What is this?",
    ]
    assert second["content"] == "Sure?"
    with pytest.raises(ChatFailed, match="cannot read"):
        image_url(str(tmp_path / "none.png"))


def test_the_history_goes_along() -> None:
    script = Script(["Hel", "lo."], ["Fine."])
    out = run(make_chat(script, system="Be brief.", temperature=0.5), "Hi", "", "How are you?")
    assert "Hello.\nFine.\n" in out
    assert [message["content"] for message in script.bodies[1]["messages"]] == [  # type: ignore[attr-defined]
        "Be brief.",
        "Hi",
        "Hello.",
        "How are you?",
    ]
    assert (script.bodies[1]["model"], script.bodies[1]["temperature"]) == ("scripted", 0.5)


def test_clear_forgets_and_exit_ends() -> None:
    script = Script(["One"], ["Two"], ["Three"])
    out = run(make_chat(script), "first", "/clear", "second", "/exit", "never")
    assert len(script.bodies) == 2
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["second"]  # type: ignore[attr-defined]
    assert "Three" not in out


def test_an_interrupted_answer_is_kept_as_far_as_it_came() -> None:
    script = Script(["a", "b", "c"], ["d"])
    chat = make_chat(script)
    answer = chat.ask("count")
    assert next(answer) == "a"
    with pytest.raises(KeyboardInterrupt):
        answer.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert chat.messages[-1] == {"role": "assistant", "content": "a"}
    assert list(chat.ask("go on")) == ["d"]


def test_a_refused_question_is_told_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    chat = make_chat(script)
    run(chat, "Hi", answered=False)
    assert "no worker is ready" in capsys.readouterr().err
    assert chat.messages == []


def test_no_server_is_told() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ChatFailed, match=r"cannot reach http://server.*kvern up"):
        Chat(httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://server"))
