"""Scenarios of the catalogue that are no cluster: a work queue in two sizes.

Each module has a `run` that plays it on given choices; what its rules find broken is raised.
"""
