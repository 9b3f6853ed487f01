"""What all properties have in common."""

from tests.session import hypothesis_profile

hypothesis_profile.load()
