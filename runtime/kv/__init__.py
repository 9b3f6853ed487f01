"""KV memory: which blocks are free, where their bytes are, and what makes two pools compatible.

`pool` counts blocks and needs no numpy; `memory` is the paged buffer that engines write and
transfers read. Neither decides who gets a block: that is `engines/scheduler.py`.
"""
