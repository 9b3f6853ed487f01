"""The edge: OpenAI's API over HTTP.

Reading order, the way a request goes: `transports/http/server.py` and the rooms beside it (sockets), `app.py` (routes), `chat.py` (both inference endpoints), `admission.py` (who gets in),
`exchange.py` (body, ids), `http/models/models.py` (who serves which model), `streaming.py` (the
answer), `status.py` (errors). `service.py` is it all behind a builder; `status_app.py` is the
workers' status port.
"""
