"""Pure. Whom this worker serves: an epoch, its links, its steps in order. It decides nothing of the domain.

Rules: an epoch is taken once and only upwards; a Form needs the batcher's control link of that epoch to
be up, and is answered after the next stage was reached; step k runs after k - 1 or not at all (repeats
and old epochs are ghosts, a gap means that the link lies); one lost link ends the epoch, and the worker
is free again `free_after_s` later, until when only the same batcher may have it back. KV memory stays.
"""

from dataclasses import dataclass
from enum import Enum

from chassis.ids import BootId, Epoch
from chassis.messages.forming import Form, Formed, FormRefusal
from chassis.messages.pipeline import Hello, LinkKind
from shard_worker.events import (
    Announce,
    Answer,
    BadFrame,
    Broke,
    CloseLink,
    Count,
    Dial,
    Dialled,
    Drain,
    Effect,
    Event,
    Execute,
    FormAsked,
    LinkDown,
    LinkUp,
    Load,
    LoadDone,
    StepArrived,
    StepFailed,
    Stood,
    Tick,
)


class Phase(Enum):
    FREE = "free"
    FORMING = "forming"
    STANDING = "standing"


@dataclass(frozen=True, slots=True)
class StageConfig:
    boot: BootId
    model_digest: str
    num_layers: int
    step_tokens_max: int  # whose activations fit into a slot
    slots_max: int = 65_536
    links_max: int = 16  # inbound, parked ones included
    free_after_s: float = 0.2


