"""The pages of `docs/` that are made from the code: `python -m docs.generators`, or `make docs`.

Each module has pure functions that make pages; only `__main__.py` writes files. A test keeps the
pages equal to the code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from .api import api_page
from .configuration import configuration_page
from .fields import fields_page
from .index import index_page
from .lists import filled_page, pages_with_lists
from .protocols import TABLES, protocol_page

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "api.md": api_page,
    "configuration.md": configuration_page,
    "fields.md": fields_page,
    **{f"protocols/{name}.md": partial(protocol_page, tables) for name, tables in TABLES.items()},
    **{name: partial(filled_page, name) for name in pages_with_lists()},
    # Last: it reads the others.
    "index.md": index_page,
}
"""Path below `docs/` to what makes the page."""
