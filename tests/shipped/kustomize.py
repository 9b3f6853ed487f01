"""What `kubectl kustomize` makes of a folder in `deploy/kubernetes`, as far as those use it.

Resources, components and RFC 6902 patches that add or remove; whatever else a file says is an error here, so
that nothing is overlooked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

Thing = dict[str, Any]
KNOWN = {"apiVersion", "kind", "resources", "components", "patches"}


def render(folder: Path) -> list[Thing]:
    """The manifests of a folder with a kustomization.yaml."""
    return _accumulate(folder, [])


def _accumulate(folder: Path, found: list[Thing]) -> list[Thing]:
    said: Thing = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    assert said.keys() <= KNOWN, f"{folder}: {said.keys() - KNOWN}"
    for name in said.get("resources", ()):
        path = folder / name
        if path.is_dir():
            found += render(path)
        else:
            found += list(yaml.safe_load_all(path.read_text("utf-8")))
    for name in said.get("components", ()):
        _accumulate(folder / name, found)
    for patch in said.get("patches", ()):
        _apply(patch, found)
    return found


def of_kubernetes(thing: Thing) -> bool:
    """Whether its schema is at hand; those of what cert-manager and KEDA add are not."""
    return not thing["apiVersion"].startswith(("cert-manager.io/", "keda.sh/"))


def _apply(patch: Thing, found: list[Thing]) -> None:
    target = patch["target"]
    meant = [
        each
        for each in found
        if each["kind"] == target["kind"] and re.fullmatch(target["name"], each["metadata"]["name"])
    ]
    assert meant, f"a patch of nothing: {target}"
    for each in meant:
        for change in yaml.safe_load(patch["patch"]):
            *way, last = change["path"].split("/")[1:]
            place: Any = each
            for step in way:
                place = place[int(step) if isinstance(place, list) else step]
            if change["op"] == "remove":
                del place[last]
                continue
            assert change["op"] == "add"
            if isinstance(place, list):
                assert last == "-"
                place.append(change["value"])
            else:
                place[last] = change["value"]
