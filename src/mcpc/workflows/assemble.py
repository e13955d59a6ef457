"""Fill a manifest from graphs, weights and config. No number is typed in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from tokenizers import Tokenizer

from mcpc.checkpoint import Checkpoint
from mcpc.config.contract import Contract
from mcpc.config.loader import load_yaml
from mcpc.config.template import HostPlan
from mcpc.errors import BadInputError, InternalError, UnsupportedError
from mcpc.graph import describe
from mcpc.graph.weights import Span
from mcpc.inference.cache import bytes_per_token
from mcpc.package import PackageWriter, manifest
from mcpc.processing.configs import audio_preprocess_from_config, image_preprocess_from_config
from mcpc.processing.text import load_tokenizer
from mcpc.resources import templates_dir
from mcpc.storage.digests import canonical_json, fnv1a64
from mcpc.templates.match import lookup
from mcpc.templates.plan import CachePlan, ExportPlan, PlannedComponent, evaluate
from mcpc.workflows.preflight import fixed_rows

#: Files of a checkpoint that text and media processing may need, copied into the package's `processor/`.
PROCESSOR_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "preprocessor_config.json",
    "processor_config.json", "generation_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class BoundComponent:
    """A planned component with its bound graph, and what the graph says of derived dimensions."""

    planned: PlannedComponent
    model: ir.Model
    relations: Mapping[str, str]


@dataclass(frozen=True)
class Facts:
    """Everything a manifest is filled from."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    plan: ExportPlan
    components: Sequence[BoundComponent]
    source: Mapping[str, str]
    spans: Mapping[str, Span]
    source_digest: str | None
    embedding_rows: int | None
    unused: Mapping[str, str]
    options: Mapping[str, Any]
    checked: str
    vocabulary: manifest.Vocabulary
    template_digest: str | None = None


def write_processor(checkpoint: Checkpoint, writer: PackageWriter) -> None:
    """Copy config and processor files into the package."""
    writer.copy(checkpoint.root / "config.json", "config.json")
    for name in PROCESSOR_FILES:
        if (checkpoint.root / name).is_file():
            writer.copy(checkpoint.root / name, f"processor/{name}")


def write_contracts(facts_config: Mapping[str, Any], plan: ExportPlan, writer: PackageWriter) -> dict[str, str]:
    """Write the contract of every component that names one; return {component: reference}."""
    refs = {}
    for component in plan.components:
        if component.contract is None:
            continue
        contract = load_yaml(templates_dir("contracts") / f"{component.contract}.yaml", Contract)
        values = {name: evaluate(expression, facts_config, name) for name, expression in contract.fields.items()}
        writer.write_json(contract.file, {"ref": contract.ref, "type": contract.type, **values})
        refs[component.name] = contract.ref
    return refs


def build_manifest(facts: Facts, contracts: Mapping[str, str]) -> manifest.Manifest:
    """Return the manifest of a freshly converted package."""
    plan, checkpoint = facts.plan, facts.checkpoint
    components = tuple(_component(item, facts, contracts) for item in facts.components)
    modalities = _modalities(facts)
    edges = plan.template.edges
    return manifest.Manifest(
        kind=plan.template.kind,
        model=manifest.ModelInfo(
            architecture=checkpoint.architecture,
            model_type=str(checkpoint.config.get("model_type", "")),
            template=plan.template.id,
            template_digest=facts.template_digest,
            source=manifest.Source(
                identity=checkpoint.identity, digest=facts.source_digest, files=checkpoint.files, dtype=checkpoint.dtype
            ),
        ),
        vision_encoder_ref=contracts.get("vision_encoder"),
        opset=describe.opsets(item.model for item in facts.components),
        components=components,
        edges=edges,
        modalities=modalities,
        vocabulary=facts.vocabulary,
        binding=_binding(facts),
        generation=_generation(facts),
        kv_cache=_kv_cache(facts),
        unused=tuple(manifest.Unused(name=name, why=why) for name, why in sorted(facts.unused.items())),
        lineage=manifest.Lineage(
            parent=None,
            steps=(manifest.Step(command="convert", template=plan.template.id, options=_options(facts)),),
        ),
        schema_hash=schema_hash(components, modalities, edges),
        verification=manifest.VerificationRef.model_validate({"checked": facts.checked}),
    )


def _options(facts: Facts) -> dict[str, Any]:
    prefix = facts.checkpoint.prefix
    return {**facts.options, **({"strip_prefix": prefix} if prefix else {})}


def schema_hash(
    components: Sequence[manifest.Component],
    modalities: Mapping[str, manifest.Modality],
    edges: Sequence[tuple[str, str]],
) -> str:
    """Return the hash of everything a service binds to: components' inputs and outputs, edges, modality inputs."""
    value = {
        "components": [
            [c.name, c.role, [t.model_dump() for t in c.inputs], [t.model_dump() for t in c.outputs]]
            for c in components
        ],
        "edges": [list(edge) for edge in edges],
        "modalities": {name: item.model_dump(mode="json") for name, item in modalities.items()},
    }
    return fnv1a64(canonical_json(value))


