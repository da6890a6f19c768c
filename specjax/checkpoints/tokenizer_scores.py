"""SentencePiece's byte-pair vocabularies, as GGUF files carry them: tokens with scores, and no merges.

SentencePiece joins, of all neighbours that make a token together, those whose token has the highest score, the leftmost first; so
the scores say which merges there are and in which order.
"""

import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers import models as tokenizer_models

SPACE = "\u2581"
"""What stands for a space in tokens."""


def merges_of(scores: dict[str, float]) -> list[tuple[str, str]]:
    """The merges of tokens with these scores, the first to be done first.

    Example:
      >>> merges_of({"a": -3.0, "b": -4.0, "ab": 0.0, "aab": -1.0})
      [('a', 'b'), ('a', 'ab')]
    """
    ranked = []
    for place, (token, score) in enumerate(scores.items()):
        for split in range(1, len(token)):
            left, right = token[:split], token[split:]
            if left in scores and right in scores:
                ranked.append((-score, place, left, right))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def backend_of_scores(
    vocabulary: dict[str, int], scores: dict[str, float], unknown: str | None, space_before: bool, added: list[AddedToken]
) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary with scores.

    Args:
      vocabulary: token to id, of all tokens.
      scores: of the tokens that are made by merging.
      unknown: the token for characters that the vocabulary has not, where it has no bytes.
      space_before: whether a text is read as if a space stood before it; so is the text behind a special token.
      added: tokens that are looked for in a text before anything else.
    """
    has_bytes = "<0x00>" in vocabulary
    model = tokenizer_models.BPE(
        vocabulary, merges_of(scores), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes, ignore_merges=False
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if space_before else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_before else steps)
    backend.add_tokens(added)
    return backend
