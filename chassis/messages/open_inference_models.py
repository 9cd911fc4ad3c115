"""What the Open Inference Protocol tells of a server and its models: `proto/open_inference.proto`."""

from collections.abc import Sequence
from dataclasses import dataclass

from chassis.messages import parse
from chassis.messages.statistics import Computed, Duration, ModelStatistics
from chassis.wire import model_config_pb2 as config_pb
from chassis.wire import open_inference_pb2 as pb

_TYPES = {"BYTES": "TYPE_STRING"}


@dataclass(frozen=True, slots=True)
class TensorShape:
    """-1: any number."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerDescription:
    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """`parameters` are facts of the model. Inputs but the first are optional."""

    name: str
    version: str
    platform: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    parameters: tuple[tuple[str, str], ...]
    priority_levels: int
    default_priority_level: int


@dataclass(frozen=True, slots=True)
class IndexEntry:
    name: str
    version: str
    state: str  # READY, UNAVAILABLE
    reason: str = ""


def parse_empty(data: bytes) -> None:
    """A request without fields. Raises BadMessage."""
    parse(pb.ServerLiveRequest, data)


def parse_model(data: bytes) -> tuple[str, str]:
    """Name and version that a request about a model names. Raises BadMessage."""
    m = parse(pb.ModelMetadataRequest, data)  # those of all have the same fields
    return m.name, m.version


def parse_index(data: bytes) -> tuple[str, bool]:
    """Of which repository, and whether those alone that are ready. Raises BadMessage."""
    m = parse(pb.RepositoryIndexRequest, data)
    return m.repository_name, m.ready


def parse_load(data: bytes) -> tuple[str, str, tuple[str, ...]]:
    """Repository, model, names of parameters; to load or to unload. Raises BadMessage."""
    m = parse(pb.RepositoryModelLoadRequest, data)
    return m.repository_name, m.model_name, tuple(sorted(m.parameters))


def parse_settings(data: bytes) -> bool:
    """Whether any is to be set. Raises BadMessage."""
    return bool(parse(pb.TraceSettingRequest, data).settings)


def parse_log_settings(data: bytes) -> bool:
    """The same of logs."""
    return bool(parse(pb.LogSettingsRequest, data).settings)


def build_live() -> bytes:
    return pb.ServerLiveResponse(live=True).SerializeToString()


def build_ready(ready: bool) -> bytes:
    """Of the server or a model."""
    return pb.ServerReadyResponse(ready=ready).SerializeToString()


def build_server(server: ServerDescription) -> bytes:
    return pb.ServerMetadataResponse(
        name=server.name, version=server.version, extensions=server.extensions
    ).SerializeToString()


def build_metadata(model: ModelDescription) -> bytes:
    def told(tensors: Sequence[TensorShape]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
        kind = pb.ModelMetadataResponse.TensorMetadata
        return [kind(name=t.name, datatype=t.datatype, shape=t.shape) for t in tensors]

    return pb.ModelMetadataResponse(
        name=model.name,
        versions=[model.version],
        platform=model.platform,
        inputs=told(model.inputs),
        outputs=told(model.outputs),
    ).SerializeToString()


def build_config(model: ModelDescription) -> bytes:
    inputs = [
        config_pb.ModelInput(name=t.name, data_type=_type(t.datatype), dims=t.shape, optional=i > 0)
        for i, t in enumerate(model.inputs)
    ]
    outputs = [
        config_pb.ModelOutput(name=t.name, data_type=_type(t.datatype), dims=t.shape) for t in model.outputs
    ]
    config = config_pb.ModelConfig(
        name=model.name,
        platform=model.platform,
        backend=model.platform,
        version_policy=config_pb.ModelVersionPolicy(
            latest=config_pb.ModelVersionPolicy.Latest(num_versions=1)
        ),
        input=inputs,
        output=outputs,
        dynamic_batching=config_pb.ModelDynamicBatching(
            priority_levels=model.priority_levels, default_priority_level=model.default_priority_level
        ),
        parameters={key: config_pb.ModelParameter(string_value=value) for key, value in model.parameters},
        model_transaction_policy=config_pb.ModelTransactionPolicy(decoupled=True),
    )
    return pb.ModelConfigResponse(config=config).SerializeToString()


def _type(datatype: str) -> config_pb.DataType:
    kind: config_pb.DataType = getattr(config_pb, _TYPES.get(datatype, f"TYPE_{datatype}"))
    return kind


def type_name(datatype: str) -> str:
    """As a model's configuration says it."""
    return _TYPES.get(datatype, f"TYPE_{datatype}")


def build_model_statistics(models: Sequence[ModelStatistics], version: str) -> bytes:
    """`models` are sums over batchers."""
    return pb.ModelStatisticsResponse(
        model_stats=[_statistics(s, version) for s in models]
    ).SerializeToString()


def _statistics(s: ModelStatistics, version: str) -> pb.ModelStatistics:
    return pb.ModelStatistics(
        name=s.model,
        version=version,
        last_inference=s.last_inference_ms,
        inference_count=s.inference_count,
        execution_count=s.execution_count,
        inference_stats=pb.InferStatistics(
            success=_duration(s.success),
            fail=_duration(s.fail),
            queue=_duration(s.queue),
            **_parts(s.computed),
        ),
        batch_stats=[
            pb.InferBatchStatistics(batch_size=size, **_parts(computed))
            for size, computed in s.batch_stats.items()
        ],
    )


def _parts(computed: Computed) -> dict[str, pb.StatisticDuration]:
    return {name: _duration(duration) for name, duration in computed._asdict().items()}


def _duration(d: Duration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=d.count, ns=min(d.ns, (1 << 64) - 1))


def build_index(entries: Sequence[IndexEntry]) -> bytes:
    kind = pb.RepositoryIndexResponse.ModelIndex
    return pb.RepositoryIndexResponse(
        models=[kind(name=e.name, version=e.version, state=e.state, reason=e.reason) for e in entries]
    ).SerializeToString()


def build_nothing() -> bytes:
    """An answer without fields, or with none to tell."""
    return b""
