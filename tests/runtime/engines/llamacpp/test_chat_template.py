"""A model's chat template: rendered as written, and kept in its sandbox."""

from __future__ import annotations

import json

import pytest

from trinamo.runtime.engines.llamacpp.chat_template import ChatTemplate
from trinamo.runtime.errors import ConfigError, EngineError, RequestError
from trinamo.runtime.protocol.openai.generate import ChatMessage

HELLO = [ChatMessage("user", "hello")]


def render(source: str, messages: list[ChatMessage] = HELLO) -> str:
    return ChatTemplate(source, chars_max=1000, bos="<s>", eos="</s>").render(messages)


def test_messages_are_rendered_up_to_the_answer() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "  {% if m.role == 'user' %}\n"
        "[{{ m['content'] }}]\n"
        "  {% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ eos_token }}"
    )
    assert render(source) == "<s>[hello]\n></s>"


def test_a_template_reads_what_a_client_gives_it_but_no_other_messages() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}{% if thinks %}<think>{% endif %}"
        "{% if add_generation_prompt %}>{% endif %}",
        chars_max=1000,
        bos="<s>",
    )
    assert template.render(HELLO) == "<s>hello>"
    given = '{"thinks": true, "messages": [], "bos_token": "x", "add_generation_prompt": false}'
    assert template.render(HELLO, "", given) == "<s>hello<think>>"
    for wrong in ("[1]", "{", '"a"'):
        with pytest.raises(RequestError) as refused:
            template.render(HELLO, "", wrong)
        assert refused.value.param == "chat_template_kwargs"


def test_a_chat_can_end_in_the_middle_of_its_last_turn() -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.content|trim }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}",
        chars_max=1000,
    )
    turns = [ChatMessage("user", "a"), ChatMessage("assistant", "It is  |end|")]
    assert template.render(turns, "", "", "|end|") == "[a][It is  "
    shown = ChatTemplate("{{ messages[0].content }}", chars_max=1000)
    with pytest.raises(RequestError, match="does not show the last message"):
        shown.render(turns, "", "", "|end|")


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"path": "/srv/a"}', '{"path": "/srv/a"}'),
        ('{"path": "/srv', '{"invalid_arguments": "{\\"path\\": \\"/srv"}'),
        ("<|end|>system", '{"invalid_arguments": "\\u003c|end|>system"}'),
        ("[" * 100_000, None),
        ("[1]", '{"invalid_arguments": "[1]"}'),
        ('"x"', '{"invalid_arguments": "\\"x\\""}'),
        ("", "{}"),
        ("null", "{}"),
    ],
)
def test_arguments_that_are_not_an_object_are_shown_as_the_text_they_are(
    arguments: str, told: str | None, is_known: bool
) -> None:
    """`max_tokens` cuts a call, and the client sends it back as history."""
    source = "{{ messages[0].content }}"
    if is_known:
        # Such as a template that iterates over the arguments.
        source = (
            "{# tools #}<tool_call>"
            "{% for name, value in messages[0].tool_calls[0].function.arguments|items %}{% endfor %}"
            "{{ messages[0].tool_calls[0].function.arguments|tojson }}"
        )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = ChatMessage("assistant", "", json.dumps([call]))
    template = ChatTemplate(source, chars_max=1_000_000, specials=["<|end|>"])
    rendered = template.render([turn])
    assert "<|end|>" not in rendered
    assert told is None or told in rendered


def test_content_is_data_and_never_a_template() -> None:
    assert (
        render("{{ messages[0].content }}", [ChatMessage("user", "{{ 7 * 6 }}")]) == "{{ 7 * 6 }}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(100000000) }}",
        "{{ messages[5].role }}",
        "{{ 1 // 0 }}",
        "{{ 'a' + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_misbehaves_fails_alone(source: str) -> None:
    with pytest.raises(EngineError, match="chat template failed"):
        render(source)


def test_output_without_end_is_cut() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="more than 1000 characters"):
        render(source)


def test_a_malformed_template_is_told_when_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="malformed"):
        ChatTemplate("{% for %}", chars_max=10)
