"""Registry entries: who is there, what they serve and how they are reached.

An entry is a hint that expires; what decides (a formation, an epoch) is fixed by compare-and-set.
"""

from dataclasses import dataclass

from chassis.ids import BootId, Epoch
from chassis.messages import BadMessage, check_id, parse
from chassis.messages.addresses import from_wire, to_wire
from chassis.wire import pipeline_pb2 as pb

EPOCH_MAX = 1 << 63
LAYERS_MAX = 1e6  # that a head may cost or take
LAYER_US_MIN, LAYER_US_MAX = 1e-3, 1e9


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    boot: BootId
    model: str
    model_digest: str
    rpc_address: str
    transport_address: str  # link addresses: best first, with spaces
    last_epoch: Epoch
    free: bool
    num_layers: int  # of the model
    preferred_stage: int | None = None  # None: any, a spare
    head_cost_layers: float = 0.0  # cost of the head in layers, for the split
    loaded: range = range(0)  # layers
    wish: range = range(0)  # layers that it prefers; empty: any
    layer_us: float = 0.0  # what a layer takes it in a decode step, measured; 0: not known
    layers_max: int = 0  # so many it has memory for; 0: as many as there are
    head_layers: float = 0.0  # the head's weights in layers, of what it has memory for
    ends_layers: float = 0.0  # those of embedding and head in one stage; 0: not told


@dataclass(frozen=True, slots=True)
class BatcherEntry:
    boot: BootId
    model: str
    epoch: Epoch
    standing: bool
    pool_generation: str = ""
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class KvstoreEntry:
    boot: BootId
    rpc_address: str
    name: str = ""  # stays over restarts; empty: it has none but its boot


@dataclass(frozen=True, slots=True)
class GatewayEntry:
    boot: BootId
    grpc_address: str


@dataclass(frozen=True, slots=True)
class ModelEntry:
    name: str
    digest: str
    card_digest: str  # names the card in the object store


@dataclass(frozen=True, slots=True)
class EpochEntry:
    epoch: Epoch
    batcher_boot: BootId


def build_worker(entry: WorkerEntry) -> bytes:
    known, others = to_wire(entry.transport_address)
    return pb.WorkerEntry(
        boot=entry.boot,
        model=entry.model,
        model_digest=entry.model_digest,
        rpc_address=entry.rpc_address,
        transport_address=known,
        more_addresses=others,
        last_epoch=entry.last_epoch,
        free=entry.free,
        preferred_stage=-1 if entry.preferred_stage is None else entry.preferred_stage,
        num_layers=entry.num_layers,
        head_cost_layers=entry.head_cost_layers,
        loaded_first=entry.loaded.start,
        loaded_end=entry.loaded.stop,
        wish_first=entry.wish.start,
        wish_end=entry.wish.stop,
        layer_us=entry.layer_us,
        layers_max=entry.layers_max,
        head_layers=entry.head_layers,
        ends_layers=entry.ends_layers,
    ).SerializeToString()


def parse_worker(data: bytes) -> WorkerEntry:
    m = parse(pb.WorkerEntry, data)
    if m.loaded_end < m.loaded_first or m.loaded_end > m.num_layers:
        raise BadMessage(f"loaded layers [{m.loaded_first}, {m.loaded_end}) of {m.num_layers}")
    if m.wish_end < m.wish_first:
        raise BadMessage(f"prefers layers [{m.wish_first}, {m.wish_end})")
    if m.preferred_stage < -1:
        raise BadMessage(f"preferred stage {m.preferred_stage}")
    return WorkerEntry(
        boot=_boot(m.boot),
        model=m.model,
        model_digest=m.model_digest,
        rpc_address=m.rpc_address,
        transport_address=from_wire(m.transport_address, m.more_addresses),
        last_epoch=_epoch(m.last_epoch),
        free=m.free,
        num_layers=m.num_layers,
        preferred_stage=None if m.preferred_stage == -1 else m.preferred_stage,
        head_cost_layers=_amount("head cost in layers", m.head_cost_layers, LAYERS_MAX),
        loaded=range(m.loaded_first, m.loaded_end),
        wish=range(m.wish_first, m.wish_end),
        layer_us=_amount("layer us", m.layer_us, LAYER_US_MAX, LAYER_US_MIN),
        layers_max=m.layers_max,
        head_layers=_amount("head layers", m.head_layers, LAYERS_MAX),
        ends_layers=_amount("ends layers", m.ends_layers, 2 * LAYERS_MAX),
    )


def build_batcher(entry: BatcherEntry) -> bytes:
    return pb.BatcherEntry(
        boot=entry.boot,
        model=entry.model,
        epoch=entry.epoch,
        standing=entry.standing,
        pool_generation=entry.pool_generation,
        running=entry.running,
        waiting=entry.waiting,
    ).SerializeToString()


def parse_batcher(data: bytes) -> BatcherEntry:
    m = parse(pb.BatcherEntry, data)
    return BatcherEntry(
        boot=_boot(m.boot),
        model=m.model,
        epoch=Epoch(m.epoch),
        standing=m.standing,
        pool_generation=m.pool_generation,
        running=m.running,
        waiting=m.waiting,
    )


def build_kvstore(entry: KvstoreEntry) -> bytes:
    return pb.KvstoreEntry(
        boot=entry.boot, rpc_address=entry.rpc_address, name=entry.name
    ).SerializeToString()


def parse_kvstore(data: bytes) -> KvstoreEntry:
    m = parse(pb.KvstoreEntry, data)
    return KvstoreEntry(boot=_boot(m.boot), rpc_address=m.rpc_address, name=m.name)


def build_gateway(entry: GatewayEntry) -> bytes:
    return pb.GatewayEntry(boot=entry.boot, grpc_address=entry.grpc_address).SerializeToString()


def parse_gateway(data: bytes) -> GatewayEntry:
    m = parse(pb.GatewayEntry, data)
    return GatewayEntry(boot=_boot(m.boot), grpc_address=m.grpc_address)


def build_model(entry: ModelEntry) -> bytes:
    return pb.ModelEntry(
        name=entry.name, digest=entry.digest, card_digest=entry.card_digest
    ).SerializeToString()


def parse_model(data: bytes) -> ModelEntry:
    m = parse(pb.ModelEntry, data)
    if not m.name:
        raise BadMessage("a model without a name")
    check_id(m.card_digest, "card digest")
    return ModelEntry(name=m.name, digest=m.digest, card_digest=m.card_digest)


def build_epoch(entry: EpochEntry) -> bytes:
    return pb.EpochEntry(epoch=entry.epoch, batcher_boot=entry.batcher_boot).SerializeToString()


def parse_epoch(data: bytes) -> EpochEntry:
    m = parse(pb.EpochEntry, data)
    return EpochEntry(epoch=_epoch(m.epoch), batcher_boot=_boot(m.batcher_boot))


def _amount(name: str, value: float, most: float, least: float = 0.0) -> float:
    """0, which means not known, or what can be reckoned with."""
    if not (value == 0 or least <= value <= most):
        raise BadMessage(f"{name}: {value}, not {least:g} to {most:g}")
    return value


def _epoch(epoch: int) -> Epoch:
    """One that has another above it: the next must fit on the wire."""
    if epoch > EPOCH_MAX:
        raise BadMessage(f"epoch {epoch}")
    return Epoch(epoch)


def _boot(boot: str) -> BootId:
    check_id(boot, "boot")
    return BootId(boot)
