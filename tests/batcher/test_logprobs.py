"""Log probabilities stay beside their ids: through parts, takeovers, forced output and the record."""

from dataclasses import replace

from batcher import events as e
from batcher.ownership import State
from chassis.ids import Attempt, GatewayId
from chassis.messages.request import Claim, Reason, Sampling, Terminal
from chassis.messages.sampling import UNTOLD, PromptTold, TokenLogprobs
from tests.batcher.ownership_rig import OTHER, G, H, R, Rig, request


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token_id), 1, (token_id,), (-float(token_id),))


def rig() -> Rig:
    made = Rig()
    made.request = replace(request(), sampling=Sampling(logprobs=1))
    return made


def running(made: Rig) -> Rig:
    made.deliver()
    made.admit()
    made.stored()
    assert made.at(State.RUNNING)
    return made


def make(made: Rig, token_id: int) -> None:
    made.do(e.TokensMade(made.now, (R,), ((token_id,),), ((R, entry(token_id)),)))


def terminal(made: Rig) -> Terminal:
    record = made.one(e.Append).record
    assert isinstance(record, Terminal)
    return record


def test_each_part_tells_its_ids_and_the_record_all() -> None:
    made = running(rig())
    make(made, 5)
    assert made.parts() == [made.parts()[0]._replace(ids=(5,), logprobs=(entry(5),))]
    make(made, 6)
    assert made.parts()[0].logprobs == (entry(6),)
    made.attach(5)
    assert made.parts(H)[0].ids == (6,) and made.parts(H)[0].logprobs == (entry(6),)
    made.end(5, 6)
    assert terminal(made).logprobs == (entry(5), entry(6))


def test_who_does_not_ask_is_told_nothing() -> None:
    made = running(Rig())
    make(made, 5)
    assert made.parts()[0].logprobs == ()
    made.end(5)
    assert terminal(made).logprobs == ()


def test_what_is_made_before_the_claim_is_stored_waits_with_its_logprobs() -> None:
    made = rig()
    made.deliver()
    made.admit()
    make(made, 5)
    assert made.parts() == []
    made.stored()
    assert made.parts()[0].logprobs == (entry(5),)


def taken_over(made: Rig) -> Rig:
    """Redelivered, and its owner is silent."""
    made.deliver(count=2)
    made.read(Claim(Attempt(1), OTHER, b"body"))
    made.wait(0.25)
    made.stored()
    assert made.at(State.TAKEOVER)
    return made


def yes(made: Rig, gateway: GatewayId, ids: tuple[int, ...], told: tuple[TokenLogprobs, ...]) -> None:
    made.do(e.TakeoverAnswered(made.now, R, gateway, made.asked().attempt, ids, None, told))


def test_a_takeover_brings_along_what_the_gateway_was_told() -> None:
    made = taken_over(rig())
    yes(made, G, (5, 6), (entry(5), entry(6)))
    yes(made, H, (5,), (entry(5),))
    made.wait(0.25)
    assert made.at(State.RUNNING)
    make(made, 7)
    assert made.parts(G)[0].logprobs == (entry(7),)
    assert made.parts(H)[0].ids == (7,), "what it lacked was sent before"
    made.end(5, 6, 7)
    assert terminal(made).logprobs == (entry(5), entry(6), entry(7))


def test_the_second_gateway_is_told_what_the_first_had() -> None:
    made = taken_over(rig())
    yes(made, G, (5, 6), (entry(5), entry(6)))
    yes(made, H, (5,), (entry(5),))
    effects = made.wait(0.25)
    sent = [p for x in effects if isinstance(x, e.SendParts) and x.gateway == H for p in x.parts]
    assert [(p.ids, p.logprobs) for p in sent] == [((6,), (entry(6),))]


def test_ids_that_nobody_can_tell_of_are_marked() -> None:
    made = taken_over(rig())
    yes(made, G, (5, 6), ())
    made.wait(0.25)
    make(made, 7)
    made.attach(attempt=2)
    assert made.parts(H)[0].logprobs == (UNTOLD, UNTOLD, entry(7))
    made.end(5, 6, 7, reason=Reason.LENGTH)
    assert terminal(made).logprobs == (UNTOLD, UNTOLD, entry(7))


def test_forced_output_keeps_what_it_has_in_common() -> None:
    made = running(rig())
    make(made, 5)
    make(made, 6)
    made.attach(5, 9, gateway=H)
    make(made, 7)
    made.end(5, 9, 7, reason=Reason.LENGTH)
    assert terminal(made).logprobs == (entry(5), UNTOLD, entry(7))


PROMPT = PromptTold((2, 3), (entry(2), entry(3)))


def asking() -> Rig:
    made = Rig()
    made.request = replace(request(), prompt_ids=(1, 2, 3), sampling=Sampling(prompt_logprobs=1))
    return made


def begin(made: Rig, token_id: int) -> None:
    made.do(e.TokensMade(made.now, (R,), ((token_id,),), (), ((R, PROMPT),)))


def test_a_prompt_is_told_with_the_first_id_and_to_nobody_who_has_it() -> None:
    made = running(asking())
    begin(made, 5)
    assert [part.prompt for part in made.parts()] == [PROMPT]
    make(made, 6)
    assert [part.prompt for part in made.parts()] == [None]
    made.attach(5)
    assert [part.prompt for part in made.parts(H)] == [None]
    made.attach()
    assert [part.prompt for part in made.parts(H)] == [PROMPT], "who resumes with nothing is told all again"
    made.end(5, 6)
    assert terminal(made).prompt == PROMPT


def test_what_was_told_of_a_prompt_waits_for_the_claim_and_outlives_a_takeover() -> None:
    made = asking()
    made.deliver()
    made.admit()
    begin(made, 5)
    assert made.parts() == []
    made.stored()
    assert [part.prompt for part in made.parts()] == [PROMPT]
    made = taken_over(asking())
    made.do(e.TakeoverAnswered(made.now, R, G, made.asked().attempt, (5, 6), None, (), PROMPT))
    made.wait(0.25)
    make(made, 7)
    assert [part.prompt for part in made.parts(G)] == [None]
    made.attach(attempt=2)
    assert [part.prompt for part in made.parts(H)] == [PROMPT]
    made.end(5, 6, 7)
    assert terminal(made).prompt == PROMPT


def test_nothing_is_learnt_of_another_prompt_or_unasked() -> None:
    other = PromptTold((2, 4), PROMPT.entries)
    for made, told in ((taken_over(asking()), other), (taken_over(rig()), PROMPT)):
        made.do(e.TakeoverAnswered(made.now, R, G, made.asked().attempt, (5, 6), None, (), told))
        made.wait(0.25)
        made.attach(attempt=2)
        assert [part.prompt for part in made.parts(H)] == [None]
