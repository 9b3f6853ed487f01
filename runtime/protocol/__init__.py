"""The protocols, sans-IO: bytes, events, tables. No trio, no clock, no dice, no sockets.

`codec` is the frames of every TCP connection, `control` the JSON in them, `machine` how two ends
step through a table. `response_stream` and `request_stream` are those tables. `request` is what
travels on the request plane, `generate` the payloads of a model, `openai` and `sse` the HTTP edge.
`instances`, `routing`, `lease` and `model_cards` decide what the control plane means.
"""
