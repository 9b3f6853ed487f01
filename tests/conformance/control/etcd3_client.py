"""`etcd3`, a client that is not ours, in a process of its own: `python etcd3_client.py HOST:PORT KEY CARD`.

It tells as JSON lines what it watches below `models/`, and which keys are there once a line comes in;
then it deletes KEY, which it has put first. Its generated code is older than protobuf's fast one takes.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import etcd3

endpoint, key, card = sys.argv[1:]
host, _, port = endpoint.rpartition(":")
client: Any = etcd3.client(host=host, port=int(port), timeout=30)


def tell(**told: object) -> None:
    print(json.dumps(told), flush=True)


def watch(events: Any) -> None:
    for event in events:
        tell(event=type(event).__name__, key=event.key.decode())


events, _ = client.watch_prefix("models/")
threading.Thread(target=watch, args=(events,), daemon=True).start()
client.put(key, card)
sys.stdin.readline()
tell(keys=[found.key.decode() for _, found in client.get_all()])
client.delete(key)
sys.stdin.readline()
