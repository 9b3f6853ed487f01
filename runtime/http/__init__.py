"""The edge: OpenAI's API over HTTP, for whatever speaks it (`transport.py`; on sockets `transports/http`).

Reading order, the way a request goes: `app.py` (routes), `chat.py` (all inference endpoints),
`admission/` (who gets in), `bodies.py` and `exchanges.py` (body, ids), `shares.py` (parties), `models/models.py` (who
serves which model), `streaming.py` (the answer), `status.py` (errors). `service.py` is it all as
one object.
"""
