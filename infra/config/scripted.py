"""The keys of the `scripted` backend, which pretends: for demonstrations and tests, never offered by itself."""

from typing import Annotated, Literal

from msgspec import Meta

from infra.config.scaler import LabelSet, ScalerConfig


class ScriptedScaler(ScalerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents that are only told of."""

    backend: Literal["scripted"]
    label_sets: Annotated[tuple[LabelSet, ...], Meta(min_length=1, max_length=64)]
