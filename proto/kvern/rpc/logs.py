"""Logs of all services: one line a record, for eyes or as JSON. Records of events carry their values as fields."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

LEVELS = ("debug", "info", "warning", "error")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-level", type=str.lower, default="info", choices=LEVELS)
    parser.add_argument(
        "--log-format", default="text", choices=("text", "json"), help="json: one object a line, to stderr"
    )


def configure(arguments: argparse.Namespace) -> None:
    """As :func:`add_flags` was told."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if arguments.log_format == "json" else Text())
    logging.basicConfig(level=arguments.log_level.upper(), handlers=[handler])


def event(log: logging.Logger, name: str, /, **fields: Any) -> None:
    """An INFO record. Fields are numbers, short strings, or lists of them; never text of a prompt."""
    log.info(name, extra={"fields": fields})


class Text(logging.Formatter):
    """``time LEVEL logger: message key=value …``"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        words = [f"{key}={_word(value)}" for key, value in getattr(record, "fields", {}).items()]
        return " ".join([super().formatMessage(record), *words])


class Json(logging.Formatter):
    """``time`` in Unix seconds, ``level``, ``logger``, ``message``, and the fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        value = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            value["exception"] = self.formatException(record.exc_info)
        return json.dumps(value)


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if (
        isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and value
        and not set(' "=') & set(value)
    ):
        return value
    return json.dumps(value, separators=(",", ":"))
