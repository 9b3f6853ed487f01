"""The three floors and a door: see trinamo/__init__.py."""
