"""The processes of a benchmark, each by its name: trinamo's, its peers', and bare ones.

Run as `python bench/roles/roles.py ROLE [ARGUMENT]` by `processes.py`, by the interpreter that has
what the role imports. The roles of an RPC print one JSON line when ready, then answer one JSON line
per command line on their standard input, and end with it. Those of HTTP serve on the port they are
given until they are ended.
"""

from __future__ import annotations

import sys
from importlib import import_module

ROLES = {
    "trinamo-worker": "trinamo_roles:worker",
    "trinamo-client": "trinamo_roles:client",
    "grpc-worker": "grpc_roles:worker",
    "grpc-client": "grpc_roles:client",
    "dynamo-worker": "dynamo_roles:worker",
    "dynamo-client": "dynamo_roles:client",
    "dynamo-http-worker": "dynamo_roles:http_worker",
    "trinamo-control": "http_roles:trinamo_control",
    "trinamo-servers": "http_roles:trinamo_servers",
    "trinamo-http-worker": "http_roles:trinamo_worker",
    "trinamo-http-frontend": "http_roles:trinamo_frontend",
    "tunnel": "http_roles:tunnel",
    "uvicorn": "http_roles:bare_uvicorn",
    "upstream": "http_roles:bare_upstream",
    "floor": "http_roles:trio_floor",
}

if __name__ == "__main__":
    module, _, function = ROLES[sys.argv[1]].partition(":")
    getattr(import_module(module), function)(*sys.argv[2:])