class Stage:
    def __init__(self, config: StageConfig) -> None:
        self._config = config
        self.phase = Phase.FREE
        self.draining = False
        self.last_epoch = Epoch(0)
        self.loaded = range(0)
        self.free_at: float | None = None  # when others may have it; None: now, or not before the epoch ends
        self._kv_allocations = 0
        self._num_blocks = 0
        self._form: Form | None = None
        self._call: int | None = None  # the Form that is not answered yet
        self._links: dict[int, Hello] = {}  # inbound, in order of arrival
        self._control: int | None = None
        self._input: int | None = None
        self._next: int | None = None
        self._last_step = 0
        self._stood_epoch = Epoch(0)  # the newest whose steps may have written the KV memory
        self._last_batcher: BootId | None = None  # of the epoch that ended last

    @property
    def free(self) -> bool:
        return self.phase is Phase.FREE and self.free_at is None and not self.draining

    def handle(self, event: Event) -> list[Effect]:
        match event:
            case StepArrived():
                return self._step(event)
            case LinkUp():
                return self._link_up(event)
            case LinkDown():
                return self._link_down(event)
            case FormAsked():
                return self._asked(event)
            case LoadDone():
                return self._load_done(event)
            case Dialled():
                return self._dialled(event)
            case BadFrame():
                if event.link in (self._control, self._input, self._next):
                    return self._break(event.now, event.cause)
                return [Count("bad_frame")]
            case StepFailed():
                if self.phase is Phase.STANDING and event.epoch == self.last_epoch:
                    return self._break(event.now, event.cause)
                return [Count("late_failure")]
            case Tick():
                if self.free_at is None or event.now < self.free_at:
                    return []
                self.free_at = None
                return [Announce()]
            case Drain():
                self.draining = True
                return [Announce()]

    def check(self) -> None:
        """Invariants, after every event in tests."""
        assert len(self._links) <= self._config.links_max
        assert (self.phase is Phase.FREE) == (self._form is None)
        assert (self.phase is Phase.FORMING) == (self._call is not None)
        assert (self.phase is Phase.STANDING) == (self._next is not None)
        assert (self.phase is Phase.FREE) == (self._control is None)
        assert self._control is None or self._control in self._links
        assert self._input is None or self._input in self._links
        assert self.free_at is None or self.phase is Phase.FREE
        for link, hello in self._links.items():
            ours = link in (self._control, self._input)
            assert ours or hello.epoch > self.last_epoch, "an old link is still here"

    # ---- steps

    def _step(self, event: StepArrived) -> list[Effect]:
        if self.phase is not Phase.STANDING or event.link != self._input:
            return [Count("stray_step")]
        if event.epoch < self.last_epoch:
            return [Count("old_epoch")]
        if event.epoch > self.last_epoch:
            return self._break(event.now, f"step of epoch {event.epoch} in epoch {self.last_epoch}")
        if event.number <= self._last_step:
            return [Count("repeated_step")]
        if event.number > self._last_step + 1:
            return self._break(event.now, f"step {event.number} after {self._last_step}")
        self._last_step = event.number
        return [_EXECUTE]

    # ---- links

    def _link_up(self, event: LinkUp) -> list[Effect]:
        hello = event.hello
        serving = self.phase is not Phase.FREE and hello.epoch == self.last_epoch
        if hello.kind is LinkKind.RESULT or (hello.epoch <= self.last_epoch and not serving):
            return [CloseLink(event.link), Count("ghost_link")]
        if any(h.kind is hello.kind and h.epoch == hello.epoch for h in self._links.values()):
            return [CloseLink(event.link), Count("second_link")]
        effects: list[Effect] = []
        if len(self._links) >= self._config.links_max:
            ours = (self._control, self._input)
            parked = [link for link in self._links if link not in ours]
            evicted = min(parked, key=lambda link: self._links[link].epoch)
            del self._links[evicted]
            effects += [CloseLink(evicted), Count("evicted_link")]
        self._links[event.link] = hello
        if serving:
            effects += self._claim_links(event.now)
        return effects

    def _claim_links(self, now: float) -> list[Effect]:
        """Finds the input of the epoch we serve: the control link on stage 0, else the ring."""
        form = self._form
        assert form is not None
        wanted = LinkKind.CONTROL if form.stage == 0 else LinkKind.RING
        for link, hello in self._links.items():
            if hello.epoch == form.epoch:
                if hello.kind is wanted:
                    self._input = link
                elif hello.kind is LinkKind.RING:
                    return self._break(now, "a ring link into the first stage")
        return []

    def _link_down(self, event: LinkDown) -> list[Effect]:
        """Forgets the link; one of ours ends the epoch."""
        hello = self._links.pop(event.link, None)
        if event.link == self._next:
            return self._break(event.now, "link to the next stage lost", lost=event.link)
        if hello is not None and event.link in (self._control, self._input):
            return self._break(event.now, f"{hello.kind.value} link lost", lost=event.link)
        return []

    def _break(
        self, now: float, cause: str, lost: int | None = None, refusal: FormRefusal = FormRefusal.FAILED
    ) -> list[Effect]:
        form = self._form
        assert form is not None
        effects: list[Effect] = [Broke(form.epoch, cause)]
        ours = [link for link, hello in self._links.items() if hello.epoch <= form.epoch]
        for link in ours:
            del self._links[link]
        effects += [CloseLink(link) for link in (*ours, self._next) if link is not None and link != lost]
        if self._call is not None:
            effects.append(Answer(self._call, self._refusal(refusal, cause)))
        self.phase = Phase.FREE
        self.free_at = now + self._config.free_after_s
        self._last_batcher = form.batcher_boot
        self._form = self._call = self._control = self._input = self._next = None
        return effects

    # ---- forming

    def _asked(self, event: FormAsked) -> list[Effect]:
        form = event.form
        refusal = self._refuses(event)
        if refusal is not None:
            return [Answer(event.call, refusal)]
        effects: list[Effect] = []
        if self.phase is not Phase.FREE:
            effects += self._break(event.now, "the batcher formed anew")
        old = [link for link, hello in self._links.items() if hello.epoch < form.epoch]
        for link in old:
            del self._links[link]
            effects.append(CloseLink(link))
        self.phase = Phase.FORMING
        self.free_at = None
        self.last_epoch = form.epoch
        self._form, self._call = form, event.call
        self._control = self._control_of(form)
        self._last_step = 0
        effects += self._claim_links(event.now)
        if self._form is None:
            return effects
        return [*effects, Load(event.call, form), Announce()]

    def _refuses(self, event: FormAsked) -> Formed | None:
        form, config = event.form, self._config
        if form.epoch <= self.last_epoch:
            return self._refusal(FormRefusal.OLD_EPOCH, f"epoch {self.last_epoch} was here")
        if form.model_digest != config.model_digest:
            return self._refusal(FormRefusal.WRONG_MODEL, f"this worker has model {config.model_digest}")
        if self.draining or not self._may_have(form.batcher_boot, event.now):
            return self._refusal(FormRefusal.IN_USE, "draining" if self.draining else "another batcher's")
        if self._control_of(form) is None:
            return self._refusal(FormRefusal.FAILED, "no control link of this epoch")
        if form.end_layer > config.num_layers:
            return self._refusal(FormRefusal.FAILED, f"the model has {config.num_layers} layers")
        if form.slots_max > config.slots_max:
            return self._refusal(FormRefusal.FAILED, f"slots_max: at most {config.slots_max}")
        if form.num_stages > 1 and form.step_tokens_max > config.step_tokens_max:
            return self._refusal(FormRefusal.FAILED, f"step_tokens_max: at most {config.step_tokens_max}")
        return None

    def _may_have(self, batcher: BootId, now: float) -> bool:
        if self._form is not None:
            return batcher == self._form.batcher_boot
        return self.free_at is None or now >= self.free_at or batcher == self._last_batcher

    def _control_of(self, form: Form) -> int | None:
        for link, hello in self._links.items():
            if (hello.kind, hello.epoch, hello.boot) == (LinkKind.CONTROL, form.epoch, form.batcher_boot):
                return link
        return None

    def _refusal(self, refusal: FormRefusal, error: str) -> Formed:
        return Formed(refusal, self.last_epoch, error=error)

    def _load_done(self, event: LoadDone) -> list[Effect]:
        """What is resident counts, even if the epoch it was for is over."""
        if event.kv_allocated:
            self._kv_allocations += 1
        self.loaded = range(0) if event.error is not None else event.layers
        if self._call != event.call or self._form is None:
            return [Announce()]
        if event.error is not None:
            return [*self._break(event.now, event.error), Announce()]
        assert event.num_blocks > 0
        self._num_blocks = event.num_blocks
        return [Dial(event.call, self._form), Announce()]

    def _dialled(self, event: Dialled) -> list[Effect]:
        if self._call != event.call or self._form is None:
            return [] if event.link is None else [CloseLink(event.link)]
        if event.link is None:
            cause = f"nobody answers at {self._form.next_address}"
            return self._break(event.now, cause, refusal=FormRefusal.NEXT_AWAY)
        self.phase = Phase.STANDING
        self._next = event.link
        self._call = None
        stamp = f"{self._config.boot}.{self._kv_allocations}"
        formed = Formed(None, self.last_epoch, stamp, self._num_blocks, prior_epoch=self._stood_epoch)
        self._stood_epoch = self.last_epoch
        return [Stood(self._form, self._num_blocks, event.link), Answer(event.call, formed)]


_EXECUTE = Execute()
