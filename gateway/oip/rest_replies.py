"""What REST tells of the server and its models, for the description alone: bodies are built by hand
(`rest_models.py`)."""

from typing import Literal

from pydantic import BaseModel

from gateway.openai.replies import Count, Told


class InferenceErrorReply(Told):
    error: str


class ServerReply(Told):
    name: str
    version: str
    extensions: list[str]


class LiveReply(Told):
    live: Literal[True]


class ReadyReply(Told):
    ready: bool


class ModelReadyReply(Told):
    name: str
    ready: bool


class TensorReply(Told):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadataReply(Told):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorReply]
    outputs: list[TensorReply]


class OutputConfig(Told):
    name: str
    data_type: str
    dims: list[int]


class InputConfig(OutputConfig):
    optional: bool


class LatestVersions(Told):
    num_versions: Count


class VersionPolicy(Told):
    latest: LatestVersions


class DynamicBatching(Told):
    priority_levels: Count
    default_priority_level: Count


class ParameterConfig(Told):
    string_value: str


class TransactionPolicy(Told):
    decoupled: Literal[True]


class ModelConfigReply(Told):
    name: str
    platform: str
    backend: str
    version_policy: VersionPolicy
    max_batch_size: Count
    input: list[InputConfig]
    output: list[OutputConfig]
    dynamic_batching: DynamicBatching
    parameters: dict[str, ParameterConfig]
    model_transaction_policy: TransactionPolicy


class DurationReply(Told):
    count: Count
    ns: Count


class ComputedReply(Told):
    compute_input: DurationReply
    compute_infer: DurationReply
    compute_output: DurationReply


class InferenceStatistics(ComputedReply):
    success: DurationReply
    fail: DurationReply
    queue: DurationReply


class BatchStatistics(ComputedReply):
    batch_size: Count


class ModelStatisticsReply(Told):
    name: str
    version: str
    last_inference: Count
    inference_count: Count
    execution_count: Count
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]


class StatisticsReply(Told):
    model_stats: list[ModelStatisticsReply]


class IndexEntryReply(Told):
    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: str


REPLIES: tuple[type[BaseModel], ...] = (
    InferenceErrorReply,
    ServerReply,
    LiveReply,
    ReadyReply,
    ModelReadyReply,
    ModelMetadataReply,
    ModelConfigReply,
    StatisticsReply,
    IndexEntryReply,
)
