"""What happens before a NIXL link is opened, on a thread of its own: UCX and devices take their time."""

from collections.abc import Callable
from dataclasses import dataclass

from chassis import log
from chassis.transport.interface import LinkOptions
from chassis.transport.nixl_agent import Agent, AgentError, Lanes
from chassis.transport.nixl_slots import Incoming, Outgoing

MakeAgent = Callable[[str, Lanes], Agent]


@dataclass(frozen=True, slots=True)
class Made:
    agent: Agent
    metadata: bytes
    sends_direct: bool  # what payloads lie in could be registered


def make(
    make_agent: MakeAgent,
    name: str,
    lanes: Lanes,
    options: LinkOptions,
    incoming: Incoming,
    outgoing: Outgoing,
) -> Made:
    """The agent, with all registered that the link has. Raises AgentError."""
    agent = make_agent(name, lanes)
    try:
        agent.register(incoming.regions)
        sends_direct = _register_direct(agent, lanes, options, incoming, outgoing)
        return Made(agent, agent.metadata(), sends_direct)
    except AgentError:
        agent.close()
        raise


def _register_direct(
    agent: Agent, lanes: Lanes, options: LinkOptions, incoming: Incoming, outgoing: Outgoing
) -> bool:
    """Whether we can send so. Without it, payloads go through the host's memory."""
    memories = list(options.sends_from)
    try:
        if (slots := incoming.open_direct()) is not None:
            memories.append(slots)
        if lanes is not Lanes.RDMA and any(memory.device is not None for memory in memories):
            raise AgentError(f"{lanes.kind} does not reach the memory of devices")
        agent.register(memories)
    except Exception as error:  # also the device's own: it has no memory, or no driver for this
        log.warning("no GPUDirect", kind=lanes.kind, error=f"{type(error).__name__}: {error}")
        incoming.close_direct()
        return False
    outgoing.regions.extend(options.sends_from)
    return bool(options.sends_from)
