"""The batcher's core, put together from its configuration and a model's card."""

from batcher.block_hash import namespace
from batcher.config import Config
from batcher.core import Core
from batcher.formation import Formation, FormationConfig
from batcher.ownership import Ownership, OwnershipConfig
from batcher.ring import RingConfig
from batcher.scheduler import Scheduler, SchedulerConfig
from batcher.stops import Stops
from chassis.ids import BootId
from chassis.messages.card import ModelCard


def make_core(c: Config, boot: BootId, card: ModelCard) -> Core:
    token_bytes = tuple(card.token_bytes[i] for i in range(card.vocab_size))
    scheduler = Scheduler(
        SchedulerConfig(
            context_len_max=card.context_len_max,
            namespace=namespace(card.model_digest, "", "paged"),
            block_size_tokens=c.block_size_tokens,
            step_tokens_max=c.step_tokens_max,
            sequences_max=c.running_len_max,
            waiting_len_max=c.waiting_len_max,
            max_step_ms=c.max_step_ms,
            slowdown_max=c.slowdown_max,
            steps_in_flight_max=c.steps_in_flight or None,
            run_ahead=c.run_ahead,
            queueing=c.queueing(),
            step_deadline_min_ms=c.step_timeout_ms,
        ),
        Stops(token_bytes, card.eos_ids),
    )
    formation = Formation(
        boot,
        FormationConfig(
            num_stages=c.num_stages,
            jitter_s=c.jitter_ms / 1000,
            call_timeout_s=c.form_timeout_ms / 1000,
        ),
    )
    held = OwnershipConfig(held_len_max=c.held_len_max)
    return Core(Ownership(boot, held), scheduler, formation, c.reform_timeout_ms / 1000)


def ring_config(c: Config) -> RingConfig:
    return RingConfig(
        listen=c.listen,
        advertise_host=c.advertise_host,
        block_size_tokens=c.block_size_tokens,
        slots_max=c.running_len_max,
        step_tokens_max=c.step_tokens_max,
        form_timeout_s=c.form_timeout_ms / 1000,
    )
