"""Pure. The subjects of receipts, one a request: `shoal.use.<tenant>.<model>.<request id>`.

Names are encoded, and `-` is the unnamed tenant, as in the subjects of jobs. Whoever may listen to
`shoal.use.<tenant>.>` sees one tenant's.
"""

from chassis.ids import RequestId
from chassis.subjects import TOKEN_LEN_MAX, encoded


def receipt(tenant: str, model: str, request_id: RequestId) -> str:
    return f"shoal.use.{_token(tenant)}.{_token(model)}.{encoded(request_id)}"


def receipts(tenant: str | None = None, model: str | None = None) -> str:
    """Filter of those of one tenant, of one model, of both or of all."""
    tenant_token, model_token = ["*" if name is None else _token(name) for name in (tenant, model)]
    return f"shoal.use.{tenant_token}.{model_token}.*"


def _token(name: str) -> str:
    """Names that are longer than a token share one with others of the same beginning."""
    return "=2D" if name == "-" else encoded(name)[:TOKEN_LEN_MAX] or "-"
