"""How busy a pipeline is: what its batcher tells the others of its model, so that requests go where they end
first."""

from dataclasses import dataclass

from chassis.ids import BootId
from chassis.messages import check_id, parse
from chassis.wire import pipeline_pb2 as pb


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """Times in seconds."""

    boot: BootId
    pool_generation: str
    accepting: bool  # stands, and does not drain
    wait_s: float  # until one that comes now would be computed
    places: int  # how many more can run at once
    place_s: float  # what each further one waits when there are none
    prompt_token_s: float  # a prompt token, in a step that is there anyway
    output_token_s: float  # an output token of one more sequence
    # for who decides how many pipelines there should be; the batch class is left out
    running: int = 0
    waiting: int = 0
    pending_tokens: int = 0  # of work that waits: prompts, and outputs as long as they are expected to be
    oldest_wait_s: float = 0.0  # who of those has been here longest
    work_s: float = 0.0  # done since the start, in time that a full pipeline takes for it
    work_tokens: int = 0  # computed for it


def build_load(load: PipelineLoad) -> bytes:
    return pb.PipelineLoad(
        boot=load.boot,
        pool_generation=load.pool_generation,
        accepting=load.accepting,
        wait_us=round(load.wait_s * 1e6),
        places=load.places,
        place_us=round(load.place_s * 1e6),
        prompt_token_ns=round(load.prompt_token_s * 1e9),
        output_token_us=round(load.output_token_s * 1e6),
        running=load.running,
        waiting=load.waiting,
        pending_tokens=load.pending_tokens,
        oldest_wait_us=round(load.oldest_wait_s * 1e6),
        work_us=round(load.work_s * 1e6),
        work_tokens=load.work_tokens,
    ).SerializeToString()


def parse_load(data: bytes) -> PipelineLoad:
    m = parse(pb.PipelineLoad, data)
    check_id(m.boot, "load: boot")
    return PipelineLoad(
        boot=BootId(m.boot),
        pool_generation=m.pool_generation,
        accepting=m.accepting,
        wait_s=m.wait_us / 1e6,
        places=m.places,
        place_s=m.place_us / 1e6,
        prompt_token_s=m.prompt_token_ns / 1e9,
        output_token_s=m.output_token_us / 1e6,
        running=m.running,
        waiting=m.waiting,
        pending_tokens=m.pending_tokens,
        oldest_wait_s=m.oldest_wait_us / 1e6,
        work_s=m.work_us / 1e6,
        work_tokens=m.work_tokens,
    )
