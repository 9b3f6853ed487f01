"""trinamo: trio + three planes.

A structured-concurrency runtime for distributed LLM inference. Start reading at `trinamo.runtime`
(what things are and how they behave), then `trinamo.transports` (how they travel), then
`trinamo.sim` (the same code on simulated ground). `trinamo.cli` is the front door: the only
place that names concrete transports.
"""
