"""A config as it is written into recordings: paths relative to the config's folder, the same on every
machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from pytest_quantguard.config import AttachServer, GateConfig, ServerConfig


def portable(config: GateConfig, folder: Path) -> GateConfig:
    """`config` with the paths of suite and models relative to `folder`."""
    suite, base = config.suite, folder.absolute()
    if suite.prompts != "builtin":
        suite = suite.model_copy(update={"prompts": os.path.relpath(suite.prompts, base)})
    return config.model_copy(
        update={
            "suite": suite,
            "reference": config.reference and portable_server(config.reference, base),
            "candidate": portable_server(config.candidate, base),
        }
    )


def portable_server(server: ServerConfig, folder: Path) -> ServerConfig:
    """`server` with its model's path, if it is one, relative to `folder`."""
    if isinstance(server, AttachServer) or not Path(server.model_path).is_absolute():
        return server
    return server.model_copy(update={"model_path": os.path.relpath(server.model_path, folder.absolute())})
