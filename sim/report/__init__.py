"""A run as one picture: host lifelines, messages from send to landing, faults, states in time.

`page` turns the trace of a run into one HTML file that needs nothing else: no network, no library,
no font. What came from a trace or a failure file is data in it, never markup or script, and its
content security policy lets only the page's own script run.

Read in this order: `events.py` (rows to lifelines, messages and notes, and which request a message
belongs to), `causes.py` (who woke whom), `document.py` (the file), `diagram.js`. What this package does not do:
play a run (`explore/`).
"""

from .document import BYTES_MAX, About, Decision, page, pair
from .events import Events, events_of

__all__ = ["BYTES_MAX", "About", "Decision", "Events", "events_of", "page", "pair"]
