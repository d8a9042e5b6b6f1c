"""Look up the models that the server serves, by name or alias, with their tokenizers.

Each caller sees only the models that its API key may use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ballast.cluster.controller import Controller
from ballast.core.errors import Unavailable, UnknownModel
from ballast.core.model import ModelSpec
from ballast.server.http.request_context import ANYONE, Caller
from ballast.server.model_loads import ModelLoads, PendingLoad
from ballast.server.text.tokenizer import Tokenizer

_LONGEST_NAME = 200
"""Most characters of an unknown model's name that an error repeats."""
_MOST_NAMED = 20
"""Most models that an error lists; `GET /v1/models` lists all."""


class ServedModels:
    """Names, specs and tokenizers of the models that serve, as each caller may see them."""

    def __init__(
        self, controller: Controller, tokenizers: Mapping[str, Tokenizer], loads: ModelLoads
    ) -> None:
        self._controller = controller
        self._tokenizers = dict(tokenizers)
        self._loads = loads

    def visible_to(self, caller: Caller = ANYONE) -> dict[str, ModelSpec]:
        """Return the models that serve and that `caller` may use, by own name, in the fleet's
        order, each before its adapters."""
        served = (spec for base in self._controller.devices.specs.values() for spec in base.served)
        return {
            spec.name: spec
            for spec in served
            if spec.name in self._tokenizers and self._may_use(caller, spec.name)
        }

    def serves(self, name: str) -> bool:
        """Whether clients can ask for a model or an adapter by its own name."""
        return name in self._tokenizers

    def awaited(self, name: str, caller: Caller) -> PendingLoad | None:
        """Return the load of a model that is not served yet and that `caller` may use, by any name;
        None: there is none to wait for."""
        return self._loads.find(name) if self._may_use(caller, self.own_name(name)) else None

    def awaited_names(self, caller: Caller = ANYONE) -> dict[str, PendingLoad]:
        """Return the models and adapters that are not served yet and that `caller` may use, by own
        name, in the fleet's order."""
        entries = self._controller.devices.fleet.entries
        found = {entry.name: self._loads.find(entry.name) for entry in entries}
        return {n: x for n, x in found.items() if x is not None and self._may_use(caller, n)}

    async def arrived(self, name: str, caller: Caller) -> ModelSpec:
        """Find a model, as `find`, after waiting until it has been loaded."""
        load = self.awaited(name, caller)
        if load is not None:
            await self._loads.wait(load)
        return self.find(name, caller)

    def failed(self, caller: Caller = ANYONE) -> dict[str, str]:
        """Return the fleet's models that do not serve and that `caller` may use, with the reason
        of each."""
        failed = self._controller.devices.failed
        return {name: why for name, why in failed.items() if self._may_use(caller, name)}

    def set_aside(self, caller: Caller = ANYONE) -> dict[str, str]:
        """Return the models that refuse requests since their last ones failed, and that `caller`
        may use, with the reason of each."""
        aside = self._controller.devices.set_aside
        return {name: why for name, why in aside.items() if self._may_use(caller, name)}

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of the fleet's models and adapters, each with the own name that it stands
        for."""
        aliases = self._controller.devices.fleet.aliases
        return {alias: name for name, known in aliases.items() for alias in known}

    def own_name(self, name: str) -> str:
        """Resolve an alias; an own name, or an unknown one, is returned as it is."""
        return name if self._is_own(name) else self.aliases.get(name, name)

    def knows(self, name: str) -> bool:
        """Whether a model or an adapter has this name or alias, whoever may use it."""
        return self._is_own(name) or name in self.aliases

    def _is_own(self, name: str) -> bool:
        known = name in self._tokenizers or name in self._controller.devices.failed
        return known or any(entry.name == name for entry in self._controller.devices.fleet.entries)

    def find(self, name: str, caller: Caller) -> ModelSpec:
        """Find a model by its own name or an alias.

        Raises UnknownModel, with the reason if the fleet's model of that name could not be loaded,
        and with the models that `caller` may use; Unavailable if it has not been loaded yet.
        """
        models, own = self.visible_to(caller), self.own_name(name)
        spec = models.get(own)
        if spec is None and self.awaited(name, caller) is not None:
            raise Unavailable(f"the model {own!r} has not been loaded yet")
        if spec is None:
            why = self.failed(caller).get(own)
            more = f": it could not be loaded ({why})" if why else ""
            is_long = len(name) > _LONGEST_NAME
            shown = f"{name[:_LONGEST_NAME]!r}..." if is_long else f"{name!r}"
            raise UnknownModel(f"the model {shown} is not served here{more}; {_served(models)}")
        return spec

    def tokenizer(self, name: str) -> Tokenizer:
        """Return the tokenizer of a model that serves. Raises UnknownModel: the model may have
        been removed meanwhile."""
        if name not in self._tokenizers:
            raise UnknownModel(f"the model {name!r} is not served here any more")
        return self._tokenizers[name]

    def add(self, name: str, tokenizer: Tokenizer) -> None:
        """Serve a model from now on, with this tokenizer."""
        self._tokenizers[name] = tokenizer

    def remove(self, name: str) -> None:
        """Serve a model or an adapter no longer."""
        self._tokenizers.pop(name, None)

    def _may_use(self, caller: Caller, name: str) -> bool:
        """Whether a caller's key, which may list own names and aliases, gives access to a model."""
        aliases = self._controller.devices.fleet.aliases.get(name, ())
        return caller.may_use(name) or any(map(caller.may_use, aliases))


def _served(models: Iterable[str]) -> str:
    """List the models that can be requested, for the error about an unknown one."""
    names = list(models)
    if not names:
        return "no model is served to this key"
    more = len(names) - _MOST_NAMED
    rest = f" and {more} more (GET /v1/models)" if more > 0 else ""
    return f"served: {', '.join(names[:_MOST_NAMED])}{rest}"
