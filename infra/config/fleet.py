"""The configuration of one coordinator: its struct, its digest, its summary for the log and its JSON schema."""

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.decisions.resources import ResourceSpec
from infra.config.backends import BACKENDS, Backends
from infra.config.kinds import FORMS, Count, Name, ResourceCap
from infra.config.microvm_network import MicrovmNetwork
from infra.config.scaler import ScalerConfig

_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Defaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds where a label set says nothing."""

    resources: ResourceSpec = ResourceSpec()


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it, checked and canonical. Names that are None are the deployment's to choose, not the file's."""

    version: Literal[1]
    cluster: Name | None = None
    coordinator: Name | None = None
    host: Name | None = None
    global_max_agents: Count = 50
    global_resource_cap: ResourceCap = ResourceCap()
    defaults: Defaults = Defaults()
    microvm_network: MicrovmNetwork = MicrovmNetwork()
    scalers: Annotated[tuple[ScalerConfig, ...], Meta(max_length=1000)] = ()

    def scaler(self, name: str) -> ScalerConfig:
        """Return the scaler of this name.

        Raises:
            KeyError: there is none.
        """
        for scaler in self.scalers:
            if scaler.name == name:
                return scaler
        raise KeyError(f"no scaler {name!r}; there are: {', '.join(each.name for each in self.scalers)}")

    def summary(self) -> dict[str, Any]:
        """Return what decisions use, by scaler, for `coordinator.config_applied`: no environment, no arguments."""
        return {
            scaler.name: {
                "backend": scaler.backend,
                "max_agents": scaler.max_agents,
                "max_concurrent_spawns": scaler.max_concurrent_spawns,
                "mandatory_labels": list(scaler.mandatory_labels),
                "platform": msgspec.to_builtins(scaler.platform),
                "roles": None if scaler.roles is None else list(scaler.roles),
                "resource_cap": msgspec.to_builtins(scaler.resource_cap),
                "label_sets": [
                    {"labels": list(each.labels), "resources": msgspec.to_builtins(each.resources)}
                    for each in scaler.label_sets
                ],
            }
            for scaler in self.scalers
        }


def digest(config: FleetConfig) -> str:
    """Return the sha256, in hex, of the canonical JSON of the whole configuration.

    The same rules give the same digest however they are written and spread over files; environment values go
    in as hashes of their own, so no form of the text that is hashed holds a secret.
    """
    form = msgspec.to_builtins(config)
    for scaler in form["scalers"]:
        for label_set in scaler["label_sets"]:
            if "env" in label_set:
                label_set["env"] = {name: _sha256(value) for name, value in label_set["env"].items()}
    return hashlib.sha256(msgspec.json.encode(form, order="sorted")).hexdigest()


def json_schema(backends: Backends = BACKENDS) -> dict[str, Any]:
    """Return the JSON schema of the main file as it is written, for editors; a load checks more than it says."""
    written = [form.written for form in FORMS.values()]
    references, definitions = msgspec.json.schema_components(
        [FleetConfig, *backends.values(), *written], ref_template="#/$defs/{name}"
    )
    for cls, form in FORMS.items():
        definitions[cls.__name__] = {"$ref": f"#/$defs/{form.written.__name__}"}
    definitions[ScalerConfig.__name__] = {"anyOf": list(references[1 : 1 + len(backends)])}
    _forget_defaults(definitions)
    return {"$schema": _SCHEMA_DIALECT, **references[0], "$defs": definitions}


def _forget_defaults(definitions: dict[str, Any]) -> None:
    # Defaults of converted types are shown in their loaded form, which a file does not accept.
    converted = {f"#/$defs/{cls.__name__}" for cls in FORMS}
    for definition in definitions.values():
        for value in definition.get("properties", {}).values():
            if value.get("$ref") in converted or "Defaults" in str(value.get("$ref")):
                value.pop("default", None)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
