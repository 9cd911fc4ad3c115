"""Text to tokens, by the tokenizer in the model's card.

Rules: texts are measured before they are encoded; what may take long is encoded beside the loop, one text at
a time, so that streams keep their pace. Special tokens in a text count as such, as `transformers` has it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from chassis.messages.card import ModelCard
from gateway.admission import invalid

T = TypeVar("T")


class TextTokenizer:
    """Raises ValueError when the card's tokenizer cannot be read."""

    def __init__(self, card: ModelCard) -> None:
        from tokenizers import Tokenizer  # takes 50 ms, and only gateways that see text need it

        try:
            self._tokenizer = Tokenizer.from_buffer(card.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer of model {card.name}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        bos = self._tokenizer.token_to_id(card.bos_token) if card.add_bos and card.bos_token else None
        self._bos: tuple[int, ...] = () if bos is None else (bos,)

    def encode(self, text: str, add_bos: bool) -> tuple[int, ...]:
        """Blocks; lets other threads run meanwhile. Raises Status."""
        try:
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise invalid(f"prompt: cannot be tokenized: {error}") from error
        ids = tuple(encoding.ids)
        return self._bos + ids if add_bos and self._bos != ids[:1] else ids


class Encoder:
    """Encodes at once what is short and on one thread of its own what is long."""

    def __init__(self, inline_bytes_max: int) -> None:
        self._inline_bytes_max = inline_bytes_max
        self._thread: ThreadPoolExecutor | None = None

    async def encode(self, tokenizer: TextTokenizer, text: str, add_bos: bool) -> tuple[int, ...]:
        """Raises Status."""
        return await self.run(len(text.encode()), lambda: tokenizer.encode(text, add_bos))

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Any work whose length is that of `size_bytes` bytes of text."""
        if size_bytes <= self._inline_bytes_max:
            return work()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "encode")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
