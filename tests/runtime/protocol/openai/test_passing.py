"""What is read of a body that is passed through, and what of it an upstream never gets."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.openai.fields import ENDPOINTS, STEERING
from trinamo.runtime.protocol.openai.generate import PassedRequest
from trinamo.runtime.protocol.openai.passing import can_go_on, decode_passed, harmless_id

PULL = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_block_ids": [1]}


def read(**members: Any) -> PassedRequest:
    return decode_passed(json.dumps({"model": "m", **members}).encode())


@pytest.mark.parametrize("name", STEERING)
@pytest.mark.parametrize("where", ["{}", "vllm_xargs.{}"])
@pytest.mark.parametrize("value", [PULL, {}, [1], "10.0.0.1", 0, False])
def test_no_client_directs_the_transfers_of_an_engine(name: str, where: str, value: Any) -> None:
    param = where.format(name)
    members: dict[str, Any] = {name: value}
    if param != name:
        members = {"vllm_xargs": members}
    with pytest.raises(RequestError, match=f"'{param}' is not supported by this server") as caught:
        read(**members)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":{"a":1},"kv_transfer_params":null}',
        b'{"kv_transfer_params":null,"kv_transfer_params":{"a":1}}',
        rb'{"kv_transfer_p\u0061rams":{"a":1}}',
    ],
)
def test_neither_a_second_member_nor_an_escape_hides_one(body: bytes) -> None:
    with pytest.raises(RequestError, match="'kv_transfer_params'"):
        decode_passed(body)


def test_null_and_other_arguments_pass() -> None:
    nulls = dict.fromkeys(STEERING)
    assert read(**nulls, vllm_xargs={"a": 1, **nulls}) == PassedRequest("m")
    assert read(vllm_xargs=None) == PassedRequest("m")


def test_all_endpoints_refuse_them_in_their_tables() -> None:
    for fields in ENDPOINTS.values():
        assert all(fields[name] is field for name, field in STEERING.items())


def test_an_id_that_holds_an_address_reaches_no_engine() -> None:
    dialed = "x___prefill_addr_10.0.0.1:80___decode_addr_10.0.0.2:80"
    with pytest.raises(RequestError, match="'request_id'") as caught:
        read(request_id=dialed)
    assert caught.value.param == "request_id"
    assert read(request_id="mine") == read(request_id=7) == PassedRequest("m")
    assert "_addr_" not in harmless_id(dialed)
    assert harmless_id("mine-0123456789abcdef") == "mine-0123456789abcdef"


@pytest.mark.parametrize(
    ("n", "choices"),
    [(None, 1), (1, 1), (4096, 4096), (4097, 0), (0, 0), (-1, 0), (2**70, 0), (1.5, 0), ([], 0)],
)
def test_the_number_of_choices_is_read_where_it_is_a_number(n: Any, choices: int) -> None:
    assert read(n=n).choices == choices


def test_a_body_of_many_members_is_looked_at_without_making_them() -> None:
    names = ",".join(f'"x{i}":1' for i in range(1 << 17))
    turns = '"messages":[{"role":"user","content":"hi"}]'
    body = f"{{{names},{turns}}}".encode()

    tracemalloc.start()
    try:
        assert can_go_on(body)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert not can_go_on(f'{{{turns},"guided_json":{{}}}}'.encode())
    assert can_go_on(f'{{{turns},"guided_json":null}}'.encode())
