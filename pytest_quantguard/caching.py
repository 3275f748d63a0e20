"""Where this package keeps what it fetched: models and remote baselines."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$QUANTGUARD_CACHE, or the user's cache folder of this platform."""
    override = os.environ.get("QUANTGUARD_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("pytest-quantguard", appauthor=False)
