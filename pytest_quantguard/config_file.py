"""Reads the YAML file of a gate: inheritance, environment variables, relative paths, errors with place.

What the values mean is in `config.py`. All that is wrong with a file is reported at once, each with file,
line, key path, value, and what is allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pytest_quantguard.config import GateConfig
from pytest_quantguard.errors import ConfigError

KeyPath = tuple[str | int, ...]

VARIABLE = re.compile(r"\$(\$)?\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
"""`${NAME}`, `${NAME:-default}`; `$${NAME}` stands for itself."""

PATH_KEYS: tuple[KeyPath, ...] = (
    ("baseline",),
    ("suite", "prompts"),
    ("generation", "prompts"),
    ("generation", "tokenizer"),
    ("reference", "cwd"),
    ("candidate", "cwd"),
    ("reference", "model_path"),
    ("candidate", "model_path"),
    ("reference", "tokenizer_path"),
    ("candidate", "tokenizer_path"),
)
"""Values that may be relative to the file that holds them."""

HIDDEN_KEYS = {"api_key"}
PLAIN_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
LARGEST_INTEGER = 2**63 - 1
UNUSABLE = re.compile("[\0\ud800-\udfff]")
MOST_NODES = 100_000
MOST_LEVELS = 50


def load_config(path: Path) -> GateConfig:
    """Read, merge and check one file. Raises `ConfigError` with everything that is wrong with it."""
    document = _read_with_parents(path.absolute(), shown=path, chain=())
    try:
        return GateConfig.model_validate(document.data)
    except ValidationError as error:
        problems = _problems(error, document)
    raise ConfigError(_report(path, problems))


def load_configs(paths: Iterable[Path]) -> list[GateConfig]:
    """Read several files; raises `ConfigError` also where two of them have the same name."""
    seen: dict[str, Path] = {}
    configs = []
    for path in paths:
        config = load_config(path)
        if config.name in seen:
            raise ConfigError(
                f"Two configs are named '{config.name}': {seen[config.name]} and {path}. The name "
                "identifies the tests and the output folder, so each config needs its own `name`."
            )
        seen[config.name] = path
        configs.append(config)
    return configs


# Reading


@dataclass
class _Document:
    """Plain data, and where each key stands ("file:line")."""

    data: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str | None:
        """The place of the key, or of the nearest one around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return None


def _read_with_parents(path: Path, *, shown: Path, chain: tuple[Path, ...]) -> _Document:
    """The document at `path`, merged over those it extends."""
    resolved = path.resolve()
    if resolved in chain:
        circle = " -> ".join(str(link) for link in (*chain, resolved))
        raise ConfigError(f"{shown}: `extends` goes in a circle: {circle}.")
    document = _read(path, shown)
    extends = document.data.pop("extends", [])
    parents = [extends] if isinstance(extends, str) else extends
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        place = document.place(("extends",))
        raise ConfigError(f"{place}: extends is {extends!r}; allowed is a file name or a list of file names.")
    merged = _Document({})
    for parent in parents:
        parent_path = path.parent / parent
        if not parent_path.is_file():
            raise ConfigError(
                f"{document.place(('extends',))}: extends {parent!r}, but there is no file {parent_path}."
            )
        _merge(merged, _read_with_parents(parent_path, shown=Path(parent), chain=(*chain, resolved)))
    _merge(merged, document)
    return merged


