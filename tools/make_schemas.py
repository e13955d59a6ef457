"""Write `schemas/*.json` from the types, or check that they are up to date.

This stands in `tools/` and not in the package: the types live in sibling layers (`package` and `config`) that
must not import each other, and an installed mcpc validates with the types themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pydantic import BaseModel

from mcpc.config.compile_recipe import CompileRecipe
from mcpc.config.recipe import Recipe
from mcpc.config.target import Runtime, Target
from mcpc.config.template import Template
from mcpc.package.manifest import Manifest

FOLDER = Path(__file__).resolve().parent.parent / "schemas"

#: File name -> type; the version is part of the type itself.
TYPES: dict[str, type[BaseModel]] = {
    "compile-recipe": CompileRecipe,
    "manifest": Manifest,
    "model-template": Template,
    "recipe": Recipe,
    "runtime": Runtime,
    "target": Target,
}


def schema_text(name: str, kind: type[BaseModel]) -> str:
    """Return the JSON Schema of a type as it stands in its file."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"schema://mcpc/{name}"}
    schema |= kind.model_json_schema(by_alias=True)
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def outdated() -> list[str]:
    """Return one line per file that differs from its type, is missing, or belongs to no type."""
    expected = {f"{name}.json": schema_text(name, kind) for name, kind in TYPES.items()}
    present = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    lines = [f"{name}: missing" for name in sorted(expected.keys() - present.keys())]
    lines += [f"{name}: made from no type" for name in sorted(present.keys() - expected.keys())]
    lines += [
        f"{name}: differs from its type"
        for name in sorted(expected)
        if present.get(name, expected[name]) != expected[name]
    ]
    return lines


def main() -> int:
    """Write or check the files; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 when a file is out of date")
    if parser.parse_args().check:
        findings = outdated()
        print("\n".join([*findings, "run: make schemas"]) if findings else f"schemas: {len(TYPES)} up to date")
        return 1 if findings else 0
    FOLDER.mkdir(exist_ok=True)
    for name, kind in TYPES.items():
        (FOLDER / f"{name}.json").write_text(schema_text(name, kind), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
