"""The config as JSON Schema, for the completion and checks of editors.

Editors see one file, while a file that extends another need not be whole: what is required, it requires only
where nothing is extended. Values like `${NAME}` are the reader's business and may be marked by an editor.
"""

from __future__ import annotations

from typing import Any

from pytest_quantguard.config import GateConfig
from pytest_quantguard.generation.metrics import GENERATION_METRICS
from pytest_quantguard.logprobs.metrics import METRICS
from pytest_quantguard.stats.figures import FIGURES

SERVERS = ("reference", "candidate")


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the file."""
    schema = GateConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "pytest-quantguard config"
    _name_bounded_keys(schema["$defs"])
    _explain_keys(schema["$defs"])
    schema["properties"]["extends"] = {
        "description": "File or files, relative to this one, whose values this one refines.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "default": [],
    }
    _allow_parts(schema)
    return schema


def _name_bounded_keys(sections: dict[str, Any]) -> None:
    """List metrics or figures as keys of the sections that take them."""
    for name, section in sections.items():
        value = section.get("additionalProperties")
        if isinstance(value, dict) and value.get("$ref") in ("#/$defs/Bound", "#/$defs/DriftBound"):
            timed = name.startswith("Speed")
            known = FIGURES if timed else METRICS
            named = {key: {**value, "description": item.description} for key, item in known.items()}
            section["properties"] = section.get("properties", {}) | named
            section["additionalProperties"] = value if timed else False  # figures have second names


def _explain_keys(sections: dict[str, Any]) -> None:
    """Say of bounds on generated answers what they bound, and of a section's kind that it is its kind."""
    for section in sections.values():
        for key, value in section.get("properties", {}).items():
            if key in GENERATION_METRICS:
                value.setdefault("description", GENERATION_METRICS[key].description)
            if "const" in value:
                value.setdefault("description", "Says which kind of section this is.")


def _allow_parts(schema: dict[str, Any]) -> None:
    """Ask for required keys only where the file extends nothing."""
    schema["if"] = {"not": {"required": ["extends"]}}
    schema["then"] = {
        "required": schema.pop("required"),
        "properties": {key: {"if": {"type": "object"}, "then": {"required": ["backend"]}} for key in SERVERS},
    }
    part = {"type": "object", "not": {"required": ["backend"]}, "description": "Refines the extended server."}
    for key in SERVERS:
        server = schema["properties"][key]
        whole = {name: server.pop(name) for name in ("oneOf", "discriminator") if name in server}
        server["anyOf"] = [*([whole] if whole else []), *server.get("anyOf", []), part]
