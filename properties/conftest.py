"""What all properties have in common."""

from tests.session import hypothesis_profile
from tests.session.cpu import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]

hypothesis_profile.load()
