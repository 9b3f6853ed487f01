"""What a cluster is like: what discovery says of it, and what its processes say of themselves.

Reading order: `overview.py` (what one process knows without asking), `instances.py` and
`frontends.py` (asking), `survey.py` (the whole, and what is away). `trinamo status` and the page
of a frontend (`http/dashboard/`) show it.
"""
