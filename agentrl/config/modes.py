"""Whether the index that a recipe names can be searched as the recipe asks: by its manifest.json, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError

__all__ = ["require_mode"]


def require_mode(recipe: Recipe) -> None:
    """Refuse a retriever.mode that retriever.index has not. A manifest that cannot be read is the retriever's to complain about.

    Raises:
        ConfigError: naming the modes that the index has.
    """
    retriever = recipe.retriever
    if retriever is None or retriever.index is None or retriever.mode is None:
        return
    try:
        manifest = json.loads((Path(retriever.index) / "manifest.json").read_text(encoding="utf-8"))
        dense, bm25 = manifest["dense"] is not None, manifest["bm25"] is not None
    except (OSError, ValueError, KeyError, TypeError):
        return
    modes = ["dense"] * dense + ["bm25"] * bm25 + ["hybrid"] * (dense and bm25)
    if retriever.mode not in modes:
        remedy = "" if bm25 else ", or build the index with --bm25"
        raise ConfigError(f"retriever.mode {retriever.mode}: {retriever.index} can be searched by {', '.join(modes)} alone. Ask for that{remedy}")
