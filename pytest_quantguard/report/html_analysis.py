"""An analysis of a prompt set as one HTML page with plots, in the form of the report of a run."""

from __future__ import annotations

import pytest_quantguard
from pytest_quantguard.prompts.analysis import Composition
from pytest_quantguard.report.html import page
from pytest_quantguard.report.html_prompts import Against, composition_parts


def render_analysis(analysis: Composition, against: Against | None = None) -> str:
    """The whole page. against: another set to show beside it."""
    heading = f"{analysis.name}: {analysis.total.prompts} prompts"
    origin = f"pytest-quantguard {pytest_quantguard.__version__}, quantguard analyze {analysis.name}"
    return page(f"Prompts: {analysis.name}", heading, composition_parts(analysis, against), origin)
