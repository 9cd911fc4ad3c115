"""What is told of files and batches, for the description alone: bodies are built by hand (`told.py`)."""

from typing import Literal

from pydantic import BaseModel

from gateway.openai.replies import Count, Told


class FileReply(Told):
    id: str
    object: Literal["file"]
    bytes: Count
    created_at: Count
    expires_at: Count
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileDeletedReply(Told):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchProblem(Told):
    """`line` counts from 1."""

    code: str
    message: str
    param: str | None
    line: Count | None


class BatchProblems(Told):
    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(Told):
    total: Count
    completed: Count
    failed: Count


class InputTokensDetails(Told):
    cached_tokens: Count


class OutputTokensDetails(Told):
    reasoning_tokens: Count


class BatchUsage(Told):
    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class BatchReply(Told):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchProblems | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: Count
    in_progress_at: Count | None
    expires_at: Count
    finalizing_at: Count | None
    completed_at: Count | None
    failed_at: Count | None
    expired_at: Count | None
    cancelling_at: Count | None
    cancelled_at: Count | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    usage: BatchUsage


class ListReply(Told):
    """A page."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileListReply(ListReply):
    data: list[FileReply]


class BatchListReply(ListReply):
    data: list[BatchReply]


REPLIES: tuple[type[BaseModel], ...] = (
    FileReply,
    FileListReply,
    FileDeletedReply,
    BatchReply,
    BatchListReply,
)
