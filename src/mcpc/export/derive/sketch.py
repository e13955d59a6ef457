"""The draft as it grows: sizes with the paths that say them, and the parts that every kind has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcpc.checkpoint import Checkpoint
from mcpc.export.convert import Exporter
from mcpc.export.derive.configs import ConfigPaths, Found
from mcpc.export.derive.probe import Shape, probe
from mcpc.templates.draft import Draft
from mcpc.templates.plan import evaluate

Component = dict[str, Any]
_IMAGE = {"mime_types": ["image/png", "image/jpeg"], "max_bytes": 20971520, "max_pixels": 67108864}
_SOUND = {"mime_types": ["audio/wav"], "max_bytes": 67108864}


class Sketch:
    """A draft in the making.

    Attributes:
        draft: What is written so far.
        exporter: The model.
        paths: Its config.
        kind: Of the template.
    """

    def __init__(self, exporter: Exporter, kind: str) -> None:
        checkpoint = exporter.checkpoint
        self.exporter = exporter
        self.paths = ConfigPaths(exporter.model.config, exporter.config)
        self.kind = kind
        name = str(checkpoint.config.get("model_type", "") or checkpoint.architecture).lower().replace("_", "-")
        self.draft = Draft(
            f"{checkpoint.architecture}: a draft; say here what it is.",
            {
                "__meta__": {"kind": "model-template", "schema_version": "1.0", "name": name, "version": "0.1.0"},
                "kind": kind,
                "match": {"architectures": [checkpoint.architecture]},
                "dimensions": {},
                "dynamic": [],
                "components": {},
                "edges": [],
                "placeholders": {},
                "modalities": {"text": {"inputs": []}},
            },
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """Return what is drafted for."""
        return self.exporter.checkpoint

    def size(self, name: str, section: str, value: int) -> str:
        """Give a measured size a name, and find the path that says it."""
        return self.dimension(name, self.paths.of(name, section, value))

    def dimension(self, name: str, found: Found) -> str:
        """Give an expression a name."""
        self.draft.content["dimensions"][name] = found.expression
        place = ("dimensions", name)
        if found.check:
            self.draft.check(place, found.check)
        if found.finish:
            self.draft.finish(place, found.finish)
        return name

    def value(self, name: str) -> int:
        """Return the number that a dimension has here."""
        return evaluate(self.draft.content["dimensions"][name], self.exporter.config, name)

    def run(
        self,
        component: Component,
        dynamic: Sequence[str],
        sizes: Mapping[str, int],
        fixed: Mapping[str, Found] | None = None,
    ) -> tuple[Shape, ...] | str:
        """Run a component; return its outputs' shapes, or what went wrong."""
        known = {name: self.value(name) for name in self.draft.content["dimensions"]}
        known |= {name: found.value for name, found in (fixed or {}).items()}

        def numbered(tensors: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: {**plan, "shape": [known.get(dim, dim) for dim in plan["shape"]]}
                for name, plan in tensors.items()
            }

        inputs, outputs = numbered(component["inputs"]), numbered(component["outputs"])
        return probe(self.exporter, self.kind, {**component, "inputs": inputs, "outputs": outputs}, dynamic, sizes)

    def image_inputs(self, items: str) -> dict[str, Any]:
        """Return `pixel_values` of a fixed size; the config says it, else the processor."""
        section = "vision"
        channels = self.paths.first("channels", section)
        self.dimension("channels", channels or Found("3", 3, "no key of the config says it; most images have three"))
        size = self.paths.first("image_size", section)
        sides = self._sides()
        if size is not None:
            names = [self.dimension("image_size", size)] * 2
        elif sides is not None:
            names = [self.dimension(name, found) for name, found in zip(("height", "width"), sides, strict=True)]
        else:
            guess = self._processor_size()
            names = [self.dimension("image_size", guess)] * 2
        return {"pixel_values": tensor("float", items, "channels", *names)}

    def _sides(self) -> tuple[Found, Found] | None:
        """Return height and width where the config gives the two as a list."""
        for part in self.paths.sections("vision"):
            path = f"{part}.image_size" if part else "image_size"
            value = self.paths.lookup(path)
            if isinstance(value, (list, tuple)) and len(value) == 2:
                return Found(f"config.{path}.0", value[0]), Found(f"config.{path}.1", value[1])
        return None

    def _processor_size(self) -> Found:
        """Return what the image processor resizes to."""
        given = self.checkpoint.optional_json("preprocessor_config.json") or {}
        size = given.get("crop_size") or given.get("size") or {}
        values = [size] if isinstance(size, int) else [v for v in size.values() if isinstance(v, int)]
        if values:
            return Found(str(values[0]), values[0], finish="the config does not say it; this is the processor's size")
        return Found("224", 224, finish="neither config nor processor says the size of an image")

    def place(self, name: str, component: Component) -> None:
        """Add a component."""
        self.draft.content["components"][name] = component

    def modality(self, name: str, inputs: Sequence[str], sizes: Mapping[str, Sequence[int]] | None = None) -> None:
        """Add a modality that is no text, with the limits that the shipped templates have."""
        limits = _IMAGE if name == "image" else _SOUND
        more = {"sizes": {key: list(value) for key, value in sizes.items()}} if sizes else {}
        self.draft.content["modalities"][name] = {"inputs": list(inputs), **limits, **more}
        if sizes:
            self.draft.check(
                ("modalities", name, "sizes"),
                "sizes that are traced (the first) and verified (the others); take ones that the encoder treats "
                "differently, such as a partial last block",
            )

    def binding(self, section_prompt: str = "") -> None:
        """Add the length of a prompt and its format."""
        place = ("binding", "max_tokens")
        found = self.paths.first("max_tokens", "text")
        binding: dict[str, Any] = {"max_tokens": found.expression if found else "2048", "truncation": "refuse"}
        self.draft.content["binding"] = binding
        if found is None:
            self.draft.finish(place, "no usual key of the config says how many tokens the model reads")
        if section_prompt:
            binding["prompt"] = section_prompt
            self.draft.check(("binding", "prompt"), "used when a checkpoint brings no chat template: write what the "
                             "model was trained with")  # fmt: skip


def tensor(dtype: str, *shape: str | int) -> dict[str, Any]:
    """Return an input or output as a template writes it."""
    return {"dtype": dtype, "shape": list(shape)}
