"""Text to token ids and back, and the model's chat template."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence

import tokenizers
from tokenizers import processors

from specjax.checkpoints import chat

REMEDY = "specjax.in_vocabulary_of(target, draft) makes a draft of the tokens that both have"


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer of the ``tokenizers`` library with what surrounds it in a checkpoint.

    Attributes:
      backend: does the work.
      bos_token: beginning of sequence, as text; None where the model has none.
      eos_token: end of sequence or turn, as text; None where the model has none.
      chat_template: jinja2 source; None where the model has none.
      special_tokens: what templates may refer to (``pad_token``, ...) beside the two above.

    Example:
      >>> from tokenizers import models
      >>> backend = tokenizers.Tokenizer(models.WordLevel({"hello": 0, "[unk]": 1}, unk_token="[unk]"))
      >>> tokenizer = Tokenizer(backend)
      >>> tokenizer.encode("hello"), tokenizer.decode([0]), tokenizer.size
      ([0], 'hello', 2)
    """

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        # A tokenizer.json may carry the cutting and padding of somebody's training run.
        self.backend.no_truncation()
        self.backend.no_padding()
        for name, token in (("bos_token", self.bos_token), ("eos_token", self.eos_token)):
            if token is not None and self.backend.token_to_id(token) is None:
                raise ValueError(f"tokenizer: {name} is {token!r}, which is not in the vocabulary")

    @functools.cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @property
    def bos_token_id(self) -> int | None:
        """Id of ``bos_token``."""
        return None if self.bos_token is None else self.backend.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of ``eos_token``."""
        return None if self.eos_token is None else self.backend.token_to_id(self.eos_token)

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``decode`` leaves out."""
        return frozenset(id for id, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def vocabulary(self) -> list[str | None]:
        """The tokens by id, as the vocabulary spells them; None at an id without a token."""
        tokens: list[str | None] = [None] * self.size
        for token, id in self.backend.get_vocab(with_added_tokens=True).items():
            tokens[id] = token
        return tokens

    def token_bytes(self) -> list[bytes | None]:
        """What every id adds to a text, as UTF-8 (a character may be spread over several); None for special ones and empty ids.

        Raises:
          ValueError: the tokenizer spells its tokens in an unknown way.
        """
        decoder = json.loads(self.backend.to_str())["decoder"] or {"type": "Fuse"}
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        spelled = {step["type"] for step in steps}
        known = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
        if not spelled <= known:
            raise ValueError(f"tokenizer: how {sorted(spelled - known)} spells tokens is not known")
        if "ByteLevel" in spelled:
            letters = _byte_letters()

            def spelling(token):
                return bytes(letters[letter] for letter in token)
        else:
            spaces = next((s["pattern"].get("String") for s in steps if s["type"] == "Replace"), None)
            spaces = next((s["replacement"] for s in steps if s["type"] == "Metaspace"), spaces)

            def spelling(token):
                if "ByteFallback" in spelled and re.fullmatch("<0x[0-9A-F]{2}>", token):
                    return bytes([int(token[3:5], 16)])
                return (token.replace(spaces, " ") if spaces else token).encode()

        added = self.backend.get_added_tokens_decoder()
        result: list[bytes | None] = []
        for id, token in enumerate(self.vocabulary()):
            if token is None or id in self.special_token_ids:
                result.append(None)
            else:
                # Tokens that were added are written as they stand.
                result.append(token.encode() if id in added else spelling(token))
        return result

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
          text: special tokens written out in it become their ids.
          add_special_tokens: whether to add what the model wants around a text, such as a beginning-of-sequence token.

        Raises:
          ValueError: ``text`` is not a string of valid Unicode.
        """
        if not isinstance(text, str):
            raise ValueError(f"text is {text!r:.80}; it must be a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise ValueError(f"text has half of a surrogate pair, {half!r}, at {error.start}; that is no character") from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no character become U+FFFD.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        ids = [int(id) for id in ids]
        for id in ids:
            if not 0 <= id < self.size:
                raise ValueError(f"token id {id} is outside the vocabulary, 0 to {self.size - 1}")
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping], add_generation_prompt: bool = True) -> str:
        """Prompt text of a conversation.

        Args:
          messages: dicts with ``role`` (system, developer, user, assistant, tool) and ``content``.
          add_generation_prompt: whether to end with the opening of the assistant's turn.

        Raises:
          ValueError: the model has no chat template, or the messages are malformed or refused by it.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template; give the prompt as text or ids")
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token, **self.special_tokens}
        known = {name: token for name, token in tokens.items() if token is not None}
        return chat.render(self.chat_template, messages, add_generation_prompt, known)

    def encode_chat(self, messages: Sequence[Mapping], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation; see :meth:`render_chat`.

        The template writes the special tokens itself, so none are added again.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def check_same(self, draft: "Tokenizer") -> None:
        """Raises a ValueError unless every id means the same in ``draft``; see :func:`compare_tokenizers`."""
        compare_tokenizers(self, draft)


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies: itself where it can be printed, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def surround(backend: tokenizers.Tokenizer, bos_token: str | None, eos_token: str | None) -> None:
    """Makes ``encode`` put ``bos_token`` before and ``eos_token`` behind a text; None: nothing there."""
    tokens = [token for token in (bos_token, eos_token) if token is not None]
    template = " ".join([*([f"{bos_token}:0"] if bos_token else []), "$A:0", *([f"{eos_token}:0"] if eos_token else [])])
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(tokens)]
    )


def compare_tokenizers(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises a ValueError unless every id means the same in both.

    The widths of the models' logits play no part: they may be padded differently.

    Raises:
      ValueError: names the first differing id and both tokens, or both sizes where one has ids that the other lacks.

    Example:
      >>> from tokenizers import models
      >>> one, two = (Tokenizer(tokenizers.Tokenizer(models.WordLevel(words, unk_token="a")))
      ...             for words in ({"a": 0, "b": 1}, {"a": 0, "c": 1}))
      >>> compare_tokenizers(one, two)
      Traceback (most recent call last):
      ValueError: target and draft have different tokenizers: id 1 is 'b' in the target and 'c' in the draft; ...
    """
    if target is draft:
        return
    ours, theirs = target.vocabulary(), draft.vocabulary()
    for id, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            raise ValueError(
                f"target and draft have different tokenizers: id {id} is {our!r} in the target and {their!r} in the draft; "
                f"{REMEDY}"
            )
    if len(ours) != len(theirs):
        raise ValueError(
            f"target and draft have different tokenizers: {len(ours)} ids in the target and {len(theirs)} in the draft; {REMEDY}"
        )
