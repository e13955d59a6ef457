"""Audio encoders of language models; a graph keeps the rows of padded sound and says which ones they are.

The models' own methods drop those rows, which gives an output whose size depends on data. The graphs return them all,
with `feature_mask`, and whoever puts the rows between the tokens drops them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn import functional
from transformers.masking_utils import create_bidirectional_mask

from mcpc.export.wrapper import Outputs, Wrapper


def flat(features: torch.Tensor, counts: torch.Tensor) -> Outputs:
    """Return [clips, rows, H] as [clips * rows, H], and the mask [clips * rows] of the first `counts` rows of each."""
    kept = torch.arange(features.shape[1], device=features.device) < counts[:, None]
    return features.flatten(0, 1), kept.to(torch.int64).flatten()


class Qwen2Audio(Wrapper):
    """Qwen2-Audio: a Whisper encoder with a mask, pooled by two, and a projector."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return features and their mask. Source: `Qwen2AudioModel.forward`."""
        model: Any = self.model.model
        features, shown = tensors["input_features"], tensors["feature_attention_mask"].sum(-1)
        after_convolution, after_pooling = model.audio_tower._get_feat_extract_output_lengths(shown)
        positions = (features.shape[2] - 2) // 2 + 1
        mask = (torch.arange(positions) < after_convolution[:, None]).to(torch.int64)
        mask = create_bidirectional_mask(
            config=model.audio_tower.config, attention_mask=mask,
            inputs_embeds=torch.zeros((features.shape[0], positions, 1), dtype=features.dtype),
        )  # fmt: skip
        hidden = model.audio_tower(features, attention_mask=mask).last_hidden_state
        return flat(model.multi_modal_projector(hidden), after_pooling)


class GlmAsr(Wrapper):
    """GLM-ASR: a Whisper-like encoder without a mask, four rows merged into one."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return features and their mask. Source: `GlmAsrModel.get_audio_features`."""
        model: Any = self.model.model
        features = tensors["input_features"]
        hidden = model.audio_tower(features, return_dict=True).last_hidden_state
        width = model.config.audio_config.intermediate_size
        rows = model.multi_modal_projector(hidden.reshape(features.shape[0], -1, width))
        frames = (tensors["input_features_mask"].sum(-1) - 1) // 2 + 1
        return flat(rows, (frames - 4) // 4 + 1)


class FunAsrNano(Wrapper):
    """Fun-ASR-Nano: encoder and projector under one mask; a row for each frame."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return features and their mask. Source: `FunAsrNanoModel.get_audio_features`."""
        model: Any = self.model.model
        mask = tensors["input_features_mask"]
        hidden = model.audio_tower(tensors["input_features"], mask, return_dict=True).last_hidden_state
        return model.multi_modal_projector(hidden, mask).flatten(0, 1), mask.flatten()


class Moss(Wrapper):
    """MOSS-Transcribe-Diarize: a Whisper encoder without a mask, rows merged after the frames of silence are cut."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return features and their mask. Source: `MossTranscribeDiarizeModel.get_audio_features`."""
        model: Any = self.model.model
        size = model.config.audio_merge_size
        hidden = model.audio_tower(tensors["input_features"], return_dict=True).last_hidden_state
        rows = hidden.shape[1] // size
        merged = hidden[:, : rows * size].reshape(hidden.shape[0], rows, size * hidden.shape[2])
        frames = (tensors["input_features_mask"].sum(-1) - 1) // 2 + 1
        return flat(model.multi_modal_projector(merged), (frames + size - 1) // size)


class OmniAsr(Wrapper):
    """OmniASR: a wav2vec 2.0 encoder over samples, with a mask, and a projection."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return features and their mask. Source: `OmniASRModel.get_audio_features`."""
        model: Any = self.model.model
        output = model.audio_tower(tensors["input_values"], padding_mask=tensors["padding_mask"], return_dict=True)
        rows = model.multi_modal_projector(output.last_hidden_state)
        return rows.flatten(0, 1), output.attention_mask.to(torch.int64).flatten()


class GraniteSpeech(Wrapper):
    """Granite Speech: a conformer over blocks and a query transformer over windows, at any number of frames.

    The models' own methods ask in Python whether the last block is full, which a trace would answer once and for all.
    """

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [clips * rows, H]. Source: `GraniteSpeechModel.get_audio_features`."""
        model: Any = self.model.model
        attentions = [layer.attn for layer in model.encoder.layers]
        with _forward_of(attentions, _block_attention), _forward_of([model.projector], _project_windows):
            return (model.get_audio_features(tensors["input_features"], return_dict=True).pooler_output.flatten(0, 1),)


class Qwen3Asr(Wrapper):
    """Qwen3-ASR: convolutions over chunks of fixed length, attention within windows of chunks.

    The model's own method packs the rows that are no padding; here every row stays, and a mask keeps rows of one
    window together and hides padding.
    """

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return features and their mask. Source: `Qwen3ASREncoder.forward`."""
        model: Any = self.model.model
        tower = model.audio_tower
        features, size = tensors["input_features"], 2 * tower.n_window
        clips, mel_bins, frames = features.shape
        chunks = (frames + size - 1) // size
        missing = chunks * size - frames
        features = functional.pad(features, (0, missing)).reshape(clips, mel_bins, chunks, size)
        hidden = features.permute(0, 2, 1, 3).reshape(-1, 1, mel_bins, size)
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            hidden = functional.gelu(convolution(hidden))
        hidden = tower.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))
        steps = hidden.shape[1]
        hidden = (hidden + tower.positional_embedding.positional_embedding[:steps]).reshape(clips, chunks * steps, -1)
        shown = functional.pad(tensors["input_features_mask"], (0, missing)).reshape(clips, chunks, size).sum(-1)
        valid = (torch.arange(steps) < tower._post_cnn_length(shown)[..., None]).flatten(1)
        row = torch.arange(chunks * steps)
        window = row // (steps * (tower.n_window_infer // size))
        # A row of padding sees itself, so that no row sees nothing.
        mask = (window[:, None] == window) & (valid[:, None, :] | (row[:, None] == row))
        with _forward_of([layer.self_attn for layer in tower.layers], _masked_attention):
            for layer in tower.layers:
                hidden = layer(hidden, mask[:, None])[0]
        return model.multi_modal_projector(tower.ln_post(hidden)).flatten(0, 1), valid.to(torch.int64).flatten()


