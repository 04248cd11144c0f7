"""Logs: one line per record on standard error, as JSON or text. Triton writes its own there too.

No prompt and no output text is ever logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from triton_lifecycle.config import Monitoring

ROOT = "triton_lifecycle"


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, and the error if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure(settings: Monitoring) -> None:
    """Set up this package's loggers; other libraries' loggers are left alone."""
    logger = logging.getLogger(ROOT)
    logger.handlers.clear()
    logger.propagate = False
    if not (settings.enabled and settings.logging_enabled):
        logger.addHandler(logging.NullHandler())
        return
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else text)
    logger.addHandler(handler)
    logger.setLevel(settings.log_level.upper())
