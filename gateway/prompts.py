"""What of a call is text, in ids: its prompt, and the words it does not want to hear."""

from chassis.messages.gateway import GenerateCall
from gateway.admission import invalid
from gateway.models import Model
from gateway.sampling import BadWords, forms_of
from gateway.tokenizer import Encoder


async def ids_of_prompt(call: GenerateCall, model: Model, encoder: Encoder, wall_ns: int) -> tuple[int, ...]:
    """Raises Status."""
    if call.token_ids is not None:
        return call.token_ids
    if model.tokenizer is None:
        raise invalid(f"input: model {model.name} has no tokenizer; give token_ids")
    if call.prompt is not None:
        return await encoder.encode(model.tokenizer, call.prompt, add_bos=True)
    if model.template is None:
        raise invalid(f"chat: model {model.name} has no chat template; give a prompt")
    text = model.template.render(call.chat or (), wall_ns, call.tools)
    return await encoder.encode(model.tokenizer, text, add_bos=False)


async def ids_of_bad_words(call: GenerateCall, model: Model, encoder: Encoder) -> BadWords:
    """All their forms. Raises Status."""
    if model.tokenizer is None:
        raise invalid(f"bad_words: model {model.name} has no tokenizer")
    encoded = [
        await encoder.encode(model.tokenizer, form, add_bos=False) for form in forms_of(call.bad_words)
    ]
    size = model.card.vocab_size  # tokenizers may know more: those are never drawn
    return tuple(dict.fromkeys(ids for ids in encoded if ids and max(ids) < size))
