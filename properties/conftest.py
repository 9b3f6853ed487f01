"""What all properties have in common."""

from tests import hypothesis_profile

hypothesis_profile.load()