def _component(item: BoundComponent, facts: Facts, contracts: Mapping[str, str]) -> manifest.Component:
    planned, model = item.planned, item.model
    names = [name for name in model.graph.initializers if name in facts.source]
    return manifest.Component.model_validate(
        {
            "name": planned.name,
            "role": planned.role,
            "modality": planned.modality,
            "file": f"{planned.name}.onnx",
            "contract": contracts.get(planned.name),
            "functions": describe.functions(model),
            "inputs": describe.tensors(model.graph.inputs),
            "outputs": describe.tensors(model.graph.outputs),
            "precision": describe.precision(model),
            "weights": describe.weight_files(model),
            "initializers": {name: _initializer(facts, name) for name in sorted(names)},
        }
    )


def _initializer(facts: Facts, name: str) -> manifest.Initializer:
    span = facts.spans[facts.source[name]]
    return manifest.Initializer(source_name=span.origin or facts.source[name], transform=span.transform)


def _modalities(facts: Facts) -> dict[str, manifest.Modality]:
    result = {}
    for name, plan in facts.plan.template.modalities.items():
        fields: dict[str, Any] = {
            "inputs": plan.inputs,
            "mime_types": plan.mime_types,
            "max_bytes": plan.max_bytes,
            "max_pixels": plan.max_pixels,
            "sizes": plan.sizes,
            "host": None if plan.host is None else _host(facts, plan.host),
            "merge": None if plan.merge is None else evaluate(plan.merge, facts.config, "merge"),
            "rows_per_item": None if plan.merge is not None or plan.host is not None else _rows(facts, name),
        }
        if name == "text":
            fields |= {
                "tokenizer": "processor/tokenizer.json",
                "vocabulary": facts.embedding_rows,
                "max_tokens": _max_tokens(facts),
            }
        else:
            try:
                fields |= _image(facts) if name == "image" else _audio(facts) if name == "audio" else _video()
            except UnsupportedError as error:  # the graphs are as good as any; only files cannot be turned into inputs
                fields["preprocess_refused"] = str(error)
        result[name] = manifest.Modality(**fields)
    return result


def _host(facts: Facts, plan: HostPlan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "settings": {
            name: value if isinstance(value, int) else lookup(facts.config, value.removeprefix("config."))
            for name, value in plan.settings.items()
        },
    }


def _image(facts: Facts) -> dict[str, Any]:
    others = [name for name in facts.plan.template.modalities["image"].inputs if name != "pixel_values"]
    if others:
        raise UnsupportedError(f"the images come with inputs that mcpc cannot make from a file: {', '.join(others)}")
    return {"preprocess": image_preprocess_from_config(_preprocessor(facts.checkpoint, "image_processor"))}


def _audio(facts: Facts) -> dict[str, Any]:
    if facts.plan.template.kind == "audio-language":
        raise UnsupportedError("preprocessing of sound for a language model is not described yet")
    steps = audio_preprocess_from_config(_preprocessor(facts.checkpoint, "feature_extractor"))
    rows = facts.plan.sizes["audio_rows"]
    return {
        "preprocess": steps,
        "max_duration_s": float(steps.chunk_s),
        "rows_per_item": rows,
        "ms_per_row": steps.chunk_s * 1000 / rows,
    }


def _video() -> dict[str, Any]:
    raise UnsupportedError("preprocessing of video is not supported")


def _preprocessor(checkpoint: Checkpoint, part: str) -> dict[str, Any]:
    config = checkpoint.optional_json("preprocessor_config.json")
    if config is None:
        nested = (checkpoint.optional_json("processor_config.json") or {}).get(part)
        config = nested if isinstance(nested, dict) else None
    if config is None:
        raise BadInputError(
            "preprocessor_config.json is missing",
            where=str(checkpoint.root),
            hint="copy it from the model's repository into the folder",
        )
    return config


def _rows(facts: Facts, modality: str) -> int | None:
    """Return the feature rows of one item, from what the graph says of its output's first dimension."""
    for item in facts.components:
        if item.planned.modality == modality and "feature_rows" in item.relations:
            rows = fixed_rows(item.relations["feature_rows"])
            if rows is None and facts.plan.template.modalities[modality].sizes:
                return None  # items of any size have as many rows as they need
            if rows is None:
                raise UnsupportedError(
                    "the rows of one image are not a fixed number",
                    where=item.planned.name,
                    got=item.relations["feature_rows"],
                )
            return rows
    return None


def _max_tokens(facts: Facts) -> int | None:
    binding = facts.plan.template.binding
    return None if binding is None else evaluate(binding.max_tokens, facts.config, "max_tokens")


