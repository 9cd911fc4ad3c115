"""What a seed stands for: the shape of the deployment, its load, and which faults it meets how often.

Every seed leaves some kinds of fault out altogether: a run with all of them at once finds less.
"""

import random
from dataclasses import dataclass, replace

from batcher.queueing import TimeoutAction
from tests.sim.queue_knobs import draw_knobs
from tests.sim.scaling_options import ScalingOptions, draw_scaling
from tests.sim.tier_options import TierOptions, draw_tiers

NUM_LAYERS = 4
JOBS_SHARE = 0.3  # of the seeds
FAULTS = (
    "worker",
    "batcher",
    "kvstore",
    "gateway",
    "drain",
    "all",
    "broker",
    "pause",
    "cut",
    "expire",
    "link",
    "hang",
    "poison",
)


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    stages: int
    spares: int
    batchers: int
    second_stages: int  # of the second batcher's pipeline: it takes workers over with other layers
    both: bool  # workers for both
    gateways: int
    kvstores: int
    block_size_tokens: int
    num_blocks: int
    step_tokens_max: int
    running_len_max: int
    waiting_len_max: int
    steps_in_flight: int
    run_ahead: bool
    slowdown_max: float
    max_step_ms: float
    num_clients: int
    prompt_len_max: int
    output_len_max: int
    shared_prefix: bool
    wobbly: bool  # each process samples differently: only what clients hold already binds the next owner
    step_cost_s: float
    delay_s: float  # of a message, at most
    # chances, while the faults last
    core_loss: float
    settle_loss: float
    answer_loss: float  # of stored writes
    late_write: float
    call_loss: float
    early_redelivery: float
    stale_read: float
    honours_old: bool
    rpc_loss: float
    faults: tuple[str, ...]  # kinds of event, drawn over `fault_time_s`
    num_faults: int
    fault_time_s: float
    cancel: float
    deadline: float
    leave: float  # a client that goes away and comes back
    keyed: float
    duel: bool  # its owners are deaf for about as long as it takes to lose a request
    twin: float  # a second client asks for the same, or with the same key for something else
    lies: float  # how often a pipeline is told of other blocks than it should be
    tiers: TierOptions | None  # None: kvstores without
    jobs: bool = False  # some come over the bus
    scaling: ScalingOptions | None = None  # None: nobody joins or leaves


def draw(seed: int) -> Options:
    options = _with_jobs(_draw(seed))
    least = min(options.stages, options.second_stages if options.batchers > 1 else options.stages)
    return replace(options, scaling=draw_scaling(seed, least, NUM_LAYERS))


def _with_jobs(options: Options) -> Options:
    """None where machines have numerics of their own (no oracle), or the queue turns away who waits (perhaps
    for ever). In half of the others gateways come and go while jobs run."""
    rng = random.Random(f"jobs of {options.seed}")
    policy = draw_knobs(options.seed, options.waiting_len_max).policy
    impatient = policy.default_timeout_us and policy.timeout_action is TimeoutAction.REJECT
    if rng.random() >= JOBS_SHARE or impatient or options.wobbly:
        return options
    options = replace(options, jobs=True)
    if rng.random() < 0.5 or options.tiers is not None or options.lies:
        return options
    return replace(
        options,
        faults=("gateway", "gateway", "drain", "drain", "broker", "batcher"),
        num_faults=4,
        fault_time_s=4.0,
        gateways=2,
        step_cost_s=0.1,
        output_len_max=20,
        num_blocks=max(options.num_blocks, 100),
    )


