"""The reference of the config as Markdown, made from the same JSON Schema that editors get.

`docs/configuration.md` is its output; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_quantguard.logprobs.metrics import METRICS, Metric
from pytest_quantguard.stats.figures import FIGURES, Figure

Schema = Mapping[str, Any]

HEAD = """\
# Config reference

Made from the package by `quantguard schema --markdown`; do not edit. `quantguard schema CONFIG` checks a
file, `quantguard schema` prints the JSON Schema, which is also in [config.schema.json](config.schema.json).
For completion in editors that use the YAML language server, begin a config with

```yaml
# yaml-language-server: $schema=path/to/config.schema.json
```

Every key that is not listed is an error. Environment variables are written `${NAME}` or `${NAME:-default}`,
and `$${NAME}` stands for itself. Relative paths are relative to the file that holds them. `extends:
base.yaml` (or a list) takes the values of other files first: mappings are merged, everything else is
replaced, and a server with another `backend` replaces the whole section.
"""
BOUNDS = {"Bound": "a bound", "DriftBound": "a drift bound"}
"""Models that stand wherever a metric or figure does; described once."""
WHICH_SIDE = "Where lower is better a bound gives `max`, else `min`.\n\n"
LONGEST = 5
"""Alternatives of a value that are listed; more are "any value"."""


def render_reference(schema: Schema) -> str:
    """The whole page, from what `config_schema.json_schema` returns."""
    parts = [HEAD]
    for title, section in _sections(schema):
        parts.append(f"\n## {title}\n\n{_text(section)}{_table(section, schema['$defs'])}")
    for name, title in BOUNDS.items():
        section = schema["$defs"][name]
        parts.append(f"\n## {title.capitalize()}\n\n{_text(section)}{_table(section, schema['$defs'])}")
    parts.append(f"\n## Metrics\n\nFormulas are in [metrics.md](metrics.md). {WHICH_SIDE}{_named(METRICS)}")
    parts.append(f"\n## Figures of speed\n\n{WHICH_SIDE}{_named(FIGURES)}")
    return "".join(parts)


def _sections(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """(title, schema) of every model with keys, in the order in which the file meets them.

    Several keys of one section that take the same model share its entry.
    """
    yield "The file", schema
    seen: set[str] = set()
    queue = list(_inner("", schema))
    while queue:
        name, path = queue.pop(0)
        section = schema["$defs"][name]
        if name in seen or name in BOUNDS or "properties" not in section:
            continue
        seen.add(name)
        chosen = _discriminator(section)
        yield f"{path} with `{chosen}`" if chosen else path, section
        queue = [*_inner(path.split(",")[0].strip("`") + ".", section), *queue]


def _inner(prefix: str, section: Schema) -> Iterator[tuple[str, str]]:
    """(model, the keys of `section` that take it) for each model that its keys refer to."""
    keys: dict[str, list[str]] = {}
    for key, value in _own(section).items():
        for name in dict.fromkeys(_references(value)):
            keys.setdefault(name, []).append(f"`{prefix}{key}`")
    for name, paths in keys.items():
        yield name, ", ".join(paths)


def _references(value: Any) -> Iterator[str]:
    """Names of the definitions that a schema refers to, at any depth."""
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"].rsplit("/", 1)[-1]
        for key, item in value.items():
            if key not in ("discriminator", "default"):
                yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _discriminator(section: Schema) -> str | None:
    """The key and value by which this section is chosen among others."""
    for key in ("backend", "kind"):
        value = section["properties"].get(key, {})
        if "const" in value:
            return f"{key}: {value['const']}"
    return None


def _own(section: Schema) -> dict[str, Schema]:
    """The keys of a section without the metrics or figures that it also takes."""
    return {
        key: value
        for key, value in section["properties"].items()
        if key not in METRICS and key not in FIGURES
    }


def _text(section: Schema) -> str:
    """The description, and that metrics are keys too."""
    text = " ".join(str(section.get("description", "")).split())
    for known, named in ((METRICS, "[metrics](#metrics)"), (FIGURES, "[figures](#figures-of-speed)")):
        taken = [value for key, value in section["properties"].items() if key in known]
        if taken:
            text += f" Takes any of the {named} as a key, with {_type(taken[0], {})}."
    return f"{text}\n\n" if text else ""


def _table(section: Schema, definitions: Mapping[str, Schema]) -> str:
    keys = _own(section)
    if not keys:
        return ""
    required = section.get("required", section.get("then", {}).get("required", ()))
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, value in keys.items():
        meaning = " ".join(str(value.get("description", "")).split())
        default = "**required**" if key in required else _default(value)
        cells = (f"`{key}`", _type(value, definitions), default, meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _default(value: Schema) -> str:
    if "default" not in value:
        return "empty"
    default = value["default"]
    if default is None:
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, Mapping):
        return _short_mapping(default)
    if isinstance(default, list):
        mappings = any(isinstance(item, Mapping) for item in default)
        return "see below" if mappings else f"`[{', '.join(map(str, default))}]`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _short_mapping(default: Mapping[str, Any]) -> str:
    """A default bound or increase as one writes it; whole sections are described elsewhere."""
    given = {key: item for key, item in default.items() if item is not None}
    if set(given) == {"amount", "relative"}:
        return f"`{given['amount'] * 100:g}%`" if given["relative"] else f"`{given['amount']:g}`"
    if set(given) in ({"max"}, {"min"}):
        return "`{" + ", ".join(f"{key}: {item}" for key, item in given.items()) + "}`"
    return "its defaults" if given else "empty"


def _type(value: Schema, definitions: Mapping[str, Schema]) -> str:
    """What may stand there, in words."""
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[-1]
        return _named_type(name, definitions)
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{item}`" for item in value["enum"])
    for several in ("anyOf", "oneOf"):
        if several in value:
            kinds = [_type(item, definitions) for item in value[several] if "not" not in item]
            if len(kinds) > LONGEST:
                return "any value"
            return " or ".join(dict.fromkeys(kinds))
    kind = value.get("type")
    if kind == "array":
        if "prefixItems" in value:
            return f"[{', '.join(_type(item, definitions) for item in value['prefixItems'])}]"
        return f"list of {_type(value.get('items', {}), definitions)}"
    if kind == "object":
        inner = value.get("additionalProperties")
        return f"mapping to {_type(inner, definitions)}" if isinstance(inner, Mapping) else "mapping"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    return words.get(str(kind), "null" if kind == "null" else "any") + _range(value)


def _named_type(name: str, definitions: Mapping[str, Schema]) -> str:
    section = definitions.get(name, {})
    if name in BOUNDS:
        return f"[{BOUNDS[name]}](#{BOUNDS[name].replace(' ', '-')})"
    if name == "Increase":
        return "share such as `10%`, or number"
    if "properties" not in section:
        return _type(section, definitions) if section else "mapping"
    chosen = _discriminator(section)
    return f"mapping with `{chosen}`" if chosen else "mapping"


def _range(value: Schema) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {value[key]:.10g}" for key, sign in signs.items() if key in value]
    return f" {', '.join(limits)}" if limits else ""


def _named(known: Mapping[str, Metric] | Mapping[str, Figure]) -> str:
    """The table of metrics, or of figures."""
    rows = ["| key | better | unit | meaning |", "|---|---|---|---|"]
    for name, item in known.items():
        meaning = " ".join(item.description.split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {item.better} | {item.unit} | {meaning} |")
    return "\n".join(rows) + "\n"
