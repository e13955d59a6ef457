"""Type of `templates/refusals.yaml`: why a model type that transformers lists as multimodal has no template."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mcpc.config.template import Strict


class RefusalsMeta(Strict):
    """Identity of the file."""

    kind: Literal["refusals"]
    schema_version: Literal["1.0"]


class Refusals(Strict):
    """The file."""

    meta: RefusalsMeta = Field(alias="__meta__")
    reasons: dict[str, str] = Field(description="Model type -> what it needs that mcpc does not do.")
