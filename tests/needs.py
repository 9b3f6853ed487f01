"""What some tests need that a package index does not bring, and the command that does.

A test that lacks something is skipped, and the end of the run says what was lacking and what to
do about it, so that nobody takes a run without a browser for a whole one. Only this file skips.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import attrs
import pytest


@attrs.frozen
class Need:
    """Something that may be missing, and what brings it."""

    name: str
    remedy: str
    module: str = ""
    """What to import, if it is a package of Python."""
    command: str = ""
    """What to call, if it is a program; daemons are where only root looks."""

    @property
    def reason(self) -> str:
        return f"no {self.name} ({self.remedy})"

    def unless(self, is_there: bool) -> pytest.MarkDecorator:
        """The mark of a test that is skipped unless `is_there`."""
        return pytest.mark.skipif(not is_there, reason=self.reason)

    def is_command(self) -> bool:
        """Whether its program is there."""
        return shutil.which(self.command, path=f"{os.environ['PATH']}:/usr/sbin") is not None

    def lacking(self) -> NoReturn:
        """Skip the test that runs, or the module that is imported."""
        pytest.skip(self.reason, allow_module_level=True)

    def imported(self) -> ModuleType:
        """The module, or skip."""
        try:
            return import_module(self.module)
        except ImportError:
            self.lacking()


def _packages(*names: str) -> str:
    return f"apt-get install {' '.join(names)}"


_BY_HAND = f"{_packages('--no-install-recommends', 'libibverbs1')}, then make test"

CHROMIUM = Need("Chromium", _packages("chromium"))
A_PROGRAM = Need("program to try", "python -m tests.clients.programs --all")
C_COMPILER = Need("C compiler called cc", _packages("gcc", "libc6-dev"))
HISTORY = Need("history of the project", "git fetch --unshallow")
OPENSSL = Need("openssl", _packages("openssl"))
NETWORKS = Need("network namespaces", f"as root, with {_packages('iproute2')}")
CLOCKS = Need("clock that goes wrong", _packages("libfaketime"))
SYSTEM_ETCD = Need("etcd of the distribution", _packages("etcd-server"))
SYSTEM_NATS = Need("NATS of the distribution", _packages("nats-server"))
# Built for CUDA 12 or 13; either does.
NIXL = Need("NIXL", _BY_HAND, "nixl_cu13" if find_spec("nixl_cu13") else "nixl_cu12")
# docs/transfer_backends.md: with these and without a device UCX crashes as its process ends.
NIXL_ENDS = Need("NIXL that ends without a crash", "apt-get remove ibverbs-providers")
MOONCAKE = Need("Mooncake", _BY_HAND, "mooncake.engine")
LLAMACPP = Need("llama.cpp", "pip install -e '.[llamacpp]'", "cyllama")
LLAMACPP_SERVER = Need("server of llama.cpp", "pip install -e '.[dev]'", "xllamacpp")
ETCD3 = Need("etcd3", "pip install -e '.[dev]'", "etcd3")
VULTURE = Need("vulture", "make lint", "vulture")
NGINX = Need("nginx", _packages("nginx-light"), command="nginx")
HAPROXY = Need("HAProxy", _packages("haproxy"), command="haproxy")
CADDY = Need("Caddy", _packages("caddy"), command="caddy")
PROMTOOL = Need("promtool", _packages("prometheus"))
KUBECTL = Need("kubectl with kustomize 5", "install kubectl")
A_MODEL = Need("language model", "make model")
GPU = Need("NVIDIA GPU", "run on a machine with one")
ROOT_RIGHTS = Need("right to become another user", "run as root")
CONGESTION_CONTROL = Need("TCP congestion control of that name", "modprobe tcp_bbr, as root")


def needs_library_of(backend: str) -> None:
    """Skip unless the library of a transfer backend, such as `nixl tcp`, is there."""
    for need in (NIXL, MOONCAKE):
        if backend.startswith(need.name.lower()):
            need.imported()


def needs_nixl_that_ends() -> None:
    """Skip where NIXL loads and works, and its process ends by SIGSEGV."""
    has_device = Path("/sys/class/infiniband").exists()
    if not has_device and any(Path("/usr/lib").glob("*/libibverbs/*.so")):
        NIXL_ENDS.lacking()


def can_make_networks() -> bool:
    """Whether this user may make a network namespace; found out by making one."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"trinamo-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == 0
