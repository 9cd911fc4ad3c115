"""The servers a gateway opens, and where. Imported lazily: the simulation has none of them."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

from chassis import log
from chassis.ports import Ports
from gateway.config import Config
from gateway.front import Front
from gateway.model_control import Control


@dataclass(frozen=True, slots=True)
class Addresses:
    """Listened on; empty where there is no such server."""

    grpc: str = ""
    http: str = ""


async def open_doors(
    stack: AsyncExitStack, front: Front, control: Control, config: Config, ports: Ports
) -> Addresses:
    """They are closed with the stack. Raises OSError where one cannot listen."""
    from gateway.oip.server import Server

    grpc = http = ""
    server = Server(front, control, config)
    if config.grpc_address:
        from gateway.oip.servicer import service as inference_protocol
        from gateway.servicer import serve as serve_grpc

        more = (inference_protocol(server, config),)
        grpc = await stack.enter_async_context(serve_grpc(front, config, more))
        log.info("listening", grpc_address=grpc)
    if config.http_address:
        from gateway.batches.desk import driving
        from gateway.batches.routes import routes as batch_routes
        from gateway.http_door import serve as serve_http
        from gateway.oip.rest import routes as inference_routes

        await stack.enter_async_context(driving(front, ports))
        others = [*inference_routes(server, config), *batch_routes(front, config, ports)]
        http = await stack.enter_async_context(serve_http(front, config, ports.wall_ns, others))
        log.info("listening", http_address=http)
    return Addresses(grpc, http)
