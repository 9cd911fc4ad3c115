"""Pure. What both clients know of calls."""

from collections.abc import Sequence

from shoal.client.params import Params
from shoal.client.reading import Reading, Rest

CALL_TIMEOUT_S = 30.0  # of a call that has one answer
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
WHOLE_INTERVAL = 1024  # who reads only the whole wants few messages


def reading_of(params: Params) -> Reading:
    choices = max(1, params.n or 1)
    ranked = (params.best_of or 0) > choices
    return Reading(min(choices, 1 << 10), ranked=ranked, keyed=bool(params.client_key))


def resumed(request_id: str, output_ids: Sequence[int]) -> Reading:
    return Reading(held=Rest(0, request_id, tuple(output_ids)))
