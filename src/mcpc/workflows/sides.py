"""The two sides of a comparison: a package in ONNX Runtime, or a checkpoint in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mcpc.backends.ort import StreamedRunner, open_model, package_runners
from mcpc.checkpoint import Checkpoint
from mcpc.core.runner import Array, Feeds, Runner, RunnerFactory
from mcpc.graph import io
from mcpc.graph.modules import ModuleOutput, module_outputs
from mcpc.inference.greedy import require_generation
from mcpc.package import Manifest
from mcpc.package.manifest import Component
from mcpc.templates.plan import ExportPlan
from mcpc.verify.cases import Sample
from mcpc.verify.chains import PackageChain
from mcpc.verify.crossmodal import pairwise_cosines
from mcpc.verify.verification import Chain

if TYPE_CHECKING:
    from mcpc.export.reference import TorchReference


class Side(Protocol):
    """One side of a comparison."""

    runners: RunnerFactory
    exact: RunnerFactory | None
    chain: Chain
    label: dict[str, str]

    def module_values(self, component: str, feeds: Feeds, modules: Sequence[str]) -> dict[str, Array]:
        """Return {module path: output} of those modules while the component runs."""
        ...


class PackageSide:
    """A package, or the staging folder of one, in ONNX Runtime."""

    def __init__(self, root: Path, manifest: Manifest, digest: str = "", streamed: bool = False) -> None:
        self.root = root
        self.manifest = manifest
        self.streamed = streamed
        self.runners = package_runners(root, manifest, streamed=streamed)
        self.exact: RunnerFactory | None = None
        self.chain: Chain = PackageChain(manifest, self.runners)
        self.label = {"kind": "package", "digest": digest}

    def component(self, name: str) -> Component:
        """Return a component's description."""
        return self.manifest.component(name)

    def places(self, component: str) -> list[ModuleOutput]:
        """Return where the modules of a component end."""
        return module_outputs(io.load(self.root / self.component(component).file))

    def module_values(self, component: str, feeds: Feeds, modules: Sequence[str]) -> dict[str, Array]:
        """Return {module path: output}."""
        values = {place.module: place.value for place in self.places(component) if place.module in set(modules)}
        outputs = self.values(component, feeds, list(values.values()))
        return {module: outputs[value] for module, value in values.items()}

    def values(self, component: str, feeds: Feeds, names: Sequence[str]) -> dict[str, Array]:
        """Return intermediate values by their name in the graph."""
        if not names:  # the runtime would take that for all outputs
            return {}
        declared = {tensor.name for tensor in self.component(component).outputs}
        extra = [name for name in names if name not in declared]
        path = self.root / self.component(component).file
        runner: Runner = (
            StreamedRunner(path, extra) if self.streamed else open_model(path, optimize=False, extra_outputs=extra)
        )
        return runner.run(feeds, list(names))


class CheckpointSide:
    """A checkpoint, as transformers runs it in float32."""

    def __init__(
        self, checkpoint: Checkpoint, plan: ExportPlan, manifest: Manifest, digest: str, streamed: bool = False
    ) -> None:
        from mcpc.export.reference import TorchReference  # torch takes seconds

        self._reference = TorchReference(checkpoint, plan, streamed)
        self.runners: RunnerFactory = self._reference.component
        self.exact: RunnerFactory | None = self._reference.exact_component
        self.chain: Chain = TorchChain(self._reference, manifest)
        self.label = {"kind": "checkpoint", "digest": digest}

    def module_values(self, component: str, feeds: Feeds, modules: Sequence[str]) -> dict[str, Array]:
        """Return {module path: output}."""
        return self._reference.watch(modules, lambda: self.runners(component).run(feeds))


class TorchChain:
    """Answers samples with transformers' own forward and generate."""

    def __init__(self, reference: TorchReference, manifest: Manifest) -> None:
        self._reference = reference
        self._manifest = manifest

    def logits(self, sample: Sample) -> Array:
        """Return the logits of the prompt, or of the image-text pairs."""
        feeds: dict[str, Any] = dict(sample.feeds)
        if self._manifest.kind == "dual-encoder":
            output = self._reference.forward(feeds)
            return output["logits_per_image" if "logits_per_image" in output else "logits_per_video"]
        if self._manifest.kind in ("speech-seq2seq", "image-seq2seq"):
            start = np.array([require_generation(self._manifest).decoder_start_ids], np.int64)
            feeds["decoder_input_ids"] = np.repeat(start, len(next(iter(sample.feeds.values()))), axis=0)
        return self._reference.forward(feeds)["logits"]

    def cosines(self, sample: Sample) -> Array:
        """Return image-text cosine similarities [images, texts]."""
        output = self._reference.forward(sample.feeds)
        images = output["image_embeds" if "image_embeds" in output else "video_embeds"]
        return pairwise_cosines(images, output["text_embeds"])

    def greedy(self, sample: Sample, new_tokens: int) -> list[int]:
        """Return exactly `new_tokens` greedy tokens."""
        if self._manifest.kind in ("speech-seq2seq", "image-seq2seq"):
            start = require_generation(self._manifest).decoder_start_ids
            return self._reference.answer(sample.feeds, start, new_tokens)
        return self._reference.generate(sample.feeds, new_tokens)
