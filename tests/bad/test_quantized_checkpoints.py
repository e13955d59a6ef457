"""Quantized sources: FP8 is dequantized exactly, symmetric four bits stay, others are refused by name and size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

pytest.importorskip("torch")
import tiny_checkpoints as tiny
from tiny_checkpoints import SINGLE

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.quantized import BlockScale
from mcpc.core.progress import Silent
from mcpc.core.runner import Array
from mcpc.errors import BadInputError, UnsupportedError, UsageError
from mcpc.export.state import float32_tensor
from mcpc.package import Package
from mcpc.storage.safetensors import read_header
from mcpc.workflows.convert import convert

BLOCK = (16, 24)
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}


def quantized(weight: Array, block: tuple[int, int], scale_dtype: Any = np.float32) -> tuple[Array, Array]:
    """Return FP8 values and the scale of each block, as DeepSeek stores them."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    values = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((rows, columns), scale_dtype)
    for row in range(rows):
        for column in range(columns):
            place = np.s_[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            scales[row, column] = np.abs(weight[place]).max() / 448
            values[place] = (weight[place] / np.float32(scales[row, column])).astype(ml_dtypes.float8_e4m3fn)
    return values, scales


def multiplied_out(values: Array, scales: Array, block: tuple[int, int]) -> Array:
    """Return values times scales, one element at a time, each product rounded once to float32."""
    result = np.zeros(values.shape, np.float32)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            scale = float(scales[row // block[0], column // block[1]])
            result[row, column] = np.float32(float(values[row, column]) * scale)  # a float64 product is exact here
    return result


def fp8_llava(root: Path) -> Path:
    """Write a LLaVA whose language model has FP8 Linear weights."""
    tiny.llava(root)

    def change(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if "language_model" in name and name.endswith("proj.weight")]:
            arrays[name], arrays[f"{name}_scale_inv"] = quantized(arrays[name], BLOCK)

    tiny.edit_arrays(root / SINGLE, change)
    tiny.edit_json(root / "config.json", quantization_config=FP8_CONFIG)
    return root


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_llava(tmp_path_factory.mktemp("fp8") / "llava")


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
def test_blocks_of_128_and_what_is_left_of_them(scale_dtype: Any, tmp_path: Path) -> None:
    """Two and a half blocks by one and a half, both sides bit-equal to the products."""
    weight = np.random.default_rng(0).normal(0, 0.05, (320, 200)).astype(np.float32)
    values, scales = quantized(weight, (128, 128), scale_dtype)
    tiny.write_arrays(tmp_path / SINGLE, {"x.weight": values, "x.weight_scale_inv": scales})
    entries = read_header(tmp_path / SINGLE)
    scale = BlockScale(entries["x.weight_scale_inv"], (128, 128))
    expected = multiplied_out(values, scales, (128, 128))
    pieces = np.concatenate(list(scale.dequantized(entries["x.weight"])))
    np.testing.assert_array_equal(pieces, expected)
    checkpoint = Checkpoint(tmp_path, {}, (SINGLE,), {"x.weight": entries["x.weight"]}, scales={"x.weight": scale})
    np.testing.assert_array_equal(float32_tensor(checkpoint, "x.weight").numpy(), expected)
    assert np.abs(expected - weight).max() < 0.02  # and it is the weight


def test_fp8_converts_and_is_checked(fp8: Path, tmp_path: Path) -> None:
    """The package holds the exact float32 products, and equals PyTorch."""
    report = convert(fp8, tmp_path / "package", progress=Silent())
    assert report.checked == "executed"
    (note,) = [note for note in report.data["notes"] if "FP8" in note]
    assert note == "14 FP8 matrices are dequantized by their block scales"
    package = Package.open(tmp_path / "package")
    decoder = package.manifest.component("decoder")
    source = {item.source_name: item.transform for item in decoder.initializers.values()}
    stored = {name: entry for path in (package.root / "weights").iterdir() for name, entry in read_header(path).items()}
    original = tiny.arrays_of(fp8 / SINGLE)
    scaled = [name for name in original if name.endswith("_scale_inv")]
    assert len(scaled) == 14
    for scale in scaled:
        name = scale.removesuffix("_scale_inv")
        assert source[name] == "fp8-block-dequantize"
        expected = multiplied_out(original[name], original[scale], BLOCK)
        np.testing.assert_array_equal(stored[name].read(), expected)
    assert package.manifest.model.source.files == (SINGLE,)


def test_fp8_weights_cannot_stay_where_they_are(fp8: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="referenced weights stay as they are"):
        convert(fp8, tmp_path / "package", weights="reference", verify="none", progress=Silent())


def damaged(fp8: Path, tmp_path: Path, change: Any) -> str:
    root = tmp_path / "llava"
    shutil.copytree(fp8, root)
    tiny.edit_arrays(root / SINGLE, change)
    with pytest.raises(BadInputError) as caught:
        convert(root, tmp_path / "package", verify="none", progress=Silent())
    return " | ".join([str(caught.value), *map(str, caught.value.problems)])


def test_scales_that_do_not_fit(fp8: Path, tmp_path: Path) -> None:
    """A matrix without a scale, a scale without a matrix, a scale of another shape: all at once."""
    names = sorted(name for name in tiny.arrays_of(fp8 / SINGLE) if name.endswith("proj.weight_scale_inv"))

    def change(arrays: dict[str, Any]) -> None:
        arrays.pop(names[0])
        arrays.pop(names[1].removesuffix("_scale_inv"))
        arrays[names[2]] = arrays[names[2]][:, :1].copy()

    text = damaged(fp8, tmp_path, change)
    first = names[0].removesuffix("_scale_inv")
    assert f"{first}: an FP8 matrix without its scale (expected {names[0]}, got no such tensor)" in text
    assert f"{names[1]}: a scale without its FP8 matrix" in text
    assert f"{names[2]}: the scale does not fit its matrix" in text


def test_non_finite_fp8(fp8: Path, tmp_path: Path) -> None:
    """NaN in FP8 values and infinity in scales are named."""
    names = sorted(name for name in tiny.arrays_of(fp8 / SINGLE) if name.endswith("proj.weight_scale_inv"))
    weight = names[0].removesuffix("_scale_inv")

    def change(arrays: dict[str, Any]) -> None:
        arrays[weight].view(np.uint8)[0, 0] = 0x7F  # NaN
        arrays[names[1]][0, 0] = np.inf

    text = damaged(fp8, tmp_path, change)
    assert f"{weight}: 1 non-finite values" in text
    assert f"{names[1]}: 1 non-finite values" in text


def test_fp8_without_a_config(fp8: Path, tmp_path: Path) -> None:
    root = tmp_path / "llava"
    shutil.copytree(fp8, root)
    tiny.edit_json(root / "config.json", quantization_config=None)
    with pytest.raises(BadInputError, match=r"config\.json has no quantization_config"):
        Checkpoint.open(root)


GROUP = 32


def word(codes: list[int]) -> int:
    """Return eight codes in one int32, the first in the lowest nibble."""
    value = sum(code << (4 * place) for place, code in enumerate(codes))
    return value - (1 << 32) if value >= 1 << 31 else value


def four_bits(weight: Array) -> tuple[Array, Array]:
    """Return codes 0..15 [K,N] and float16 scales [K / group, N] of a weight [N,K]."""
    by_depth = weight.T
    groups = by_depth.reshape(-1, GROUP, by_depth.shape[1])
    scales = (np.abs(groups).max(axis=1) / 7).astype(np.float16)
    codes = np.rint(groups / scales[:, None].astype(np.float32)).clip(-8, 7).astype(int) + 8
    return codes.reshape(by_depth.shape), scales


def gptq(arrays: dict[str, Any], name: str, weight: Array) -> None:
    """Pack as AutoGPTQ does: eight k in a word, zero points stored less one."""
    base, (codes, scales) = name.removesuffix(".weight"), four_bits(weight)
    depth, columns = codes.shape
    packed = [[word(list(codes[8 * row : 8 * row + 8, n])) for n in range(columns)] for row in range(depth // 8)]
    arrays[f"{base}.qweight"] = np.array(packed, np.int32)
    arrays[f"{base}.qzeros"] = np.full((len(scales), columns // 8), word([7] * 8), np.int32)
    arrays[f"{base}.scales"] = scales
    arrays[f"{base}.g_idx"] = (np.arange(depth) // GROUP).astype(np.int32)


def awq(arrays: dict[str, Any], name: str, weight: Array) -> None:
    """Pack as AutoAWQ does: eight n in a word, in the order 0 2 4 6 1 3 5 7."""
    base, (codes, scales) = name.removesuffix(".weight"), four_bits(weight)
    depth, columns = codes.shape
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = [[word([codes[k, 8 * c + n] for n in order]) for c in range(columns // 8)] for k in range(depth)]
    arrays[f"{base}.qweight"] = np.array(packed, np.int32)
    arrays[f"{base}.qzeros"] = np.full((len(scales), columns // 8), word([8] * 8), np.int32)
    arrays[f"{base}.scales"] = scales


FOUR_BITS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": False}),
}


def four_bit_llava(root: Path, method: str) -> tuple[Path, dict[str, Array]]:
    """Write a LLaVA with a packed language model; return it and {module: the matrix [N,K] that the codes mean}."""
    tiny.llava(root, intermediate_size=96)
    pack, settings = FOUR_BITS[method]
    meant = {}

    def change(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if "language_model" in name and name.endswith("proj.weight")]:
            weight = arrays.pop(name)
            codes, scales = four_bits(weight)
            values = (codes - 8).astype(np.float32) * np.repeat(scales.astype(np.float32), GROUP, axis=0)
            meant[name.removesuffix(".weight")] = values.T
            pack(arrays, name, weight)

    tiny.edit_arrays(root / SINGLE, change)
    tiny.edit_json(root / "config.json", quantization_config=settings)
    return root, meant


@pytest.mark.parametrize("method", FOUR_BITS)
def test_four_bits_stay_four_bits(method: str, tmp_path: Path) -> None:
    """Codes and scales are carried over as they are, in the canonical form, and the package equals PyTorch."""
    root, meant = four_bit_llava(tmp_path / "llava", method)
    checkpoint = Checkpoint.open(root)
    report = convert(root, tmp_path / "package", progress=Silent())
    assert report.checked == "executed"
    assert report.data["notes"] == ["14 matrices stay in four bits"]
    for component in report.data["verification"]["components"]:
        assert max(item["max_abs"] for item in component["outputs"].values()) < 1e-4  # it is the same matrix
    package = Package.open(tmp_path / "package")
    decoder = package.manifest.component("decoder")
    assert decoder.precision.weights["int4"] == sum(matrix.size for matrix in meant.values())
    graph = onnx.load(package.root / decoder.file, load_external_data=False).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    wide = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert len(wide) == len(meant) == 14
    for node in wide:
        codes, scales = (external(package.root, tensors[name]) for name in node.input)
        key = decoder.initializers[node.input[0]]
        module = key.source_name.removesuffix(".qweight")
        assert key.transform == "int4.block"
        assert decoder.initializers[node.input[1]].transform == "int4.block.scale"
        depth, columns = tensors[node.input[0]].dims
        nibbles = np.stack([codes & 15, codes >> 4], axis=1).reshape(depth, columns).astype(int)
        signed = np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.float32)
        values = signed * np.repeat(scales.view(np.float32).reshape(-1, columns), GROUP, axis=0)
        np.testing.assert_array_equal(values.T, meant[module])
        np.testing.assert_array_equal(float32_tensor(checkpoint, key.source_name).numpy(), meant[module])
    stored = sum(path.stat().st_size for path in (package.root / "weights").iterdir())
    assert stored < 1.2 * (root / SINGLE).stat().st_size


def external(root: Path, tensor: onnx.TensorProto) -> Array:
    """Return the bytes of an external tensor."""
    place = {item.key: item.value for item in tensor.external_data}
    return np.fromfile(root / place["location"], np.uint8, int(place["length"]), offset=int(place["offset"]))


def asymmetric(arrays: dict[str, Any], base: str) -> None:
    arrays[f"{base}.qzeros"][0, 0] += 1


def reordered(arrays: dict[str, Any], base: str) -> None:
    order = arrays[f"{base}.g_idx"]
    arrays[f"{base}.g_idx"] = order[::-1].copy() if order[-1] else 1 - order


def without_scales(arrays: dict[str, Any], base: str) -> None:
    arrays.pop(f"{base}.scales")


def one_group(arrays: dict[str, Any], base: str) -> None:
    arrays[f"{base}.scales"] = arrays[f"{base}.scales"][:1].copy()


LAYOUTS = {
    "asymmetric": (asymmetric, "its zero points are not symmetric (expected all 8, got others)"),
    "act-order": (reordered, "K is reordered (desc_act)"),
    "no-scales": (without_scales, "its scales or zero points are missing"),
    "group-of-96": (one_group, "a group size that runtimes do not take (expected 32 or 64 or 128, got 96)"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_that_do_not_stay_in_four_bits(layout: str, tmp_path: Path) -> None:
    """Exit 4, with the matrix, the reason, and the bytes that the weights would have in 16 bits."""
    root, _ = four_bit_llava(tmp_path / "llava", "gptq")
    change, words = LAYOUTS[layout]
    base = next(
        name.removesuffix(".qweight") for name in tiny.arrays_of(root / SINGLE) if name.endswith("down_proj.qweight")
    )
    tiny.edit_arrays(root / SINGLE, lambda arrays: change(arrays, base))
    with pytest.raises(UnsupportedError) as caught:
        convert(root, tmp_path / "package", verify="none", progress=Silent())
    assert f"quantized by gptq, in a layout that does not stay in four bits: {base}.qweight: {words}" in str(
        caught.value
    )
    assert "in 16 bits they would be" in str(caught.value)


def eight_bit_gptq(arrays: dict[str, Any], name: str, weight: Array) -> None:
    base, (rows, columns) = name.removesuffix(".weight"), weight.shape
    arrays[f"{base}.qweight"] = np.zeros((columns // 4, rows), np.int32)
    arrays[f"{base}.qzeros"] = np.zeros((1, rows // 4), np.int32)
    arrays[f"{base}.scales"] = np.ones((1, rows), np.float16)
    arrays[f"{base}.g_idx"] = np.zeros(columns, np.int32)


def bitsandbytes(arrays: dict[str, Any], name: str, weight: Array) -> None:
    arrays[name] = np.zeros((weight.size // 2, 1), np.uint8)
    arrays[f"{name}.absmax"] = np.zeros(weight.size // 64 + 1, np.uint8)
    arrays[f"{name}.quant_map"] = np.zeros(16, np.float32)
    arrays[f"{name}.quant_state.bitsandbytes__nf4"] = np.zeros(200, np.uint8)


def compressed(arrays: dict[str, Any], name: str, weight: Array) -> None:
    base, (rows, columns) = name.removesuffix(".weight"), weight.shape
    arrays[f"{base}.weight_packed"] = np.zeros((rows, columns // 8), np.int32)
    arrays[f"{base}.weight_scale"] = np.zeros((rows, 1), np.float16)
    arrays[f"{base}.weight_shape"] = np.array([rows, columns], np.int64)


METHODS = {
    "gptq": (eight_bit_gptq, {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True}),
    "bitsandbytes": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "compressed-tensors": (
        compressed,
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_are_refused_early(method: str, tmp_path: Path) -> None:
    """Exit 4 before anything is built: the method, and the bytes that the weights would have in 16 bits."""
    root = tiny.llava(tmp_path / "llava")
    pack, settings = METHODS[method]
    elements = sum(array.size for array in tiny.arrays_of(root / SINGLE).values())

    def change(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if "language_model" in name and name.endswith("proj.weight")]:
            pack(arrays, name, arrays.pop(name))

    tiny.edit_arrays(root / SINGLE, change)
    tiny.edit_json(root / "config.json", quantization_config=settings)
    with pytest.raises(UnsupportedError) as caught:
        convert(root, tmp_path / "package", verify="none", progress=Silent())
    error = caught.value
    assert f"quantized by {method}, which mcpc does not read" in str(error)
    assert f"in 16 bits they would be {2 * elements:,} bytes" in str(error)
    assert error.details == {"method": method, "widened_bytes": 2 * elements}
    assert "mcpc quantize" in error.hint
    assert not (tmp_path / "package").exists()
