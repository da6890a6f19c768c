"""Tokens that two vocabularies have in common."""

import dataclasses

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import specjax
from specjax.certificates.tiny import table_model
from specjax.checkpoints.common_tokens import common_tokens, same_tokens
from specjax.checkpoints.tokenizer import Tokenizer


def byte_level():
    """Tokens spelled in letters that stand for bytes."""
    words = ["a", "b", "Ġ", "c", "ab", "Ġab", "Ã", "¤", "Ã¤", "cc"]
    backend = tokenizers.Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [("a", "b"), ("Ġ", "ab"), ("Ã", "¤"), ("c", "c")])
    )
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|start|>", special=True)])
    return Tokenizer(backend, eos_token="<|end|>")


def sentence_piece():
    """Tokens spelled as they stand, with bytes for what is left, one of them beside the letter that it is."""
    words = ["<0x61>", "a", "▁ab", "ä", "<0xA4>", "b", "</s>"]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="b"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<|start|>", special=True)])
    return Tokenizer(backend, eos_token="</s>")


def test_by_what_tokens_mean():
    """Bytes, however they are spelled; the letter before the byte; what ends a text ends it; specials by name."""
    common = common_tokens(byte_level(), sentence_piece())
    #                                a  b  Ġ   c   ab  Ġab Ã   ¤  Ã¤ cc  end start
    assert common.said_as.tolist() == [1, 5, -1, -1, -1, 2, -1, 4, 3, -1, 6, 7]
    assert (common.num_common, common.share) == (7, 7 / 12)
    assert str(common) == "7 tokens are in both vocabularies: 58.3% of the target's 12, 87.5% of the draft's 8"
    back = common_tokens(sentence_piece(), byte_level())
    assert back.said_as.tolist() == [-1, 0, 5, 8, 7, 1, 10, 11]


def test_what_is_read_in_place_of_a_token():
    """The last of its text; for a piece of a character, or a special one, what a sequence begins or ends with."""
    common = common_tokens(byte_level(), sentence_piece())
    a, b, end = 1, 5, 6
    assert common.read_as[4] == b  # "ab" is a, b there
    assert common.read_as[0] == a
    assert common.read_as[6] == end
    assert ((common.read_as >= 0) & (common.read_as < 8)).all()


def test_models():
    def model(words):
        tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, words[0])))
        return dataclasses.replace(table_model(len(words), seed=0), tokenizer=tokenizer, name=words)

    target, draft, other = model("abcd"), model("dxa"), model("wxyz")
    dressed, common = specjax.in_vocabulary_of(target, draft)
    assert common.said_as.tolist() == [2, -1, -1, 0]
    assert (dressed.vocab_size, dressed.tokenizer, dressed.stop_token_ids) == (4, target.tokenizer, target.stop_token_ids)
    assert same_tokens(target, dressed)
    assert not same_tokens(target, draft)
    for completion in specjax.generate(target, [[0, 1], [2]], specjax.SamplingParams(max_tokens=6, seed=1),
                                       specjax.drafters.draft_model(dressed, 2)):  # fmt: skip
        assert completion.stats.num_draft_tokens > 0
    with pytest.raises(ValueError, match=r"different tokenizers: id 0 .*; specjax.in_vocabulary_of\(target, draft\) makes"):
        specjax.generate(target, [[0]], drafter=specjax.drafters.draft_model(draft, 2))
    with pytest.raises(ValueError, match="target abcd and the draft wxyz have too little in common: 0 tokens"):
        specjax.in_vocabulary_of(target, other, least_share=0)
    with pytest.raises(ValueError, match=r"50.0% of the target's 4.*; at least 60.0% of the target's are needed"):
        specjax.in_vocabulary_of(target, draft, least_share=0.6)
    with pytest.raises(ValueError, match="least_share is 2; it must be from 0 to 1"):
        specjax.in_vocabulary_of(target, draft, least_share=2)
    with pytest.raises(ValueError, match=r"draft \(dxa\) has no tokenizer"):
        specjax.in_vocabulary_of(target, dataclasses.replace(draft, tokenizer=None))
