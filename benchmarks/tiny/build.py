"""Write a tiny checkpoint folder: random weights that matter, a small real tokenizer, processor files.

A test on a freshly initialised model shows little: norms are the identity, biases are zero, and weights are so small
that an error in one is lost. So every parameter is drawn anew from a seed, large enough to move the output.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 320
PAD, START, END = 0, 1, 2
#: Tokens that every tiny tokenizer has; a family adds its own.
SPECIAL = {"<pad>": PAD, "<s>": START, "</s>": END}
#: Spread of what a matrix makes of inputs of unit spread; well above the 0.02 of a fresh model.
_GAIN = 0.7
_NOISE = 0.1
_PLAIN_WEIGHTS = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


@dataclass(frozen=True)
class Tiny:
    """What a tiny checkpoint is made of.

    Attributes:
        config: The model's config.
        special: Token -> id, beside pad, start and end: placeholders at the ids that the config names.
        files: File name -> JSON content, such as preprocessor_config.json.
        generation: Values of generation_config.json that differ from what the model's class gives; None writes no file.
        vocabulary: Size of the tokenizer, at most the rows of the embedding table.
    """

    config: transformers.PretrainedConfig
    special: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    generation: Mapping[str, Any] | None = None
    vocabulary: int = VOCABULARY


def write(architecture: str, tiny: Tiny, root: Path) -> None:
    """Write the checkpoint of an architecture to the folder `root`."""
    cls: type[transformers.PreTrainedModel] = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = cls._from_config(tiny.config, dtype=torch.float32).eval()
    perturb(model, seed=zlib.crc32(architecture.encode()))
    if tiny.generation is not None and model.generation_config is not None:
        model.generation_config = transformers.GenerationConfig(**tiny.generation)
    model.save_pretrained(root)
    if tiny.generation is None:
        (root / "generation_config.json").unlink(missing_ok=True)
    make_tokenizer(tiny.vocabulary, {**SPECIAL, **tiny.special}).save(str(root / "tokenizer.json"))
    _write_json(root / "tokenizer_config.json", {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"})
    for name, content in tiny.files.items():
        _write_json(root / name, content)


def perturb(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter and running statistic anew, so that none is zero, one, or too small to matter."""
    random = torch.Generator().manual_seed(seed)
    matrices = {
        id(weight) for module in model.modules() if isinstance(module, _PLAIN_WEIGHTS) for weight in [module.weight]
    }
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if id(parameter) in matrices:
                parameter.copy_(noise * _GAIN * parameter[0].numel() ** -0.5)
            else:  # norms, biases, scales, query rows: they keep the size that their model gave them
                parameter.add_(noise, alpha=_NOISE)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(torch.randn(buffer.shape, generator=random), alpha=_NOISE)
            elif name.endswith("running_var"):
                buffer.mul_(1 + torch.rand(buffer.shape, generator=random))


def make_tokenizer(vocabulary: int, special: Mapping[str, int]) -> Tokenizer:
    """Return a byte-level tokenizer whose ids are exactly 0 .. vocabulary - 1, with special tokens at given ids."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"unused{number}" for number in range(vocabulary))]
    by_id = {token_id: token for token, token_id in special.items()}
    tokens = iter(names)
    vocab = {by_id.get(number) or next(tokens): number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # Letters without spaces between them: prompts stay short.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
