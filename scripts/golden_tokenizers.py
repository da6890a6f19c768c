"""The reference tokenizers of ``golden_values.py``, made of what GGUF files hold."""

import struct
import unicodedata

import gguf
import sentencepiece
import tokenizers
from golden_texts import CODE, CONVERSATIONS, HARD_TEXTS
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer


def reference_tokenizer(path, name):
    """The tokenizer with vocabulary and merges of the GGUF, split as in the model's own tokenizer.json.

    transformers' conversion of a GGUF leaves out what the file cannot say: for SmolLM2 that digits are single tokens, for
    Qwen2.5 the NFC normaliser.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    converted = tokenizers.Tokenizer.from_str(backend.to_str())
    if name.startswith("smollm2"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        note = "pre-tokenizer Digits(individual) then ByteLevel; transformers' GGUF conversion has ByteLevel alone"
    else:
        backend.normalizer = normalizers.NFC()
        note = "normaliser NFC; transformers' GGUF conversion has none; its pre-tokenizer (Split, ByteLevel) is the model's own"
    return tokenizer, converted, note


def wire(number, value):
    """One field of a protocol buffer: a whole number, a float32, or bytes."""

    def varint(value):
        low, rest = value & 127, value >> 7
        return bytes([low | 128]) + varint(rest) if rest else bytes([low])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece_of(path):
    """SentencePiece itself over the tokens, scores and kinds of a GGUF file, and the id of the token that begins a text."""
    found = {}
    for name, field in gguf.GGUFReader(path).fields.items():
        if name.startswith("tokenizer.ggml."):
            found[name.removeprefix("tokenizer.ggml.")] = field.contents()
    normal, unknown, user_defined = 1, 2, 4
    pieces = b""
    for id, (token, score, kind) in enumerate(zip(found["tokens"], found["scores"], found["token_type"], strict=True)):
        kind = unknown if id == found["unknown_token_id"] else kind
        token = token.replace(" ", "\u2581") if kind == user_defined else token
        piece = wire(1, token.encode()) + wire(2, float(score)) + (wire(3, kind) if kind != normal else b"")
        pieces += wire(1, piece)
    byte_pairs = 2
    trainer = wire(3, byte_pairs) + wire(35, 1)
    for number, name in ((40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")):
        trainer += wire(number, found[f"{name}_token_id"])
    normaliser = wire(1, b"identity") + wire(3, int(found.get("add_space_prefix", True))) + wire(4, 0) + wire(5, 1)
    processor = sentencepiece.SentencePieceProcessor(model_proto=pieces + wire(2, trainer) + wire(3, normaliser))
    return processor, found["bos_token_id"]


def by_sentencepiece(path):
    """What SentencePiece makes of the texts, and what encodes others.

    There is no other reference for a file without a tokenizer.json beside it.
    """
    processor, bos = sentencepiece_of(path)
    texts = [{"text": text, "ids": processor.encode(text)} for text in [*HARD_TEXTS, CODE]]
    for entry in texts:
        if (back := processor.decode(entry["ids"])) != entry["text"]:
            print(f"  tokenizer: {entry['text'][:40]!r} comes back as {back[:40]!r}")
    note = f"SentencePiece {sentencepiece.__version__} over the file's tokens, scores and kinds"
    return {"reference": note, "texts": texts, "conversations": []}, lambda text: [bos, *processor.encode(text)]


def by_tokenizer(tokenizer, converted, note):
    """What the tokenizer makes of texts and conversations, and what encodes others."""

    def encode(text):
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    texts = [{"text": text, "ids": encode(text)} for text in [*HARD_TEXTS, CODE]]
    differing = sum(entry["ids"] != converted.encode(entry["text"], add_special_tokens=False).ids for entry in texts)
    print(f"  tokenizer: {differing} of {len(texts)} texts differ from transformers' own conversion")
    for entry in texts:
        back = tokenizer.backend_tokenizer.decode(entry["ids"], skip_special_tokens=False)
        if back not in (entry["text"], unicodedata.normalize("NFC", entry["text"])):
            print(f"  tokenizer: {entry['text'][:40]!r} comes back as {back[:40]!r}")
    chats = []
    for title, messages in CONVERSATIONS.items():
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        chats.append({"name": title, "messages": messages, "text": text, "ids": encode(text)})
    return {"reference": note, "texts": texts, "conversations": chats}, encode
