"""Chat templates: Hugging Face's meaning, and no harm from one that loops, grows or raises."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from kvern.errors import KvernError
from kvern_gateway.limits import Limits
from kvern_gateway.text.chat_template import TemplateRenderer
from kvern_gateway.text.tokenizer import TextModel

Render = Callable[..., Awaitable[str]]
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def render(smollm2: TextModel) -> AsyncIterator[Render]:
    """Renders with the model's template, or with the one given."""
    renderers: list[TemplateRenderer] = []

    async def call(messages: list[dict[str, Any]], template: str | None = None, **options: Any) -> str:
        model = smollm2 if template is None else replace(smollm2, chat_templates={"default": template})
        limits = Limits(template_timeout_s=0.3, max_template_chars=100_000)
        renderers.append(TemplateRenderer(model, limits))
        return await renderers[-1].render(messages, **options)

    yield call
    for renderer in renderers:
        await renderer.close()


async def test_smollm2_renders_chatml(render: Render) -> None:
    text = await render([{"role": "system", "content": "Be brief."}, *HI])
    assert (
        text
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_smollm2_has_a_system_message_of_its_own(render: Render) -> None:
    text = await render(HI, add_generation_prompt=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
    )


async def test_the_last_message_can_be_continued(render: Render) -> None:
    messages = [*HI, {"role": "assistant", "content": "  Hello, "}]
    text = await render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\n  Hello, ")


async def test_templates_see_what_hugging_face_gives_them(render: Render) -> None:
    template = """\
    {%- for m in messages %}
        {%- if m.role == 'skip' %}
            {%- continue %}
        {%- endif %}
        {%- generation %}{{ m | tojson }}{% endgeneration %}
    {%- endfor %}
{{ bos_token }} {{ extra }} {{ tools is none }} {{ strftime_now('%Y') | length }}"""
    messages = [{"role": "skip", "content": "x"}, {"role": "user", "content": "<é>"}]
    text = await render(messages, template, kwargs={"extra": 7})
    assert text == '{"role": "user", "content": "<é>"}<|im_start|> 7 True 4'


async def test_blocks_are_trimmed(render: Render) -> None:
    assert await render(HI, "a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% if %}", "can't be compiled"),
        ("{% for i in range(99999) %}{{ 'abc' }}{% endfor %}", "longer than the limit of 100000 characters"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses too deeply"),
        ("{{ ('x' * 1000000000) | length }}", "used too much memory"),
    ],
)
async def test_a_template_that_fails_says_so(render: Render, template: str, message: str) -> None:
    with pytest.raises(KvernError) as raised:
        await render(HI, template)
    assert message in raised.value.message
    assert raised.value.field == "messages"


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [LOOP, "{{ 9 ** (9 ** 9) }}"])
async def test_a_template_that_never_ends_is_stopped(render: Render, template: str) -> None:
    """After its CPU time is over; on a machine that has time for it, within a second."""
    await render(HI)
    before = children_cpu_s()
    with pytest.raises(KvernError, match=r"longer than 0\.3 s"):
        await render(HI, template)
    # Starting the process is included.
    assert children_cpu_s() - before < 1.5


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def test_a_dead_renderer_is_replaced_and_others_are_not_disturbed(smollm2: TextModel) -> None:
    template = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}{{ messages[0].content }}"
    model = replace(smollm2, chat_templates={"default": template})
    renderer = TemplateRenderer(model, Limits(template_timeout_s=0.3))
    await renderer.start()
    try:
        contents = ["a", "loop", "b", "loop", "c", "d"]
        asked = [renderer.render([{"role": "user", "content": content}]) for content in contents]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for content, answer in zip(contents, answers, strict=True):
            assert isinstance(answer, KvernError) if content == "loop" else answer == content
    finally:
        await renderer.close()


async def test_a_model_without_a_template_says_so(smollm2: TextModel) -> None:
    renderer = TemplateRenderer(replace(smollm2, chat_templates={}), Limits())
    with pytest.raises(KvernError, match="no chat template"):
        await renderer.render(HI)
