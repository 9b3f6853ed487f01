"""KV blocks over NIXL: its own thin wrapper of the `nixl_cu12` bindings, without torch.

Start with `plane.py` (`open_nixl_plane`), then `progress.py` (the one thread that calls the library),
`agent.py` (the wrapper) and `options.py` (what an operator may set, and as which knobs it arrives).
Who can be reached how is in `runtime/kv/transfer/metadata.py` (`NixlMetadataStore`), for every
backend.
"""
