"""JSON from files and peers, parsed with a `ValueError` in plain words for everything that Python can't hold."""

from __future__ import annotations

import json
import sys
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return what JSON text holds. Raises ValueError: json.JSONDecodeError where the text is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deep to be read") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        digits = sys.get_int_max_str_digits()
        raise ValueError(f"an integer has more than {digits:,} digits; write it as a string") from None
