"""`trinamo frontend --processes N`: frontends on one port, started, watched and ended together.

This process serves nothing itself. Its children are frontends as any other, each with a status port
of its own, and write to the same log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trinamo.runtime.config.config import Config
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.process.stopping import stopped_by_signals
from trinamo.runtime.sinks import Changes
from trinamo.transports.assembly.run_file import ProcessEntry

from ..children.child import Child, end_all, wait_all_ready
from ..children.hangs import watch_for_hangs
from ..children.shared_port import frontend_grace_s, reserved_port, sharing, status_url_of
from ..options import Sources
from ..running.frontends_file import FrontendsFile

_log = logging.getLogger("trinamo.cli")


async def run_processes(
    config: Config, sources: Sources, count: int, tell: Callable[[dict[str, Any]], None]
) -> None:
    """Run `count` frontends until SIGINT or SIGTERM, then drain them all; `tell` when all serve.

    Raises `ConfigError` or `UnavailableError`, with a sentence, if one of them cannot start;
    nothing is left behind then, nor when cancelled.
    """
    http = config.http
    with reserved_port(http.host, http.port) as port:
        environ = sharing(sources, port).environ()
        changes = Changes()

        def heard(sentence: str) -> None:
            _log.warning(sentence)
            changes.notify()

        names = [f"frontend-{number + 1}" for number in range(count)]
        children = [
            Child(name, ["frontend", "--name", name], environ, on_line=None, on_event=heard)
            for name in names
        ]
        async with stopped_by_signals() as stop, open_nursery() as nursery:
            for child in children:
                nursery.start_soon(child.run, name=child.name)
            with FrontendsFile.kept() as file:
                with stop.starting():
                    await wait_all_ready(children)
                    url = str(children[0].facts["url"])
                    tell({"url": url, "processes": count})
                    watch = partial(watch_for_hangs, bound_s=config.worker.hang_timeout_s)
                    nursery.start_soon(watch, children, _log.warning)
                    nursery.start_soon(_publish, file, config, url, children, changes)
                await stop.wait()
                await end_all(children, frontend_grace_s(config), _log.info)
            nursery.cancel_scope.cancel()


async def _publish(
    file: FrontendsFile,
    config: Config,
    url: str,
    children: Sequence[Child],
    changes: Changes,
) -> None:
    """Say who they are, and again when one has ended or was started again."""
    while True:
        processes = [ProcessEntry(each.name, each.pid, status_url_of(each)) for each in children]
        file.publish(url, config, processes)
        await changes.wait()
