"""KV blocks over NIXL: its own thin wrapper of the `nixl_cu12` bindings, without torch.

Start with `plane.py` (`open_nixl_plane`), then `owner.py` (the one thread that calls the library),
`agent.py` (the wrapper), `options.py` (what an operator may set, and as which knobs it arrives) and
`metadata.py` (`NixlMetadataStore`: who can be reached how, in the control plane).
"""

from __future__ import annotations

from .metadata import MetadataNotFoundError, NixlMetadata, NixlMetadataStore

__all__ = ["MetadataNotFoundError", "NixlMetadata", "NixlMetadataStore"]
