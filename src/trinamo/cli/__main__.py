"""`python -m trinamo.cli`: the same as `trinamo`. The children of `trinamo up` start this way."""

from __future__ import annotations

from .main import main

main()