@contextlib.contextmanager
def _forward_of(modules: Sequence[Any], function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Put `function(module, ...)` in the place of the modules' forward for the length of the block."""
    for module in modules:
        module.forward = functools.partial(function, module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _masked_attention(module: Any, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return attention under a mask [clips, 1, rows, rows], which takes the place of the ends of packed sequences."""
    shape = (*hidden_states.shape[:2], module.num_heads, module.head_dim)
    query, key, value = (
        projection(hidden_states).view(shape).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=cu_seqlens, scale=module.scaling)
    return cast(torch.Tensor, module.out_proj(out.transpose(1, 2).flatten(2)))


def _block_attention(module: Any, hidden_states: torch.Tensor, attention_dists: torch.Tensor) -> torch.Tensor:
    """Return attention within blocks; the end of the last one is hidden. Source: `GraniteSpeechConformerAttention`."""
    hidden = module.pre_norm(hidden_states)
    clips, frames, _ = hidden.shape
    size = module.context_size
    blocks = (frames + size - 1) // size
    hidden = functional.pad(hidden, (0, 0, 0, blocks * size - frames))
    query, key, value = (
        part.reshape(clips * blocks, size, module.num_heads, module.dim_head).transpose(1, 2)
        for part in (module.to_q(hidden), *module.to_kv(hidden).chunk(2, dim=-1))
    )
    scores = torch.einsum("bhcd,crd->bhcr", query, module.rel_pos_emb(attention_dists)) * module.scale
    shown = (torch.arange(blocks * size) < frames).reshape(blocks, 1, 1, size).repeat(clips, 1, 1, 1)
    scores = torch.where(shown, scores, torch.finfo(scores.dtype).min)
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=scores, scale=module.scale)
    out = out.transpose(1, 2).reshape(clips, blocks * size, -1)[:, :frames]
    return cast(torch.Tensor, module.to_out(out))


def _project_windows(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the rows that queries make of each window. Source: `GraniteSpeechEncoderProjector`."""
    clips, frames, width = hidden_states.shape
    windows = (frames + module.window_size - 1) // module.window_size
    hidden = functional.pad(hidden_states, (0, 0, 0, windows * module.window_size - frames))
    hidden = hidden.reshape(clips * windows, module.window_size, width)
    queries = module.query.expand(clips * windows, -1, -1)
    out = module.qformer(query_embeds=queries, encoder_hidden_states=hidden, return_dict=True).last_hidden_state
    return cast(torch.Tensor, module.linear(out.reshape(clips, windows * module.num_queries, -1)))
