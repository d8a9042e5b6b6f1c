"""Parse a YAML document: expand `${ENV}`, refuse duplicate keys, and keep the path of every key.

Used by `fleet.fleet_file`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ballast.core.errors import ConfigError

_VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(:-(.*))?", re.DOTALL)


def key_path(parts: tuple[str | int, ...]) -> str:
    """``('models', 2, 'slo', 'ttft') -> 'models[2].slo.ttft'``."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_document(text: str, environ: Mapping[str, str], source: str) -> Any:
    """Plain Python values of one YAML document.

    `${NAME}` and `${NAME:-default}` in scalars are replaced from `environ` (the default also
    stands in for an empty variable); `$${` is a literal `${`. An unquoted scalar is given its type
    after expansion, so `priority: ${PRIORITY}` is a number; a quoted one stays a string.

    Raises ConfigError: `source` is not YAML, a key appears twice, a variable is not set.
    """
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        for path, node in _scalars(root, ()):
            _expand(node, path, environ, loader)
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(source, _where(error), "the file must be one YAML document") from error
    except (
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:  # PyYAML on a bad date, number ...
        raise ConfigError(source, str(error), "the file must be one YAML document") from error
    finally:
        if loader is not None:
            loader.dispose()


def _scalars(
    node: yaml.Node, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], yaml.ScalarNode]]:
    """Values (not keys), in document order."""
    if isinstance(node, yaml.ScalarNode):
        yield path, node
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _scalars(item, (*path, index))
    elif isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen and name != "<<":
                line = key.start_mark.line + 1
                raise ConfigError(
                    key_path((*path, name)), f"line {line}", "the key appears twice; keep one"
                )
            seen.add(name)
            yield from _scalars(value, (*path, name))


def _expand(
    node: yaml.ScalarNode,
    path: tuple[str | int, ...],
    environ: Mapping[str, str],
    loader: yaml.SafeLoader,
) -> None:
    if "${" not in node.value:
        return

    def value_of(match: re.Match[str]) -> str:
        if match[1] is None:
            return "${"
        parts = _NAME.fullmatch(match[1])
        if parts is None:
            raise ConfigError(key_path(path), match[0], "write ${NAME} or ${NAME:-default}")
        value = environ.get(parts[1], "")
        if value or (parts[2] is None and parts[1] in environ):
            return value
        if parts[2] is None:
            raise ConfigError(
                key_path(path),
                match[0],
                f"set the environment variable {parts[1]}, or write ${{{parts[1]}:-default}}",
            )
        return parts[3]

    node.value = _VARIABLE.sub(value_of, node.value)
    if node.style is None:
        resolve: Any = loader.resolve
        node.tag = resolve(yaml.ScalarNode, node.value, (True, False))


def _where(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return str(error)
