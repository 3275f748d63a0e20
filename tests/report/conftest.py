"""The project folder with a gate over toy servers, for tests of whole runs."""

from tests.plugin.conftest import captured, project, recorded

__all__ = ["captured", "project", "recorded"]