def _read(path: Path, shown: Path) -> _Document:
    """One file as plain data; variables replaced, paths made absolute."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{shown}: there is no such config file (looked for {path}).") from None
    except IsADirectoryError:
        raise ConfigError(f"{shown}: this is a folder; a config is a YAML file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}.") from None
    reader = _YamlReader(text, shown)
    data = reader.read()
    if reader.problems:
        raise ConfigError(_report(shown, reader.problems))
    if not isinstance(data, dict):
        raise ConfigError(
            f"{shown}: the file must hold keys and values (name: ..., candidate: ...), not {_kind(data)}."
        )
    _make_absolute(data, path.parent)
    return _Document(data, reader.places)


class _YamlReader:
    """Builds plain data from YAML nodes, so that lines are known and duplicate keys are seen."""

    def __init__(self, text: str, shown: Path) -> None:
        self._loader = yaml.SafeLoader(text)
        self._shown = shown
        self._nodes = 0
        self.places: dict[KeyPath, str] = {}
        self.problems: list[str] = []

    def read(self) -> object:
        """The document's data; what is wrong is in `problems`."""
        try:
            node = self._loader.get_single_node()
            return None if node is None else self._build(node, (), ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = ", ".join(str(part) for part in (error.context, error.problem) if part)
            hint = (
                ' A value with ${...} inside { } must be quoted: "${NAME}".'
                if "expected ',' or '}'" in what
                else ""
            )
            self.problems.append(f"{self._at(mark)}: not valid YAML: {what}.{hint}")
        except yaml.YAMLError as error:
            self.problems.append(f"{self._shown}: not valid YAML: {error}.")
        except RecursionError:  # of the YAML library, before `_build` counts
            self.problems.append(f"{self._shown}: values are nested too deeply.")
        finally:
            self._loader.dispose()
        return {}

    def _at(self, mark: Any) -> str:
        return f"{self._shown}:{mark.line + 1}" if mark is not None else str(self._shown)

    def _build(self, node: yaml.nodes.Node, path: KeyPath, above: tuple[int, ...]) -> object:
        """Data of `node`; `above`: the ids of the nodes around it, to see an alias that contains itself."""
        self._nodes += 1
        if self._nodes > MOST_NODES or id(node) in above:
            raise yaml.MarkedYAMLError(
                problem="an alias contains itself or repeats too much", problem_mark=node.start_mark
            )
        if len(above) > MOST_LEVELS:
            raise yaml.MarkedYAMLError(problem="values are nested too deeply", problem_mark=node.start_mark)
        self.places.setdefault(path, self._at(node.start_mark))
        if not isinstance(node, yaml.ScalarNode) and node.tag not in PLAIN_COLLECTIONS:
            raise yaml.MarkedYAMLError(
                problem=f"the tag {node.tag!r} is not allowed", problem_mark=node.start_mark
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, (*above, id(node)))
        if isinstance(node, yaml.SequenceNode):
            return [
                self._build(child, (*path, index), (*above, id(node)))
                for index, child in enumerate(node.value)
            ]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, above: tuple[int, ...]) -> dict[str, object]:
        self._note_duplicates(node, path)
        self._loader.flatten_mapping(node)
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = self._loader.construct_object(key_node)
            if not isinstance(key, str | int | float | bool):
                self.problems.append(
                    f"{self._at(key_node.start_mark)}: {_dotted(path)}: a key must be plain text."
                )
                continue
            name = key if isinstance(key, str) else key_node.value
            inner: KeyPath = (*path, name)
            self.places[inner] = self._at(key_node.start_mark)
            mapping[name] = self._build(value_node, inner, above)
        return mapping

    def _note_duplicates(self, node: yaml.MappingNode, path: KeyPath) -> None:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in lines:
                first = lines[key_node.value]
                self.problems.append(
                    f"{self._at(key_node.start_mark)}: {_dotted((*path, key_node.value))}: this key is "
                    f"given twice; the first is in line {first}."
                )
            lines.setdefault(key_node.value, line)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        text = str(node.value)
        if not VARIABLE.search(text):
            return self._value(node, path)
        replaced = VARIABLE.sub(lambda match: self._variable(match, node, path), text)
        if node.style is not None:
            return replaced
        tag = self._loader.resolve(yaml.ScalarNode, replaced, (True, False))  # type: ignore[no-untyped-call]
        return self._value(yaml.ScalarNode(tag, replaced, node.start_mark, node.end_mark), path)

    def _value(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        """What a scalar stands for; what no result file could hold is a problem."""
        try:
            value: object = self._loader.construct_object(node)
        except ValueError as error:  # A day that does not exist, a number of thousands of digits.
            self._refuse(node, path, f"{str(node.value)[:40]!r} cannot be read ({error})")
            return None
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            self._refuse(node, path, "the number is too large")
        elif isinstance(value, str) and UNUSABLE.search(value):
            self._refuse(node, path, "the text holds a NUL or half of a surrogate pair")
        return value

    def _refuse(self, node: yaml.Node, path: KeyPath, why: str) -> None:
        self.problems.append(f"{self._at(node.start_mark)}: {_dotted(path)}: {why}.")

    def _variable(self, match: re.Match[str], node: yaml.ScalarNode, path: KeyPath) -> str:
        if match[1]:
            return match[0][1:]
        name, default = match["name"], match["default"]
        value = os.environ.get(name)
        if value:
            return value
        if default is not None:
            return default
        if value is None:
            self.problems.append(
                f"{self._at(node.start_mark)}: {_dotted(path)}: the environment variable {name} is not set. "
                f"Set it, or write a default: ${{{name}:-default}}."
            )
        return ""


def _make_absolute(data: dict[str, Any], folder: Path) -> None:
    """Resolve the paths of `PATH_KEYS` in place.

    `model_path` may also be a name on a model hub: it is a path where it begins with '.', '~' or '/'.
    """
    for path in PATH_KEYS:
        parents, key = path[:-1], path[-1]
        section: object = data
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        value = section.get(key) if isinstance(section, dict) else None
        if (
            not isinstance(section, dict)
            or not isinstance(value, str)
            or (key, value) == ("prompts", "builtin")
            or (key == "baseline" and "://" in value)
        ):
            continue
        if key in ("model_path", "tokenizer_path") and not value.startswith((".", "~", "/")):
            continue
        section[key] = os.path.normpath(folder / Path(value).expanduser())
    speed = data.get("speed")
    scenarios = speed.get("scenarios") if isinstance(speed, dict) else None
    for scenario in scenarios if isinstance(scenarios, list) else []:
        if isinstance(scenario, dict) and isinstance(scenario.get("file"), str):
            scenario["file"] = os.path.normpath(folder / Path(scenario["file"]).expanduser())


def _merge(base: _Document, over: _Document) -> None:
    """Lay `over` on `base`: mappings merge, everything else is replaced.

    A server section of another backend replaces the whole section: the keys of one do not fit the other.
    """
    base.data = _merged(base.data, over.data)
    base.places |= over.places


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        other_backend = (
            isinstance(old, dict)
            and isinstance(value, dict)
            and value.get("backend", old.get("backend")) != old.get("backend")
        )
        if isinstance(old, dict) and isinstance(value, dict) and not other_backend:
            result[key] = _merged(old, value)
        else:
            result[key] = value
    return result


# Reporting


def _report(path: Path, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{path}: {len(problems)} things are wrong:\n" + "\n".join(f"  {problem}" for problem in problems)


def _problems(error: ValidationError, document: _Document) -> list[str]:
    """One line per wrong key; the alternatives of a union are joined into one."""
    grouped: dict[tuple[KeyPath, str], list[str]] = {}
    for details in error.errors(include_url=False):
        for path, value, text in _explain(details, document):
            texts = grouped.setdefault((path, value), [])
            if text not in texts:
                texts.append(text)
    lines = []
    for (path, value), texts in grouped.items():
        place = document.place(path)
        lines.append(f"{place + ': ' if place else ''}{_dotted(path)}{value}: {'; or '.join(texts)}")
    return lines


def _explain(details: ErrorDetails, document: _Document) -> Iterable[tuple[KeyPath, str, str]]:
    """(key path, " is <value>" or "", what is wrong) of one error of pydantic."""
    path, value = _real_path(details["loc"], document.data)
    context = details.get("ctx") or {}
    if "server_args" in path[1:-1]:
        yield (
            path,
            "",
            "should be true, false, null, a number, text, a list of numbers and texts, or a mapping",
        )
        return
    match details["type"]:
        case "missing":
            yield path, "", "this key is required" + _context_hint(path)
        case "extra_forbidden":
            allowed = _allowed_keys(path[:-1], document.data)
            yield path, "", _unknown_key(str(path[-1]), allowed)
        case "unknown_keys":
            for key in context["keys"]:
                yield (*path, key), "", _unknown_key(key, context["allowed"])
        case "literal_error" | "union_tag_invalid":
            expected = context.get("expected") or context.get("expected_tags") or ""
            named = re.findall(r"'([^']*)'", str(expected))
            at = (*path, "backend") if details["type"] == "union_tag_invalid" else path
            found = context.get("tag", value)
            yield at, f" is {found!r}", f"allowed: {', '.join(named) or expected}" + _nearest(found, named)
        case "union_tag_not_found":
            yield (*path, "backend"), "", "this key is required: sglang, emulator or attach"
        case _:
            message = details["msg"].removeprefix("Value error, ")
            message = message.replace("Input should be", "should be").replace(
                "valid dictionary", "mapping of keys"
            )
            yield path, _shown_value(path, value), message


def _context_hint(path: KeyPath) -> str:
    hints = {"version": ": version: 1", "baseline": ": the folder of the stored baseline"}
    return hints.get(str(path[0]), "") if len(path) == 1 else ""


def _real_path(location: Sequence[str | int], data: object) -> tuple[KeyPath, object]:
    """The location in the file: without the names of union members that pydantic inserts."""
    path: list[str | int] = []
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(data, dict):
            if part in data:
                data = data[part]
            elif not last or part in (data.get("kind"), data.get("backend")):
                continue
            else:
                data = None
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            break
        path.append(part)
    return tuple(path), data


def _allowed_keys(path: KeyPath, data: object) -> list[str]:
    """Keys of the model that stands at `path`."""
    annotation: object = GateConfig
    for part in path:
        models = _models_in(annotation, data)
        data = (
            data.get(part)
            if isinstance(data, dict)
            else data[part]
            if isinstance(data, list) and isinstance(part, int)
            else None
        )
        if isinstance(part, int):
            continue
        fields = (model.model_fields[part].annotation for model in models if part in model.model_fields)
        annotation = next(fields, annotation if _is_mapping(annotation) else None)
    found = _models_in(annotation, data)
    own = ["extends"] if not path else []
    return [*(key for model in found for key in model.model_fields), *own]


def _is_mapping(annotation: object) -> bool:
    """Whether any name may stand there, as those of tasks may."""
    return get_origin(annotation) is dict or any(map(_is_mapping, get_args(annotation)))


def _models_in(annotation: object, data: object) -> list[type[BaseModel]]:
    """The models that an annotation names; of several backends, the one that the data chooses."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = [model for argument in get_args(annotation) for model in _models_in(argument, data)]
    backend = data.get("backend") if isinstance(data, dict) else None
    chosen = [
        model
        for model in found
        if "backend" in model.model_fields and backend in get_args(model.model_fields["backend"].annotation)
    ]
    return chosen or found


def _unknown_key(key: str, allowed: Sequence[str]) -> str:
    return f"unknown key{_nearest(key, allowed)} Allowed here: {', '.join(allowed) or 'nothing'}."


def _nearest(value: object, allowed: Sequence[str]) -> str:
    close = get_close_matches(str(value), allowed, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else "."


def _shown_value(path: KeyPath, value: object) -> str:
    if isinstance(value, dict | list) or (path and path[-1] in HIDDEN_KEYS) or "env" in path:
        return ""
    if isinstance(value, str) and re.search(r"://.*[@?]", value):
        return ""  # It may hold a key.
    return f" is {value!r}"


def _dotted(path: KeyPath) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(the whole file)"


def _kind(data: object) -> str:
    return "nothing" if data is None else f"a {type(data).__name__}"
