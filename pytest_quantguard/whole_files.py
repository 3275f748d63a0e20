"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

TEMPORARY = ".tmp-"
"""How names of files begin that are not whole yet; one that is left is of a writer that was killed."""


def replace_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file in place of an older one; makes its folder. A reader sees the old file or the new one.

    durable: only once the content is on the disk, so that a power failure leaves one of the two as well.
    Raises OSError; the old file stays then, and nothing else is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.chmod(0o644)  # mkstemp makes files private; these are shared like any other.
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