def _binding(facts: Facts) -> manifest.Binding | None:
    plan = facts.plan.template.binding
    if plan is None:
        return None
    tokenizer = load_tokenizer(facts.checkpoint.root / "tokenizer.json")
    placeholders = {}
    for modality, token_id in facts.plan.placeholder_ids.items():
        token = tokenizer.id_to_token(token_id)
        if token is None:
            raise BadInputError(
                "the placeholder id of the config is not in the tokenizer",
                where="config.json",
                expected=f"an id below {tokenizer.get_vocab_size()}",
                got=str(token_id),
            )
        placeholders[modality] = manifest.Placeholder(token=token, token_id=token_id)
    suffix = tuple(evaluate(path, facts.config, "suffix token", allow_zero=True) for path in plan.suffix)
    ends_itself = bool(suffix) and tuple(tokenizer.encode("a").ids[-len(suffix) :]) == suffix
    return manifest.Binding(
        placeholders=placeholders,
        max_tokens=evaluate(plan.max_tokens, facts.config, "max_tokens"),
        truncation=manifest.Truncation(policy=plan.truncation),
        prompt=plan.prompt,
        suffix_token_ids=() if ends_itself else suffix,
        pad_token_id=_pad_token_id(facts, tokenizer),
        pad_to=None if plan.pad_to is None else evaluate(plan.pad_to, facts.config, "pad_to"),
        token_types=plan.token_types,
        first_position=plan.first_position,
    )


def _pad_token_id(facts: Facts, tokenizer: Tokenizer) -> int | None:
    """Return the id of the tokenizer's padding token, else the config's."""
    token = (facts.checkpoint.optional_json("tokenizer_config.json") or {}).get("pad_token")
    if isinstance(token, dict):  # an AddedToken written out
        token = token.get("content")
    found = tokenizer.token_to_id(token) if isinstance(token, str) else None
    configured = (facts.config.get("text_config") or facts.config).get("pad_token_id")
    return found if found is not None else _token_id(configured)


def _token_id(value: int | None) -> int | None:
    """Return a token id; older Llamas spell none as -1."""
    return None if value == -1 else value


def _generation(facts: Facts) -> manifest.Generation | None:
    plan = facts.plan.template.generation
    if plan is None:
        return None
    text = facts.config.get("text_config") or facts.config
    given = {
        **{k: text.get(k) for k in ("eos_token_id", "pad_token_id")},
        **(facts.checkpoint.optional_json("generation_config.json") or {}),
    }
    eos = evaluate(plan.end, facts.config, "end of text") if plan.end else given.get("eos_token_id")
    if eos is None:
        raise BadInputError("no end-of-text token", where="generation_config.json", expected="eos_token_id")
    return manifest.Generation(
        decoder_start_ids=_decoder_start(facts, given),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        pad_token_id=_token_id(given.get("pad_token_id")),
        suppress_token_ids=tuple(given.get("suppress_tokens") or ()),
        begin_suppress_token_ids=tuple(given.get("begin_suppress_tokens") or ()),
        max_new_tokens=plan.max_new_tokens,
    )


def _decoder_start(facts: Facts, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens a speech decoder starts from. Source: WhisperGenerationMixin._retrieve_init_tokens."""
    plan = facts.plan.template.generation
    if plan is not None and plan.start:
        return tuple(evaluate(path, facts.config, "start token", allow_zero=True) for path in plan.start)
    if not facts.plan.template.kind.endswith("seq2seq"):
        return ()
    if given.get("is_multilingual"):
        raise UnsupportedError(
            "multilingual speech needs a language choice, which packages do not hold yet",
            where="generation_config.json: is_multilingual",
            hint="convert an English-only checkpoint (is_multilingual: false)",
        )
    start = [given.get("decoder_start_token_id", facts.config.get("decoder_start_token_id"))]
    if not given.get("return_timestamps") and given.get("no_timestamps_token_id") is not None:
        start.append(given["no_timestamps_token_id"])
    if start[0] is None:
        raise BadInputError("no decoder start token", where="generation_config.json", expected="decoder_start_token_id")
    return tuple(start)


def _kv_cache(facts: Facts) -> manifest.KvCache | None:
    for item in facts.components:
        cache: CachePlan | None = item.planned.cache
        if item.planned.role != "decoder" or cache is None:
            continue
        tensors = [t for t in describe.tensors(item.model.graph.inputs) if t.name.startswith("past.")]
        past = next(tensor for tensor in tensors if tensor.name.endswith(".key"))
        heads, size = past.shape[1], past.shape[3]
        if not isinstance(heads, int) or not isinstance(size, int):
            raise InternalError(
                "the cache has no fixed heads and head size", where=past.name, got=str(list(past.shape))
            )
        return manifest.KvCache(
            layers=cache.layers,
            layout=cache.layout,
            kv_heads=heads,
            head_dim=size,
            dtype=past.dtype,
            bytes_per_token=bytes_per_token(tensors),
            cross=cache.cross_shape is not None,
        )
    return None