def _draw(seed: int) -> Options:
    rng = random.Random(f"options {seed}")
    lossy = rng.random() < 0.6

    def rate(most: float) -> float:
        return rng.uniform(0, most) if lossy and rng.random() < 0.6 else 0.0

    kinds = tuple(kind for kind in FAULTS if rng.random() < 0.3)
    stages = rng.choice((1, 2, 2, 3))
    block_size = rng.choice((1, 2, 4))
    prompt_len_max = rng.choice((4, 12, 24))
    output_len_max = rng.choice((4, 10, 20))
    longest = (prompt_len_max + 8 + output_len_max + 1) // block_size + 2
    options = Options(
        seed=seed,
        stages=stages,
        spares=rng.choice((0, 0, 1)),
        batchers=rng.choice((1, 2, 2)),
        second_stages=rng.choice((stages, 1)),
        both=rng.random() < 0.6,
        gateways=rng.choice((1, 2)),
        kvstores=rng.choice((1, 1, 2)),
        block_size_tokens=block_size,
        num_blocks=longest * rng.choice((1, 2, 8)) + 4,
        step_tokens_max=rng.choice((4, 8, 32)),
        running_len_max=rng.choice((1, 3, 8)),
        waiting_len_max=rng.choice((3, 64)),
        steps_in_flight=rng.choice((0, 1, stages + 1)),
        run_ahead=random.Random(f"run ahead {seed}").random() < 0.8,
        slowdown_max=random.Random(f"slowdown {seed}").choice((0.0, 1.2, 1.9)),
        max_step_ms=random.Random(f"step {seed}").choice((0.0, 0.0, 5.0, 50.0)),
        num_clients=rng.choice((1, 3, 6)),
        prompt_len_max=prompt_len_max,
        output_len_max=output_len_max,
        shared_prefix=rng.random() < 0.5,
        wobbly=rng.random() < 0.3,
        step_cost_s=rng.choice((0.0005, 0.003, 0.02, 0.1)),
        delay_s=rng.choice((0.0, 0.001, 0.02)),
        core_loss=rate(0.1),
        settle_loss=rate(0.3),
        answer_loss=rate(0.1),
        late_write=rate(0.05),
        call_loss=rate(0.05),
        early_redelivery=rate(0.1),
        stale_read=rate(0.2),
        honours_old=rng.random() < 0.5,
        rpc_loss=rate(0.05),
        faults=kinds,
        num_faults=rng.choice((1, 2, 4)) if kinds else 0,
        fault_time_s=rng.choice((1.0, 4.0)),
        cancel=rng.choice((0.0, 0.3)),
        deadline=rng.choice((0.0, 0.2)),
        leave=rng.choice((0.0, 0.4)),
        keyed=rng.choice((0.0, 0.5, 1.0)),
        duel=rng.random() < 0.15,
        twin=rng.choice((0.0, 0.0, 0.4)),
        lies=_lies(seed),
        tiers=None,
    )
    if options.lies:
        options = replace(options, shared_prefix=True, num_clients=6, fault_time_s=4.0)
    if options.duel:
        return _duel(options)
    if rng.random() < 0.1:
        return _absent(options)
    tiers = draw_tiers(seed)
    if tiers is not None and options.lies:
        both = random.Random(f"lies and tiers {seed}").random() < 0.5
        tiers = replace(tiers, proven=True) if both else None  # else lies would be in the answers
    return options if tiers is None else _forgetful(options, tiers, longest)


def _lies(seed: int) -> float:
    rng = random.Random(f"lies of {seed}")
    return rng.choice((0.1, 0.3, 0.8)) if rng.random() < 0.2 else 0.0


def _forgetful(options: Options, tiers: TierOptions, longest: int) -> Options:
    """A pool that holds one of the longest at a time, and many who ask what others asked before."""
    return replace(
        options,
        tiers=tiers,
        shared_prefix=True,
        num_clients=16,
        num_blocks=longest + 4,
        waiting_len_max=64,
        fault_time_s=4.0,
        keyed=0.0,
        cancel=0.0,
        deadline=0.0,
        leave=0.0,
        step_cost_s=min(options.step_cost_s, 0.003),
        faults=tuple(kind for kind in options.faults if kind != "poison"),
    )


def _absent(options: Options) -> Options:
    """Everybody hangs up, and comes back while the owner still counts; little else goes wrong."""
    return replace(
        options,
        faults=options.faults[:1],
        num_faults=min(options.num_faults, 1),
        core_loss=0.0,
        call_loss=0.0,
        answer_loss=0.0,
        stale_read=0.0,
        step_cost_s=0.1,
        output_len_max=20,
        num_blocks=max(options.num_blocks, 100),
        cancel=0.0,
        leave=1.0,
    )


def _duel(options: Options) -> Options:
    """Two batchers with a pipeline each, and requests that last long enough to have two owners."""
    return replace(
        options,
        batchers=2,
        both=True,
        faults=("cut", "pause", "gateway"),
        num_faults=4,
        fault_time_s=4.0,
        step_cost_s=0.1,
        output_len_max=20,
        num_blocks=max(options.num_blocks, 100),
    )
