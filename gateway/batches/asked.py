"""Pure. What a caller asks of files and batches, checked; the description at /openapi.json is made of it.

Fields that are not known are ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from chassis.batch_layout import FILE_AGE_MAX_S
from gateway.openai.errors import BadField, bad_field
from gateway.openai.schema import WHOLE, Given

FILE_AGE_MIN_S = 3600
METADATA_LEN_MAX = 16
METADATA_KEY_LEN_MAX = 64
METADATA_VALUE_LEN_MAX = 512
FILES_PAGE_MAX = 10_000
BATCHES_PAGE_MAX = 100
BATCHES_PAGE = 20


def _decimal(value: Any) -> Any:
    """A number in a query or a form."""
    good = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10
    return int(value) if good else value


DECIMAL = BeforeValidator(_decimal)
AgeS = Annotated[int, Field(ge=FILE_AGE_MIN_S, le=FILE_AGE_MAX_S)]
MetadataKey = Annotated[str, Field(min_length=1, max_length=METADATA_KEY_LEN_MAX)]
MetadataValue = Annotated[str, Field(max_length=METADATA_VALUE_LEN_MAX)]


class ExpiresAfter(Given):
    anchor: Literal["created_at"]
    seconds: Annotated[AgeS, WHOLE]


class BatchRequest(Given):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(min_length=1)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=METADATA_LEN_MAX)] | None = None
    output_expires_after: ExpiresAfter | None = None


class PageQuery(Given):
    """Of a list; it begins behind `after`."""

    after: str = ""
    limit: Annotated[int, Field(ge=1, le=BATCHES_PAGE_MAX), DECIMAL] = BATCHES_PAGE
    order: Literal["asc", "desc"] = "desc"


class BatchesQuery(PageQuery):
    """GET /v1/batches."""


class FilesQuery(PageQuery):
    """GET /v1/files."""

    limit: Annotated[int, Field(ge=1, le=FILES_PAGE_MAX), DECIMAL] = FILES_PAGE_MAX
    purpose: str = ""


Shape = TypeVar("Shape", bound=BaseModel)


def asked(shape: type[Shape], given: Mapping[str, Any]) -> Shape:
    """Raises Status."""
    try:
        return shape.model_validate(dict(given))
    except ValidationError as error:
        raise bad_field(error, dict(given)) from None


def cut(ids: list[str], page: PageQuery) -> tuple[int, int]:
    """[first, end) of the page, in a list that is in its order. Raises Status if `after` is not there."""
    first = 0
    if page.after:
        if page.after not in ids:
            raise BadField("after", f"{page.after[:80]!r} is not in the list")
        first = ids.index(page.after) + 1
    return first, min(first + page.limit, len(ids))
