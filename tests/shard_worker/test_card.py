"""The tokenizer that a card carries cuts text as the model's own does, and its bytes are the text."""

import hashlib
import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from chassis.messages.card import ModelCard, parse_card
from shard_worker.card import card_of
from shard_worker.executor import LoadFailed
from shard_worker.weights import find_model, open_checkpoint
from tests.shard_worker import tiny_gguf, tiny_models

DIGEST = "ab" * 32
TEXTS = [
    "Hello world",
    "don't  do\n\n that   I'LL we'll 's",
    "日本語テキスト 🙂👩‍👩‍👧 naïve café e\u0301",
    "  leading and trailing  ",
    "tabs\tand\r\nnew lines\n",
    "\u00a0nbsp\u3000 \x00\x01",
    "e=mc^ -- !!! ???",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>x<|im_start",
    "",
    " ",
]

FROZEN_IDS = "2162703a98b7e277f67d86b578ac520a7c2301f910310c25dc5f8fd18eb6a3aa"


@pytest.fixture(scope="module")
def smollm2() -> ModelCard:
    return parse_card(card_of(open_checkpoint(find_model("smollm2")), "smollm2", DIGEST))


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelCard) -> Tokenizer:
    return Tokenizer.from_str(smollm2.tokenizer_json.decode())


@pytest.fixture(scope="module")
def theirs() -> Any:
    folder, file = os.path.split(find_model("smollm2"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tiny_models.transformers().AutoTokenizer.from_pretrained(folder, gguf_file=file)


def test_facts(smollm2: ModelCard) -> None:
    assert (smollm2.name, smollm2.model_digest) == ("smollm2", DIGEST)
    assert (smollm2.vocab_size, smollm2.num_layers, smollm2.context_len_max) == (49152, 30, 8192)
    assert smollm2.eos_ids == (2, 0)
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert smollm2.chat_template.startswith("{% for message in messages %}")
    assert json.loads(smollm2.config_json)["llama.block_count"] == 30


def test_cuts_text_as_frozen(tokenizer: Tokenizer) -> None:
    """The ids are those of the comparison below, which takes long to set up."""
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert hashlib.sha256(repr(ids).encode()).hexdigest() == FROZEN_IDS


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_cuts_text_as_transformers_does(tokenizer: Tokenizer, theirs: Any, text: str) -> None:
    assert (
        tokenizer.encode(text, add_special_tokens=False).ids
        == theirs(text, add_special_tokens=False).input_ids
    )


@pytest.mark.slow
def test_cuts_random_text_as_transformers_does(tokenizer: Tokenizer, theirs: Any) -> None:
    draw = random.Random(1)
    pieces = [
        "a",
        "B",
        " ",
        "  ",
        "\n",
        "é",
        "日",
        "🙂",
        "'s",
        ".",
        "!",
        "\t",
        "_",
        "the",
        " of",
        "<|im_end|>",
        "\u0301",
    ]
    for _ in range(400):
        text = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 20)))
        assert (
            tokenizer.encode(text, add_special_tokens=False).ids
            == theirs(text, add_special_tokens=False).input_ids
        )


def test_every_digit_stands_alone(tokenizer: Tokenizer) -> None:
    """As the model was trained; transformers leaves that out when it converts GGUF."""
    assert tokenizer.encode("in 1987,  42").tokens == ["in", "Ġ", "1", "9", "8", "7", ",", "ĠĠ", "4", "2"]


def test_bytes_of_tokens_are_the_text(smollm2: ModelCard, tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        assert smollm2.token_bytes.join(ids) == decoded.encode()
    assert all(smollm2.token_bytes[i] == b"" for i in range(3))
    assert smollm2.token_bytes[tokenizer.encode(" of").ids[0]] == b" of"


def test_a_folder_brings_its_own(tmp_path: Path) -> None:
    tiny_models.make(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 7]}')
    card = parse_card(card_of(open_checkpoint(tmp_path), "tiny", DIGEST))
    assert card.tokenizer_json == (tmp_path / "tokenizer.json").read_bytes()
    assert (card.bos_token, card.eos_token, card.eos_ids) == ("<bos>", "<eos>", (257, 7))
    assert (card.chat_template, card.vocab_size) == ("{{ messages }}", 300)
    assert json.loads(card.config_json)["hidden_size"] == 48
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "generation_config.json").unlink()
    settings = {"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    card = parse_card(card_of(open_checkpoint(tmp_path), "tiny", DIGEST))
    assert (card.chat_template, card.eos_ids) == ("d", (257,))


def test_a_gguf_file_of_the_same_model_gives_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_models.make(tmp_path)
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(model, path, tokenizer=tmp_path / "tokenizer.json")
    ours = parse_card(card_of(open_checkpoint(path), "tiny", DIGEST))
    theirs = parse_card(card_of(open_checkpoint(tmp_path), "tiny", DIGEST))
    text = "c<eos>hé 1 日"
    ids = [Tokenizer.from_str(c.tokenizer_json.decode()).encode(text).ids for c in (ours, theirs)]
    assert ids[0] == ids[1]
    assert [ours.token_bytes[i] for i in range(258)] == [theirs.token_bytes[i] for i in range(258)]
    assert Tokenizer.from_str(ours.tokenizer_json.decode()).encode("abc").ids[0] == 258


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_models.make(tmp_path)
    for content in ('{"model": {}}', "[]", "{"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(LoadFailed, match="the tokenizer can't be read"):
            card_of(open_checkpoint(tmp_path), "tiny", DIGEST)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(LoadFailed, match=r"tokenizer\.json can't be read"):
        card_of(open_checkpoint(tmp_path), "tiny", DIGEST)
