"""The ONNX-Multimodal package: manifest types, opening, and the atomic writer."""

from mcpc.package.manifest import Manifest
from mcpc.package.package import Package
from mcpc.package.writer import PackageWriter, package_writer

__all__ = ["Manifest", "Package", "PackageWriter", "package_writer"]
