"""Pure. The subjects of files and batches, built here and nowhere else; tokens are as those of jobs.

    shoal.file.<tenant>.<file id>      what a file is; there once all of its pieces are
    shoal.piece.<place>                its pieces, in order
    shoal.batch.<tenant>.<batch id>    the last record of a batch
    shoal.drive.<tenant>.<batch id>    a batch that is not over, with its first record

A batch's jobs are those of the queue of its name, with the number of the request in its file as key.
"""

from chassis.job_subjects import JobName, tenant_token
from chassis.subjects import encoded

ID_LEN_MAX = 64


def is_id(text: str) -> bool:
    """May be a file's or a batch's id: safe as a token as it is."""
    return 0 < len(text) <= ID_LEN_MAX and encoded(text) == text


def file(tenant: str, file_id: str) -> str:
    assert is_id(file_id), file_id
    return f"shoal.file.{tenant_token(tenant)}.{file_id}"


def files(tenant: str) -> str:
    return f"shoal.file.{tenant_token(tenant)}.*"


def pieces(place: str) -> str:
    assert is_id(place), place
    return f"shoal.piece.{place}"


def batch(tenant: str, batch_id: str) -> str:
    assert is_id(batch_id), batch_id
    return f"shoal.batch.{tenant_token(tenant)}.{batch_id}"


def batches(tenant: str) -> str:
    return f"shoal.batch.{tenant_token(tenant)}.*"


def drive(tenant: str, batch_id: str) -> str:
    assert is_id(batch_id), batch_id
    return f"shoal.drive.{tenant_token(tenant)}.{batch_id}"


def job_name(tenant: str, batch_id: str, index: int) -> JobName:
    return JobName(tenant, batch_id, str(index))
