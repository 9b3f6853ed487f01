"""Nothing that nobody calls stays: every name of the product is used by the product.

vulture reads the product and the examples, as text: a name counts as used if it is written anywhere
but where it is defined. Tests do not count, nor does `__all__`, so what only a test calls is found;
the public names (`src/trinamo/__init__.pyi`) do. What is used all the same, by somebody whom vulture
does not read, stands in `KNOWN` with the reason, and goes from it as soon as it is used or gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.needs import VULTURE
from tests.sources import ROOT, all_sources, front_door, listed

# By whom: the names.
KNOWN = {
    "the scripts of the dashboard read it: runtime/view/files":
        "failures_per_s etcd_text streams_by_group singly_max",
    "Python calls it, or reads it": "__signature__",
    "trio calls it: a clock, an instrument, a socket, a stream":
        "deadline_to_sleep_time start_clock task_scheduled before_task_step after_task_step optlen",
    "trio, asyncio and libraries call it, or pass it: a simulated socket": """
        _nonblocking_helper _did_shutdown_SHUT_WR gettimeout getblocking inheritable
        get_inheritable connect_ex recvmsg ancbufsize""",
    "looked up by the name of the call that arrives, in the simulated etcd":
        "_deleterange _txn _compact _leasegrant _leaserevoke _leasekeepalive",
    "the standard library calls it, or reads it: io": "writable",
    "attrs calls it: the default of a field": "_make_decoder",
    "a library reads it: PyYAML, jinja2, llama.cpp, llguidance, NIXL, typer": """
        metavar
        is_tokenizer_wrapper bos_token_id eos_token_id special_token_ids
        yaml_implicit_resolvers n_threads n_threads_batch kv_unified
        flash_attn_type pooling_type n_batch n_ubatch n_gpu_layers useProgThread useListenThread pthrDelay
        syncMode""",
    "protobuf writes it: OTLP's messages": """
        parent_span_id start_time_unix_nano end_time_unix_nano string_value int_value
        double_value""",
    "llhttp calls it": "on_header on_headers_complete on_body on_message_complete",
    "starlette and hypercorn read it, or call it": """
        redirect_slashes _check_protocol accesslog errorlog h11_max_incomplete_size
        keep_alive_timeout keep_alive_max_requests include_server_header include_date_header""",
    "h2, hpack and ssl read it": "MAX_CLOSED_STREAMS local_settings max_header_list_size verify_mode",
    "clients of the HTTP API read it, or send it": """
        owned_by token_logprobs text_offset
        supported_parameters default_parameters
        annotations cache_write_tokens reasoning_tokens input_tokens_details output_tokens_details
        created_at incomplete_details previous_response_id service_tier truncation
        cache_creation_input_tokens cache_read_input_tokens stop_sequence embedding
        background n_predict""",
    "the table of fields names it: runtime/protocol/openai/fields.py": """
        structured_outputs guided_json guided_regex guided_choice guided_grammar ebnf""",
    "the model manager's interface as it is documented upstream": "remove_completions_model",
    "the account of a plain model, balanced by a property":
        "entered acked died expired broker_errors",
    "statistics for whoever embeds an engine, a cache or a transfer plane": """
        watches blocks_in_flight
        active_blocks waiting_prefill_tokens recent_blocks hits prompt_blocks""",
    "the faults of the memory planes, for tests of programs": """
        outage drop_next halt""",
    "servers of tests and benchmarks": "thaw",
    "the pytest plugin calls it, which stands outside": "feeding",
    "trio calls it: the queue of an answer to a thread": "put_nowait",
    "`ssl` reads it of a context": "num_tickets check_hostname",
    "tests of anybody's protocol call it": """
        fault_plans schedules Linearizability Delivery stress gives_up_and_asks_again cancels
        Serializability set_ mutex counter eventually leads_to""",
    "looked up by the name of the function of `os` that was called: sim/disk/process.py": """
        rmdir symlink target_is_directory readlink scandir lstat fchdir fchmod fchown utime fstatvfs
        listxattr readv writev lseek truncate
        posix_fallocate posix_fadvise fdatasync lchown mknod is_symlink is_junction""",
    "scenarios of anybody's protocol call it: a host's disk": "durable_bytes write_bytes",
    "tests and properties of programs in the simulator call it, or read it": """
        scenario_paths first_difference HOLD unread
        seeds_max mutants task_count open_sockets""",
}  # fmt: skip
# Whoever is decorated so is called by its decorator's table.
DECORATORS = ["@bug", "@instead_of", "@*.command", "@*.callback", "@command"]


def dead_names(files: Iterable[Path]) -> list[Any]:
    product = VULTURE.imported().Vulture(ignore_decorators=DECORATORS, ignore_names=["test_*"])
    for path in files:
        # A name is not used by standing in `__all__`; the lines keep their numbers.
        text = re.sub(
            r"^__all__ = .*?\]$", _blank, path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
        )
        product.scan(text, filename=path)
    # ruff finds unused imports, and knows more about them.
    return [item for item in product.get_unused_code() if item.typ != "import"]


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


@pytest.mark.check
def test_every_name_is_used_by_the_product() -> None:
    examples = sorted((ROOT / "examples").glob("*.py"))
    found = dead_names([*(source.path for source in all_sources()), *examples, front_door().path])
    known = {name for names in KNOWN.values() for name in names.split()}
    new = [
        f"{Path(item.filename).relative_to(ROOT)}:{item.first_lineno}: {item.typ} {item.name}"
        for item in found
        if item.name not in known
    ]

    assert not new, "delete what nobody calls, or say who does:" + listed(new)
    left = known - {item.name for item in found}
    assert not left, "used by now, or gone: take it off `KNOWN`:" + listed(sorted(left))


def test_a_name_that_only_all_and_a_test_know_is_dead(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '__all__ = ["called", "idle"]\ndef called(): ...\ndef idle(): ...\ncalled()\n'
    )

    assert [item.name for item in dead_names([module])] == ["idle"]
