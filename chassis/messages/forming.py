"""The forming of pipelines: what a batcher asks of a worker, and the answer."""

from dataclasses import dataclass
from enum import Enum

from chassis.ids import BootId, Epoch
from chassis.messages import BadMessage, check
from chassis.messages.addresses import from_wire, to_wire
from chassis.rpc import Method
from chassis.wire import pipeline_pb2 as pb


class FormRefusal(Enum):
    OLD_EPOCH = "old_epoch"
    IN_USE = "in_use"
    WRONG_MODEL = "wrong_model"
    FAILED = "failed"
    NEXT_AWAY = "next_away"  # the next stage could not be dialled


@dataclass(frozen=True, slots=True)
class Form:
    """Take layers [first_layer, end_layer) as stage `stage` of a pipeline in `epoch`."""

    epoch: Epoch
    batcher_boot: BootId
    model_digest: str
    stage: int
    num_stages: int
    first_layer: int
    end_layer: int  # exclusive
    next_address: str  # link addresses of the next stage, or of the batcher: best first, with spaces
    block_size_tokens: int
    slots_max: int
    step_tokens_max: int

    @property
    def last(self) -> bool:
        """Whether it is the pipeline's last stage."""
        return self.stage + 1 == self.num_stages


@dataclass(frozen=True, slots=True)
class Formed:
    """`refusal` is None exactly when the stage stands."""

    refusal: FormRefusal | None
    last_epoch: Epoch
    kv_stamp: str = ""  # changes whenever the KV memory is allocated anew
    num_blocks: int = 0
    error: str = ""
    prior_epoch: Epoch = Epoch(0)  # stood here before, and may have written the KV memory; 0: none
    prior_attachment: int = (
        0  # to kvstore, the newest named in that epoch; 0: none was, or the worker is older
    )


FormAsk = pb.FormRequest  # what travels; `parse_form` and `build_formed` know what is in them
FormAnswer = pb.FormReply
FORM: Method[FormAsk, FormAnswer] = Method("/shoal.pipeline.v1.ShardWorker/Form", FormAsk, FormAnswer)


def build_form(form: Form) -> pb.FormRequest:
    known, others = to_wire(form.next_address)
    return pb.FormRequest(
        epoch=form.epoch,
        batcher_boot=form.batcher_boot,
        model_digest=form.model_digest,
        stage=form.stage,
        num_stages=form.num_stages,
        first_layer=form.first_layer,
        end_layer=form.end_layer,
        next_address=known,
        next_more_addresses=others,
        block_size_tokens=form.block_size_tokens,
        slots_max=form.slots_max,
        step_tokens_max=form.step_tokens_max,
    )


def parse_form(m: pb.FormRequest) -> Form:
    check(m.epoch > 0 and bool(m.batcher_boot), "form: epoch and batcher")
    check(m.stage < m.num_stages, "form: stage outside its pipeline")
    check(m.first_layer < m.end_layer, "form: empty layer range")
    check(bool(m.next_address), "form: next_address missing")
    check(m.block_size_tokens > 0 and m.slots_max > 0 and m.step_tokens_max > 0, "form: sizes")
    return Form(
        epoch=Epoch(m.epoch),
        batcher_boot=BootId(m.batcher_boot),
        model_digest=m.model_digest,
        stage=m.stage,
        num_stages=m.num_stages,
        first_layer=m.first_layer,
        end_layer=m.end_layer,
        next_address=from_wire(m.next_address, m.next_more_addresses),
        block_size_tokens=m.block_size_tokens,
        slots_max=m.slots_max,
        step_tokens_max=m.step_tokens_max,
    )


def build_formed(formed: Formed) -> pb.FormReply:
    return pb.FormReply(
        formed=formed.refusal is None,
        refusal="" if formed.refusal is None else formed.refusal.value,
        last_epoch=formed.last_epoch,
        kv_stamp=formed.kv_stamp,
        num_blocks=formed.num_blocks,
        error=formed.error,
        prior_epoch=formed.prior_epoch,
        prior_attachment=formed.prior_attachment,
    )


def parse_formed(m: pb.FormReply) -> Formed:
    if m.formed:
        check(bool(m.kv_stamp) and m.num_blocks > 0, "formed: kv_stamp and num_blocks")
        return Formed(
            None,
            Epoch(m.last_epoch),
            m.kv_stamp,
            m.num_blocks,
            prior_epoch=Epoch(m.prior_epoch),
            prior_attachment=m.prior_attachment,
        )
    try:
        refusal = FormRefusal(m.refusal)
    except ValueError:
        raise BadMessage(f"formed: refusal {m.refusal!r} is unknown") from None
    return Formed(refusal, Epoch(m.last_epoch), error=m.error)
