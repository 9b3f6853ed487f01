"""One view of a cluster: what is asked of whom, what is found, and what is shown of it.

Reading order: `overview.py` (what one process knows without asking), `listing.py` (what discovery
says), `facts.py` (what processes say of themselves), `survey.py` (one look at all of it, and who is
away). `trinamo status` and `doctor` show a survey, and so does the page: `looks.py` (who looks for
it), `snapshot.py` (what the page is told), `timeline.py` (what has happened), `dashboard.py` (the
task that looks, and who is told), `pages.py` (the pages that are open, and the files of one, in
`files/`). `requests.py` is one request over all processes, `scraping.py` whom Prometheus should
ask.
"""
