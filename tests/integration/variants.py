"""Variants of the bundled models, made at test time: the same weights with other metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

BOOL, INTEGER, TEXT = (
    gguf.GGUFValueType.BOOL,
    gguf.GGUFValueType.UINT32,
    gguf.GGUFValueType.STRING,
)


def metadata(model: Path, key: str) -> Any:
    """One value of a GGUF file's metadata."""
    return gguf.GGUFReader(model).get_field(key).contents()


def variant(model: Path, target: Path, changed: dict[str, tuple[Any, Any]]) -> Path:
    """A copy of `model` at `target`; `changed` has a type and a value by metadata key."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(target, metadata(model, gguf.Keys.General.ARCHITECTURE))
    details = {key: MetadataDetails(kind, value) for key, (kind, value) in changed.items()}
    copy_with_new_metadata(reader, writer, details, [])
    return target
