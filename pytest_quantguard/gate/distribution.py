"""How xdist spreads tests when gates are among them. Imported only when xdist runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class GateScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """One unit of work per gate; every other test is a unit of its own.

    Tests of the user that use a gate's server carry the gate's name behind an "@", as xdist's own groups do.
    """

    def __init__(self, config: pytest.Config, log: Any, gates: Sequence[str]) -> None:
        super().__init__(config, log)
        self._gates = frozenset(gates)

    def _split_scope(self, nodeid: str) -> str:
        for name in (nodeid.split("::", 1)[0], nodeid.rsplit("@", 1)[-1]):
            if name in self._gates:
                return name
        return nodeid
