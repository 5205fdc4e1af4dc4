"""Parse JSON and YAML from files and other processes, within bounds.

Invariant: input that would exhaust time or memory (integers of thousands of digits, brackets nested thousands deep,
aliases of aliases) raises the parser's usual error, with a message for users.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 10x faster, if libyaml is installed
SAFE_LOAD = partial(yaml.load, Loader=LOADER)
MAX_ALIASED_VALUES = 100_000
"""Maximum number of values that the aliases of a YAML document may expand to."""
NESTED = "brackets are nested too deeply"


class TooManyAliases(yaml.YAMLError):
    """A YAML document whose aliases expand to too many values."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text. Raises ValueError, or its subclass json.JSONDecodeError if the text is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(NESTED) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise ValueError(_plainly(error)) from None


def parse_yaml(text: str, create: Callable[[str], Any] = SAFE_LOAD) -> Any:
    """Parse a YAML document with `create`. Raises yaml.YAMLError, and the errors of `create`."""
    try:
        node = yaml.compose(text, Loader=LOADER)
        sizes: dict[int, int] = {}
        if node is not None and _size(node, sizes) - len(sizes) > MAX_ALIASED_VALUES:
            raise TooManyAliases(f"its aliases (*name) expand to more than {MAX_ALIASED_VALUES:,} values; remove them")
        return create(text)
    except RecursionError:
        raise yaml.YAMLError(NESTED) from None
    except yaml.YAMLError as error:
        if "maximum nesting depth" in str(error):  # libyaml's own
            raise yaml.YAMLError(NESTED) from None
        raise
    except ValueError as error:  # of a number or a date; OmegaConf's own errors may be ValueErrors too
        if type(error) is not ValueError:
            raise
        raise yaml.YAMLError(_plainly(error)) from None


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of nodes with all aliases expanded. RecursionError for an alias inside itself."""
    if id(node) not in sizes:
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        inner = parts if isinstance(node, yaml.CollectionNode) else []
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in inner)
    return sizes[id(node)]


def _plainly(error: ValueError) -> str:
    if "int_max_str_digits" not in str(error):
        return str(error)
    return f"an integer has more than {sys.get_int_max_str_digits():,} digits; write it as a string"
