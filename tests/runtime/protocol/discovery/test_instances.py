from __future__ import annotations

import pytest

from trinamo.runtime.errors import RemoteProtocolError, RequestError
from trinamo.runtime.protocol.discovery.instances import (
    EndpointName,
    Instance,
    decode_instance,
    encode_instance,
)


def instance(number: int, *, draining: bool = False, incarnation: int = 1) -> Instance:
    return Instance(
        endpoint="a/b/c",
        id=f"{number:x}",
        transports={"tcp": f"h:{number}"},
        draining=draining,
        incarnation=incarnation,
    )


A, B = instance(1), instance(2)


def test_a_name_has_three_parts_and_a_key_prefix_that_ends() -> None:
    name = EndpointName.parse("a/b/foo")
    assert (str(name), name.key_prefix) == ("a/b/foo", "instances/a/b/foo/")


@pytest.mark.parametrize(
    "text", ["", "a/b", "a/b/c/d", "a//c", "A/b/c", "a/b/c d", "-/b/c", "a/b/" + "c" * 64]
)
def test_a_text_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        EndpointName.parse(text)


def test_an_instance_comes_back_as_it_was() -> None:
    assert decode_instance(A.key, encode_instance(A)) == A


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (A.key, b""),
        (A.key, b"\xff"),
        (A.key, b"{}"),
        (A.key, encode_instance(B)),
        (
            "instances/a/b/c/XYZ",
            encode_instance(Instance(endpoint="a/b/c", id="XYZ", transports={})),
        ),
    ],
)
def test_an_entry_that_is_not_the_instance_of_its_key_is_refused(key: str, value: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_instance(key, value)
