"""Pure. What REST tells of the server and its models, as JSON: names and nesting are Triton's."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from chassis.messages.open_inference_models import IndexEntry, ModelDescription, ServerDescription, type_name
from chassis.messages.statistics import Computed, ModelStatistics
from gateway.oip.asking import VERSION


def server_body(server: ServerDescription) -> dict[str, Any]:
    return {"name": server.name, "version": server.version, "extensions": list(server.extensions)}


def metadata_body(model: ModelDescription) -> dict[str, Any]:
    return {
        "name": model.name,
        "versions": [model.version],
        "platform": model.platform,
        "inputs": [asdict(tensor) for tensor in model.inputs],
        "outputs": [asdict(tensor) for tensor in model.outputs],
    }


def config_body(model: ModelDescription) -> dict[str, Any]:
    return {
        "name": model.name,
        "platform": model.platform,
        "backend": model.platform,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [
            {"name": t.name, "data_type": type_name(t.datatype), "dims": list(t.shape), "optional": i > 0}
            for i, t in enumerate(model.inputs)
        ],
        "output": [
            {"name": t.name, "data_type": type_name(t.datatype), "dims": list(t.shape)} for t in model.outputs
        ],
        "dynamic_batching": {
            "priority_levels": model.priority_levels,
            "default_priority_level": model.default_priority_level,
        },
        "parameters": {key: {"string_value": value} for key, value in model.parameters},
        "model_transaction_policy": {"decoupled": True},
    }


def index_body(entries: Sequence[IndexEntry]) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in entries]


def statistics_body(models: Sequence[ModelStatistics]) -> dict[str, Any]:
    return {"model_stats": [_statistics(s) for s in models]}


def _statistics(s: ModelStatistics) -> dict[str, Any]:
    return {
        "name": s.model,
        "version": VERSION,
        "last_inference": s.last_inference_ms,
        "inference_count": s.inference_count,
        "execution_count": s.execution_count,
        "inference_stats": {
            "success": asdict(s.success),
            "fail": asdict(s.fail),
            "queue": asdict(s.queue),
            **_parts(s.computed),
        },
        "batch_stats": [{"batch_size": size, **_parts(c)} for size, c in s.batch_stats.items()],
    }


def _parts(computed: Computed) -> dict[str, Any]:
    return {name: asdict(duration) for name, duration in computed._asdict().items()}
