"""Find the path of a config that says a size, so that a drafted template fits other checkpoints of its family too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers

#: Dimension -> the keys that configs of transformers have for it, the usual one first.
KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "d_model", "n_embd", "dim", "hidden_dim"),
    "vocabulary": ("vocab_size",),
    "layers": ("num_hidden_layers", "decoder_layers", "num_layers", "n_layer", "decoder_num_hidden_layers"),
    "kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads"),
    "heads": ("num_key_value_heads", "decoder_attention_heads", "num_attention_heads", "n_head", "num_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "channels": ("num_channels", "in_channels", "in_chans"),
    "image_size": ("image_size", "resolution", "img_size"),
    "projection": ("projection_dim", "projection_size", "hidden_size"),
    "mel_bins": ("num_mel_bins", "input_feat_per_channel", "n_mels", "feature_size"),
    "frames": ("max_source_positions",),
    "max_tokens": (
        "max_position_embeddings", "max_target_positions", "max_text_positions", "n_positions", "max_seq_len",
        "max_sequence_length",
    ),
}  # fmt: skip
_TOWERS: Mapping[str, tuple[str, ...]] = {
    "vision": ("vision", "visual", "image", "vq", "encoder"),
    "audio": ("audio", "speech", "sound", "encoder"),
}


@dataclass(frozen=True)
class Found:
    """An expression of a template, its value, and what a person should know of it.

    Attributes:
        expression: Such as `config.text_config.hidden_size`.
        value: What it is for this checkpoint.
        check: Why it is a guess, "" when it is not.
        finish: Why it is none, "" when it is one.
    """

    expression: str
    value: int
    check: str = ""
    finish: str = ""


class ConfigPaths:
    """The parts of a model's config, by what they describe.

    Args:
        config: The model's config.
        data: The same as plain data, defaults included: what a template's paths look into.
    """

    def __init__(self, config: transformers.PretrainedConfig, data: Mapping[str, Any]) -> None:
        self.data = data
        self._parts = dict(_parts(config, ""))
        text = config.get_text_config(decoder=True)
        self.text = next((path for path, part in self._parts.items() if part is text), "")
        self._sections = {"text": [self.text, ""], **{name: self._towers(words) for name, words in _TOWERS.items()}}

    def _towers(self, words: Sequence[str]) -> list[str]:
        named = [path for word in words for path in self._parts if word in path.rpartition(".")[2]]
        return [*dict.fromkeys(path for path in named if path != self.text), ""]

    def sections(self, section: str) -> list[str]:
        """Return the parts of the config that describe a section, "" for the config itself."""
        return self._sections[section]

    def lookup(self, path: str) -> Any:
        """Return the value at a dotted path, None when there is none."""
        value: Any = self.data
        for part in path.split("."):
            if isinstance(value, (list, tuple)) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping):
                value = value.get(part)
            else:
                return None
        return value

    def first(self, dimension: str, section: str) -> Found | None:
        """Return the first usual key of a dimension that the config has."""
        return next(self._usual(dimension, section), None)

    def usual(self, key: str, section: str) -> Found | None:
        """Return the first number of that key in a section."""
        return next(self._values((key,), section), None)

    def of(self, dimension: str, section: str, value: int) -> Found:
        """Return the path whose value is the one that was measured.

        Args:
            dimension: A key of `KEYS`.
            section: `text`, `vision` or `audio`.
            value: What the model has.
        """
        for found in self._usual(dimension, section):
            if found.value == value:
                return found
        quotient = self._quotient(section, value) if dimension == "head_dim" else ""
        if quotient:
            return Found(quotient, value, f"found by its value {value} alone")
        others = [path for path in self._numbers(section) if self.lookup(path) == value]
        if others:
            also = f"; so has {', '.join(others[1:4])}" if len(others) > 1 else ""
            return Found(f"config.{others[0]}", value, f"found by its value {value} alone, not by a usual key{also}")
        return Found(str(value), value, finish=f"measured; no path of the config says {value}, so the draft fits no "
                     "checkpoint of another size")  # fmt: skip

    def token(self, words: Sequence[str]) -> Found | None:
        """Return the id of a placeholder: a key that holds `<word>_token` and ends in id or index."""
        for path in self._numbers("text") + self._numbers("vision"):
            key = path.rpartition(".")[2]
            if any(f"{word}_token" in key for word in words) and key.endswith(("_id", "_index")):
                return Found(f"config.{path}", int(self.lookup(path)))
        return None

    def _usual(self, dimension: str, section: str) -> Iterator[Found]:
        return self._values(KEYS[dimension], section)

    def _values(self, keys: Sequence[str], section: str) -> Iterator[Found]:
        for part, key in itertools.product(self._sections[section], keys):
            path = f"{part}.{key}" if part else key
            value = self.lookup(path)
            if isinstance(value, (list, tuple)) and value and len(set(value)) == 1:
                path, value = f"{path}.0", value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                yield Found(f"config.{path}", value)

    def _numbers(self, section: str) -> list[str]:
        """Return the paths of the whole numbers of a section, its own part of the config first."""
        found = []
        for part in self._sections[section]:
            values = self.lookup(part) if part else self.data
            for key, value in values.items() if isinstance(values, Mapping) else ():
                if isinstance(value, int) and not isinstance(value, bool):
                    found.append(f"{part}.{key}" if part else str(key))
        return found

    def _quotient(self, section: str, value: int) -> str:
        """Return `a / b` over usual keys: a head's size is most often no key of its own."""
        for width, heads in itertools.product(self._usual("hidden", section), self._usual("heads", section)):
            if heads.value and width.value / heads.value == value:
                return f"{width.expression} / {heads.expression}"
        return ""


def _parts(config: transformers.PretrainedConfig, path: str) -> Iterator[tuple[str, transformers.PretrainedConfig]]:
    yield path, config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, transformers.PretrainedConfig):
            yield from _parts(part, f"{path}.{name}" if path else name)
