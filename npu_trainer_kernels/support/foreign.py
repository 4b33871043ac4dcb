"""Names of other projects that are no public API, or that differ from version to version."""

from __future__ import annotations

__all__ = ["CACHES"]

CACHES = ("cache", "past_key_values", "cache_params")
"""The arguments and outputs by which models of transformers take and return their cache: `cache` since 5.24; before,
`cache_params` in models with states alone, and `past_key_values` in all others."""
