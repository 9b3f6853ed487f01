"""Other names of models: which model an alias means, where several cards claim it.

A model's own name means that model, whoever claims it as an alias. Of two models that claim one
alias the one that has it keeps it, and at first the older one gets it, so that frontends agree.
Sans-IO: `model_cards.py` says what is claimed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs


@attrs.frozen
class Claim:
    """What one model wants to be called besides its name."""

    created: int
    """Unix seconds of the card in force: the least is the oldest."""
    aliases: Collection[str]


@attrs.define(eq=False)
class AliasTable:
    """Aliases by model; who has one keeps it while it claims it."""

    models: dict[str, str] = attrs.Factory(dict)
    """By alias, the name of the model that it means."""
    _refused: frozenset[tuple[str, str]] = frozenset()
    """Alias and model, of the claims that are not granted and were told of."""

    def settle(self, claims: Mapping[str, Claim]) -> list[str]:
        """Take what all models claim now; a sentence for each claim that is newly refused."""
        claimants: dict[str, list[str]] = {}
        for name, claim in sorted(claims.items(), key=lambda item: (item[1].created, item[0])):
            for alias in claim.aliases:
                claimants.setdefault(alias, []).append(name)
        held, self.models = self.models, {}
        refused: dict[tuple[str, str], str] = {}
        for alias, names in claimants.items():
            holder = held.get(alias, "")
            owner = holder if holder in names else names[0]
            why = f"it means {owner!r}"
            if alias in claims:
                owner, why = alias, "a model has that name"
            else:
                self.models[alias] = owner
            for name in names:
                if name != owner:
                    refused[alias, name] = f"alias {alias!r} of {name!r} is refused: {why}"
        fresh = [why for claim, why in refused.items() if claim not in self._refused]
        self._refused = frozenset(refused)
        return fresh
