"""Any body of any fields: what the table says of them, and nothing else, becomes of it."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, strategies as st

from trinamo.runtime.errors import RequestError
from trinamo.runtime.http import endpoints
from trinamo.runtime.protocol.openai.fields import CHAT_FIELDS, UnknownFields, Use

MESSAGES = [{"role": "user", "content": "a"}]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
names = st.sampled_from(sorted(CHAT_FIELDS)) | st.text(max_size=12)


def understood(fields: dict[str, Any]) -> tuple[Any, list[UnknownFields]]:
    """The request or its refusal, in comparable form, and what is told of unknown fields."""
    told: list[UnknownFields] = []
    body = msgspec.json.encode({"messages": MESSAGES, **fields})
    try:
        request = endpoints.CHAT.decode(body, told.append).to_generate("m", 100)
    except RequestError as error:
        return (error.param, error.message), told
    return msgspec.to_builtins(request), told


@given(fields=st.dictionaries(names.filter(lambda name: name != "messages"), values, max_size=6))
def test_unknown_fields_and_labels_change_nothing_and_are_all_told_of(
    fields: dict[str, Any],
) -> None:
    """Without them the same is understood, or refused in the same words; what is told are their names."""
    known = {name: value for name, value in fields.items() if name in CHAT_FIELDS}
    plain = {n: value for n, value in known.items() if CHAT_FIELDS[n].use is not Use.LABEL}
    found, told = understood(fields)
    assert found == understood(plain)[0]
    assert understood(known)[1] == []
    if told:
        assert len(told[0].names) == len(fields) - len(known)
    elif not isinstance(found, tuple):
        assert len(known) == len(fields)


@given(name=st.sampled_from(sorted(CHAT_FIELDS)), value=values)
def test_a_refused_field_passes_with_a_harmless_value_alone(name: str, value: Any) -> None:
    """It is never passed over: the request is refused by that name, or its value is on the list."""
    field = CHAT_FIELDS[name]
    if field.use is Use.REFUSED:
        found, _ = understood({name: value})
        is_harmless = any(
            type(value) is type(each) and value == each for each in (None, *field.harmless)
        )
        assert isinstance(found, tuple) is not is_harmless
        if not is_harmless:
            assert found[0] == name
