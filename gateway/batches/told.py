"""Pure. Files and batches as OpenAI's clients read them."""

from typing import Any

from chassis.messages.batches import Batch, StoredFile

WINDOW = "24h"


def file_told(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_told(batch: Batch) -> dict[str, Any]:
    tally = batch.tally
    told: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": None,
        "input_file_id": batch.input_file_id,
        "completion_window": WINDOW,
        "status": batch.state.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": {"total": batch.total, "completed": tally.completed, "failed": tally.failed},
        "metadata": batch.metadata,
        "usage": {
            "input_tokens": tally.input_tokens,
            "input_tokens_details": {"cached_tokens": tally.cached_tokens},
            "output_tokens": tally.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tally.input_tokens + tally.output_tokens,
        },
    }
    if batch.problems:
        told["errors"] = {
            "object": "list",
            "data": [
                {"code": p.code, "message": p.message, "param": p.param, "line": p.line}
                for p in batch.problems
            ],
        }
    return told


def page_told(entries: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": entries,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
        "has_more": has_more,
    }
