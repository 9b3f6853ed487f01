"""A page that shows the cluster: what a frontend's processes, servers and requests do now.

Reading order: `dashboard.py` (the task that looks, and who is told), `gathering.py` (one look),
`snapshot.py` (what the page is told of it), `timeline.py` (what has happened), `tabs.py` (the pages
that are open), `legs.py` (one request over all processes), `files.py` (the page itself, in `files/`).
"""
