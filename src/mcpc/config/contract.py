"""Types of a contract file: what a consumer of a component may rely on, filled from the config."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Contract(BaseModel):
    """A contract template in `templates/contracts/`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    type: str
    fields: dict[str, str] = Field(description="Field -> expression over the config.")

    @property
    def ref(self) -> str:
        """Return the reference that manifests use; it resolves to a file that travels in the package."""
        return f"schema://{self.name}@v{self.version}"

    @property
    def file(self) -> str:
        """Return the file's place in a package."""
        return f"contracts/{self.name}@v{self.version}.json"
