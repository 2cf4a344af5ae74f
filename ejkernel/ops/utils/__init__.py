"""Fingerprints, labels, serialisation and parameter classes."""

from .fingerprint import (
    abstractify,
    default_key_builder_with_sharding,
    device_fingerprint,
    device_kind,
    get_device_platform,
    sharding_fingerprint,
    short_hash,
    stable_json,
)
from .meta import (
    LABEL_PREFIXES,
    LABEL_RE,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    label,
    labels_to_configs,
)
from .params import BwdParams, FwdParams
from .serialize import from_json, to_json

__all__ = [
    "LABEL_PREFIXES",
    "LABEL_RE",
    "BwdParams",
    "FwdParams",
    "abstractify",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "from_json",
    "get_device_platform",
    "label",
    "labels_to_configs",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
    "to_json",
]
