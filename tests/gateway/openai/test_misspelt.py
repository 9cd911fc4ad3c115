"""Which unknown fields are taken for a misspelt one: nothing that a client of another engine may send."""

import pytest

from chassis.errors import Status
from gateway.openai.call import parse_body
from gateway.openai.misspelt import check_spelling
from gateway.openai.schema import ChatRequest, CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "x"}]}
# of OpenAI's API, vLLM, SGLang, TGI, llama.cpp, OpenRouter: known there, nothing here
THEIRS = """
add_generation_prompt add_special_tokens audio bootstrap_host cache_prompt cache_salt chat_template
chat_template_kwargs continue_final_message detokenize documents dynatemp_range ebnf extra_body function_call
functions grammar guided_decoding_backend guided_whitespace_pattern id_slot include_reasoning
include_stop_str_in_output json_schema kv_transfer_params length_penalty logits_processors lora_path metadata
mirostat mirostat_tau modalities mm_processor_kwargs models n_keep n_predict n_probs no_stop_trim plugins
prediction presence prompt_cache_key prompt_cache_retention provider reasoning reasoning_effort regex
repeat_last_n repeat_penalty request_id response_fields return_tokens_as_token_ids return_hidden_states route
safety_identifier samplers separate_reasoning service_tier session_params skip_special_tokens
spaces_between_special_tokens stop_regex store stream_reasoning thinking tfs_z timings_per_token top_a
top_n_sigma transforms truncate_prompt_tokens typ_p use_beam_search user verbosity vllm_xargs
web_search_options xtc_probability
""".split()


@pytest.mark.parametrize("field", THEIRS)
def test_what_others_know_is_ignored(field: str) -> None:
    assert parse_body({**CHAT, "model": "m", field: 1}, ChatRequest).model == "m"
    assert parse_body({"prompt": "x", "model": "m", field: 1}, CompletionRequest).model == "m"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("topP", "top_p"),
        ("top_logprob", "top_logprobs"),
        ("respose_format", "response_format"),
        ("stops", "stop"),
        ("strem", "stream"),
        ("tool_choise", "tool_choice"),
    ],
)
def test_what_is_misspelt_is_refused_with_the_name_that_is_meant(written: str, meant: str) -> None:
    with pytest.raises(Status, match=rf"^{written}: unknown; did you mean {meant}\?$"):
        parse_body({**CHAT, written: 1}, ChatRequest)


def test_a_missing_field_that_is_misspelt_is_named_as_it_was_written() -> None:
    with pytest.raises(Status, match="^mesages: unknown; did you mean messages"):
        parse_body({"mesages": CHAT["messages"]}, ChatRequest)


def test_beside_the_field_itself_it_is_another_one() -> None:
    assert parse_body({**CHAT, "max_tokens": 3, "max_token": 4}, ChatRequest).max_tokens == 3


def test_many_and_long_names_are_not_looked_at() -> None:
    many = {f"unknown{number}": 1 for number in range(1000)}
    assert parse_body({**CHAT, **many, "max_token": 1, "max_tokens" + "s" * 100: 1}, ChatRequest)
    assert parse_body({**CHAT, "n_": 1, "": 1}, ChatRequest)


def test_a_body_with_every_field_there_is_has_none_to_be_meant() -> None:
    check_spelling({"prompt": "x", "model": "m", "unknown": 1}, ("prompt", "model"))
