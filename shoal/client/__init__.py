"""The Python client: a typed way to call gateways over gRPC, with and without asyncio.

A stream begins with Accepted (its request id resumes the request at any gateway), goes on with Delta (behind
PromptLogprobs, if asked for) and ends with Finished. A lost stream goes on by itself, at the same or another
gateway, with exactly the rest; what is safe to ask again is asked again. Every failure is a ShoalError.
"""

from shoal.client.asynchronous import AsyncClient, AsyncStream
from shoal.client.blocking import Client, Stream
from shoal.client.conversation import AsyncConversation, Conversation
from shoal.client.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Diverged,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    ShoalError,
    Unauthenticated,
    Unavailable,
)
from shoal.client.events import (
    Accepted,
    Choice,
    Delta,
    Event,
    Finished,
    PromptLogprobs,
    Result,
    TokenLogprobs,
    TopLogprob,
)
from shoal.client.lines import DEFAULT_ADDRESS, Tls
from shoal.client.params import Grammar, Messages, Model, Params, Prompt
from shoal.client.retry import Retry
from shoal.client.wire import build_generate

__all__ = [
    "DEFAULT_ADDRESS",
    "Accepted",
    "AlreadyExists",
    "AsyncClient",
    "AsyncConversation",
    "AsyncStream",
    "Cancelled",
    "Choice",
    "Client",
    "Conversation",
    "DeadlineExceeded",
    "Delta",
    "Diverged",
    "Event",
    "Finished",
    "Grammar",
    "InvalidArgument",
    "Messages",
    "Model",
    "NotFound",
    "Params",
    "PermissionDenied",
    "Prompt",
    "PromptLogprobs",
    "ResourceExhausted",
    "Result",
    "Retry",
    "ShoalError",
    "Stream",
    "Tls",
    "TokenLogprobs",
    "TopLogprob",
    "Unauthenticated",
    "Unavailable",
    "build_generate",
]
