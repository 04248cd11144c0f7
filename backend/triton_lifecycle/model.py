"""What Triton loads: ``TritonPythonModel``, without logic."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # exists only inside Triton

from triton_lifecycle import config, heap, logs, plugins, schema
from triton_lifecycle.engine import open_engine
from triton_lifecycle.engine.device import pinned
from triton_lifecycle.errors import ConfigError
from triton_lifecycle.manager import Manager
from triton_lifecycle.tracing.target import tell_engine

log = logging.getLogger(__name__)


class TritonPythonModel:
    """One model instance, as Triton sees it."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:  # noqa: ANN401
        """Add every tensor of the contract, decoupled answers, and no batching by Triton."""
        return schema.complete(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model; raises with every problem named when it cannot."""
        try:
            self._manager = _manager(args)
            self._manager.start()
        except ConfigError as error:
            logs.close()
            raise pb_utils.TritonModelException(error.wire()) from error
        heap.settle()

    def execute(self, requests: list[Any]) -> None:
        """Take over the requests; answers go out through their response senders."""
        self._manager.submit(requests)

    def is_ready(self) -> bool:
        """Tell Triton whether requests would be served now; servers before this hook existed never ask."""
        return self._manager.fault() is None

    def finalize(self) -> None:
        """Drain within the configured limit, then stop."""
        self._manager.stop()
        logs.close()


def _manager(args: dict[str, str]) -> Manager:
    model_config = json.loads(args["model_config"])
    directory = Path(args["model_repository"])
    if directory.is_file():
        directory = directory.parent
    version = directory / args["model_version"]
    loaded = config.read(directory / config.FILE_NAME)
    lifecycle = loaded.config
    logs.configure(lifecycle.monitoring, pb_utils)
    plugins.look_in(version)
    log.info("configuration: %s", loaded.summary())
    parameters = {key: entry["string_value"] for key, entry in model_config.get("parameters", {}).items()}
    settings = _settings(version / "model.json")
    kind, number = args.get("model_instance_kind", ""), args.get("model_instance_device_id", "0")
    device = pinned(kind, number, settings, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    name = parameters.get("LIFECYCLE_ENGINE", "vllm")
    if name == "vllm":
        settings = tell_engine(lifecycle.monitoring, settings)
    engine = open_engine(name, settings, str(version))
    return Manager(
        lifecycle,
        engine,
        args["model_name"],
        args["model_version"],
        pb_utils,
        directory=directory,
        instance=args.get("model_instance_name", "0"),
        official_metrics=parameters.get("REPORT_CUSTOM_METRICS", "").lower() in {"true", "yes"},
    )


def _settings(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; it holds the engine's arguments as a JSON object") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return document
