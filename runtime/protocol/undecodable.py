"""What decoding a stranger's bytes may raise, in one place, so that no decoder forgets one of them."""

from __future__ import annotations

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""For `except`: bytes that are not the type asked for, no UTF-8, or nested too deep.

msgspec raises each of the three on peer input. Whoever catches them says whose bytes they were, by
a `RemoteProtocolError` or `RequestError`.
"""
