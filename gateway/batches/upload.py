"""A file on its way in: a multipart body under limits, spooled to disk beyond a megabyte."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from chassis.errors import Code, Status
from gateway.batches.asked import DECIMAL, AgeS, asked
from gateway.http_body import told_len
from gateway.http_errors import TooLarge
from gateway.openai.errors import BadField
from gateway.openai.schema import Given

FILE_BYTES_MAX = 200 * 1000 * 1000
REST_BYTES_MAX = 64 * 1024  # of a body that is not the file
FIELDS_MAX = 16
FILENAME_LEN_MAX = 255
UPLOADS_AT_ONCE_MAX = 8
_CHARSET = re.compile(r"charset[\s*0-9]*=\s*\"?(?:(utf-?8|us-ascii)\b)?", re.IGNORECASE)
Unsaid = SkipJsonSchema[None]  # a form has no null


class UploadForm(Given):
    """POST /v1/files."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    file: Annotated[UploadFile, WithJsonSchema({"type": "string", "format": "binary", "minLength": 1})]
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | SkipJsonSchema[None] = Field(default=None, alias="expires_after[anchor]")
    seconds: Annotated[AgeS, DECIMAL] | SkipJsonSchema[None] = Field(
        default=None, alias="expires_after[seconds]"
    )


@dataclass(frozen=True, slots=True)
class Upload:
    """`age_s`: how long it is to be kept; None if that is not said."""

    file: UploadFile
    filename: str
    bytes: int
    age_s: int | None


@asynccontextmanager
async def uploaded(request: Request, silence_s: float) -> AsyncIterator[Upload]:
    """Lasts as long as the file is to be read. Raises Status and ClientDisconnect."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise Status(Code.INVALID_ARGUMENT, f"content-type: {kind[:100]!r}; multipart/form-data")
    if _other_charset(request.headers["content-type"]):
        raise Status(Code.INVALID_ARGUMENT, "content-type: charset: only utf-8")
    if (told := told_len(request)) > FILE_BYTES_MAX + REST_BYTES_MAX:
        raise TooLarge(f"file: a body of {told} bytes; at most {FILE_BYTES_MAX}")
    try:
        parts = MultiPartParser(
            request.headers,
            _bounded(request, silence_s),
            max_files=1,
            max_fields=FIELDS_MAX,
            max_part_size=REST_BYTES_MAX,
        )
        form = await parts.parse()
    except MultiPartException as error:
        raise Status(Code.INVALID_ARGUMENT, f"body: {error.message}") from None
    try:
        yield _checked(form)
    finally:
        await form.close()


def _other_charset(kind: str) -> bool:
    """Some of those that Python knows raise, or take long for what is short."""
    return any(not said[1] for said in _CHARSET.finditer(kind))


async def _bounded(request: Request, silence_s: float) -> AsyncGenerator[bytes, None]:
    size = 0
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(silence_s):
                part = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Status(Code.INVALID_ARGUMENT, f"body: nothing came for {silence_s:g} s") from None
        size += len(part)
        if size > FILE_BYTES_MAX + REST_BYTES_MAX:
            raise TooLarge(f"file: more than {FILE_BYTES_MAX} bytes")
        yield part


def _checked(form: FormData) -> Upload:
    """Raises Status."""
    if twice := [name for name in form if len(form.getlist(name)) > 1]:
        raise BadField(twice[0][:100], "given twice")
    given = asked(UploadForm, form)
    file, size = given.file, given.file.size or 0
    if size > FILE_BYTES_MAX:
        raise TooLarge(f"file: {size} bytes; at most {FILE_BYTES_MAX}")
    if not size:
        raise BadField("file", "it is empty")
    name = (file.filename or "").replace("\\", "/").rpartition("/")[2]
    if not 0 < len(name) <= FILENAME_LEN_MAX or not name.isprintable():
        raise BadField("file", f"a name of 1 to {FILENAME_LEN_MAX} printable characters")
    if (given.seconds is None) != (given.anchor is None):
        raise BadField("expires_after", "an anchor and seconds, or neither")
    return Upload(file, name, size, given.seconds)
