"""What a service makes of a configuration and an environment, read as it reads them itself."""

import dataclasses
import importlib
import re
import tempfile
from collections.abc import Mapping
from typing import Any

from chassis.service import ChassisConfig, _configure

MODULES = {name: name for name in ("gateway", "batcher", "kvstore", "shard_worker")}
MODULES["autoscale"] = "shoal.autoscale"
CONFIGS: dict[str, Any] = {
    section: importlib.import_module(f"{module}.config").Config for section, module in MODULES.items()
}
# read by other hands than a service's configuration
OTHERS = {"SHOAL_NATS_URL", "SHOAL_NATIVE_DIR", "OTEL_EXPORTER_OTLP_ENDPOINT"}


def config_of_toml(section: str, toml: str, env: Mapping[str, str]) -> tuple[ChassisConfig, Any]:
    """Raises ConfigError."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(toml)
        file.flush()
        return _configure(section, CONFIGS[section], ["--config", file.name], env)


def unknown_settings(section: str, env: Mapping[str, str]) -> list[str]:
    """Names like ours that this service would not read, or would refuse."""
    known = set(OTHERS)
    for name, config in (("chassis", ChassisConfig), (section, CONFIGS[section])):
        known |= {f"SHOAL_{name}_{field.name}".upper() for field in dataclasses.fields(config)}
    return [name for name in env if re.match("SHOAL_|OTEL_", name) and name not in known]
