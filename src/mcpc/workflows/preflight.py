"""What ships with the weights must agree with them: tokenizer, processor and generation config against the model.

transformers loads each of these files by itself and notices a disagreement at the first request, or never. Everything
that can be known before tracing is checked at once; what is measured from the graph is checked after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from mcpc.checkpoint import Checkpoint
from mcpc.errors import BadInputError, McpcError, Problem
from mcpc.package.manifest import ImagePreprocess, Vocabulary
from mcpc.processing.configs import image_preprocess_from_config
from mcpc.processing.text import load_tokenizer
from mcpc.templates.plan import ExportPlan

TOKENIZER = "tokenizer.json"
_HINT = "the files are from different models, or one was edited: download the checkpoint again"


@dataclass(frozen=True)
class Preflight:
    """The files beside the weights, read once.

    Attributes:
        checkpoint: The folder.
        config: Full config of the model, defaults included.
        plan: The export plan.
        embedding_rows: Rows of the token embedding table, None without one.
        head_rows: Rows of the output head, None without one.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    plan: ExportPlan
    embedding_rows: int | None
    head_rows: int | None

    def check(self) -> tuple[str, ...]:
        """Check everything that is known before tracing; return notes.

        Raises:
            BadInputError: Lists every disagreement.
        """
        problems = [*self._placeholders(), *self._images(), *self._generation()]
        if problems:
            raise BadInputError(
                f"the checkpoint's files disagree: {problems[0]}", where=str(self.checkpoint.root), problems=problems,
                hint=_HINT,
            )  # fmt: skip
        vocabulary = self.vocabulary
        rows, size = vocabulary.embedding_rows, vocabulary.tokenizer_size
        if rows is None or size is None or size <= rows:
            return ()
        return (
            f"the tokenizer has ids up to {size - 1}, the embedding {rows} rows: a text with an id beyond is refused",
        )

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the sizes that a token id has to fit in."""
        size = None if self._tokenizer is None else max(self._tokenizer.get_vocab().values(), default=-1) + 1
        return Vocabulary(tokenizer_size=size, embedding_rows=self.embedding_rows, head_rows=self.head_rows)

    def check_rows(self, measured: int | None) -> None:
        """Compare the rows of one image, measured from the graph, with what the processor writes placeholders for.

        Raises:
            BadInputError: The processor would write another number of placeholders.
        """
        expected, rule = self._placeholders_per_image()
        if measured is not None and expected is not None and expected != measured:
            raise BadInputError(
                "the processor writes another number of placeholders for an image than the graph computes rows",
                where=str(self.checkpoint.root), expected=f"{measured} rows, measured from the graph",
                got=f"{expected} placeholders: {rule}",
                hint="patch_size, num_additional_image_tokens and vision_feature_select_strategy of the processor "
                "decide how many",
            )  # fmt: skip

    def row_notes(self, measured: int | None) -> tuple[str, ...]:
        """Return a note when the config states another number of rows; nothing computes with its statement."""
        stated = self.config.get("image_seq_length")
        if measured is None or not isinstance(stated, int) or stated == measured:
            return ()
        return (f"config.json says image_seq_length {stated}, but the graph computes {measured} rows for an image",)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        path = self.checkpoint.root / TOKENIZER
        if self.plan.template.binding is None and not path.is_file() and not path.is_symlink():
            return None
        return load_tokenizer(path)

    def _json(self, name: str) -> dict[str, Any]:
        return self.checkpoint.optional_json(name) or {}

    def _placeholders(self) -> Iterator[Problem]:
        """Compare the placeholder of each modality as config, tokenizer and processor name it."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return
        for modality, token_id in self.plan.placeholder_ids.items():
            where = f"placeholder of {modality}"
            if tokenizer.id_to_token(token_id) is None:
                below = f"an id below {tokenizer.get_vocab_size()} (tokenizer.json)"
                yield Problem("the id is not in the tokenizer", where, below, f"{token_id} (config.json)")
            elif self.embedding_rows is not None and token_id >= self.embedding_rows:
                rows = f"an id below the {self.embedding_rows} embedding rows"
                yield Problem("the id has no embedding row", where, rows, f"{token_id} (config.json)")
            for file, token in self._named_tokens(f"{modality}_token"):
                found = tokenizer.token_to_id(token)
                if found != token_id:
                    got = "no such token" if found is None else f"{found}"
                    yield Problem(
                        f"the token that {file} names has another id", where,
                        f"{token_id} (config.json)", f"{got} for {token!r} (tokenizer.json)",
                    )  # fmt: skip

    def _named_tokens(self, key: str) -> Iterator[tuple[str, str]]:
        """Yield (file, token) of every file that names the token of a modality; each token once."""
        tokenizer = self._json("tokenizer_config.json")
        places: Sequence[tuple[str, Any]] = [
            ("tokenizer_config.json", tokenizer.get(key)),
            *(
                ("tokenizer_config.json", nested.get(key))
                for name in ("extra_special_tokens", "model_specific_special_tokens")
                if isinstance(nested := tokenizer.get(name), Mapping)
            ),
            ("processor_config.json", self._json("processor_config.json").get(key)),
        ]
        seen = set()
        for file, value in places:
            token = value.get("content") if isinstance(value, Mapping) else value  # an AddedToken written out
            if isinstance(token, str) and token not in seen:
                seen.add(token)
                yield file, token

    def _images(self) -> Iterator[Problem]:
        """Compare size, patch and feature selection of the processor with the vision tower's."""
        processor = {**self._json("preprocessor_config.json"), **self._json("processor_config.json")}
        vision = self.config.get("vision_config")
        if isinstance(vision, Mapping):
            yield from _differ("patch_size", vision, processor, "vision_config")
        yield from _differ("vision_feature_select_strategy", self.config, processor, "config.json")
        wanted, made = self._image_size(), self._processed_size()
        if wanted is not None and made is not None and wanted != made:
            yield Problem(
                "the processor makes images of another size", "preprocessor_config.json",
                f"{wanted[0]}x{wanted[1]} (vision_config)", f"{made[0]}x{made[1]}",
            )  # fmt: skip

    def _image_size(self) -> tuple[int, int] | None:
        """Return the height and width that the vision tower is made for, None when it takes any."""
        for component in self.plan.components:
            for spec in component.inputs:
                if component.modality == "image" and spec.name == "pixel_values" and len(spec.shape) == 4:
                    height, width = spec.shape[2:]
                    return (height, width) if isinstance(height, int) and isinstance(width, int) else None
        return None

    def _processed_size(self) -> tuple[int, int] | None:
        """Return the height and width of a processed image, None when that depends on it or is not known."""
        nested = self._json("processor_config.json").get("image_processor")
        config = self.checkpoint.optional_json("preprocessor_config.json") or nested
        if not isinstance(config, dict):
            return None
        try:
            steps: ImagePreprocess = image_preprocess_from_config(config)
        except McpcError:  # what is not understood is reported where the steps are written down
            return None
        if steps.center_crop is not None:
            return steps.center_crop
        resize = steps.resize
        if resize is None or resize.height is None or resize.width is None:
            return None
        return (resize.height, resize.width)

    def _placeholders_per_image(self) -> tuple[int | None, str]:
        """Return how many placeholders the processor writes for an image, and by which rule.

        Source: transformers `LlavaProcessor._get_num_multimodal_tokens`; `image_seq_length` of PaliGemma and Gemma 3.
        """
        processor = {**self._json("preprocessor_config.json"), **self._json("processor_config.json")}
        patch, strategy = processor.get("patch_size"), processor.get("vision_feature_select_strategy")
        size = self._processed_size()
        if isinstance(patch, int) and patch > 0 and isinstance(strategy, str) and size is not None:
            extra = processor.get("num_additional_image_tokens") or 0
            rows = (size[0] // patch) * (size[1] // patch) + extra - (strategy == "default")
            rule = f"{size[0]}x{size[1]} in patches of {patch}, {extra} additional, strategy {strategy!r}"
            return rows, rule
        stated = processor.get("image_seq_length")
        return (stated, "image_seq_length of the processor") if isinstance(stated, int) else (None, "")

    def _generation(self) -> Iterator[Problem]:
        """Check that every token of the generation config has a row where it is needed."""
        if self.plan.template.generation is None:
            return
        given = self._json("generation_config.json")
        text = self.config.get("text_config") or self.config
        keys = ("eos_token_id", "pad_token_id", "bos_token_id")
        given = {**{key: text.get(key) for key in keys}, **given}
        for key, rows, what in (
            ("eos_token_id", self.head_rows, "head"), ("suppress_tokens", self.head_rows, "head"),
            ("begin_suppress_tokens", self.head_rows, "head"), ("pad_token_id", self.embedding_rows, "embedding"),
            ("bos_token_id", self.embedding_rows, "embedding"),
            ("decoder_start_token_id", self.embedding_rows, "embedding"),
        ):  # fmt: skip
            value = given.get(key)
            ids = [] if value is None else value if isinstance(value, list) else [value]
            for token_id in ids:
                if key == "pad_token_id" and token_id == -1:
                    continue  # the spelling of older Llamas for none
                if not isinstance(token_id, int) or token_id < 0 or (rows is not None and token_id >= rows):
                    below = f"an id below the {rows} {what} rows"
                    yield Problem("the token does not exist", f"generation config: {key}", below, repr(token_id))


def _differ(key: str, model: Mapping[str, Any], processor: Mapping[str, Any], where: str) -> Iterator[Problem]:
    expected, got = model.get(key), processor.get(key)
    if isinstance(expected, (int, str)) and isinstance(got, (int, str)) and expected != got:
        yield Problem(f"the processor has another {key}", key, f"{expected} ({where})", f"{got} (processor)")


def fixed_rows(relation: str | None) -> int | None:
    """Return k of a derived dimension `k*images`, or `k*clips`; None when the rows are not a fixed number."""
    found = re.fullmatch(r"(\d+)\*(?:images|clips)|(?:images|clips)\*(\d+)", (relation or "").replace(" ", ""))
    return int(found[1] or found[2]) if found else None
