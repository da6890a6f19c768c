"""Which tokens two vocabularies have in common, and a draft model behind its target's."""

import dataclasses
import re

import numpy as np

from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models.loaded import Model
from specjax.models.other_vocabulary import MISSING, with_other_ids

LEAST_SHARE = 0.1
"""Share of the target's tokens that a draft model must have, unless told otherwise."""


@dataclasses.dataclass(frozen=True, eq=False)
class CommonTokens:
    """Ids of a draft's vocabulary for each id of a target's.

    Attributes:
      said_as: [V] int32, the draft's id of the same token; -1 where it has none.
      read_as: [V] int32, the same, and where there is none, the id that stands in for the token when the draft reads it: the last
        one of the token's text.
      draft_size: ids of the draft's vocabulary.
    """

    said_as: np.ndarray = dataclasses.field(repr=False)
    read_as: np.ndarray = dataclasses.field(repr=False)
    draft_size: int

    @property
    def num_common(self) -> int:
        """Tokens that both have."""
        return int(np.sum(self.said_as != MISSING))

    @property
    def share(self) -> float:
        """Share of the target's tokens that the draft has."""
        return self.num_common / len(self.said_as)

    def __str__(self):
        return (
            f"{self.num_common:,} tokens are in both vocabularies: {self.share:.1%} of the target's {len(self.said_as):,}, "
            f"{self.num_common / self.draft_size:.1%} of the draft's {self.draft_size:,}"
        )


def common_tokens(target: Tokenizer, draft: Tokenizer) -> CommonTokens:
    """Finds the tokens of ``target`` that ``draft`` has.

    Ordinary tokens are the same if they add the same bytes to a text, however their vocabulary spells them; special ones if they
    are spelled alike, and so are the two that begin a sequence and the two that end it.

    Raises:
      ValueError: one of the tokenizers spells its tokens in an unknown way.

    Example:
      >>> import tokenizers
      >>> from tokenizers import models
      >>> one, two = (Tokenizer(tokenizers.Tokenizer(models.WordLevel(words, unk_token="a")))
      ...             for words in ({"a": 0, "b": 1, "c": 2}, {"c": 0, "a": 1}))
      >>> common = common_tokens(one, two)
      >>> common.said_as.tolist(), str(common)
      ([1, -1, 0], "2 tokens are in both vocabularies: 66.7% of the target's 3, 100.0% of the draft's 2")
    """
    theirs = _ids_by_meaning(draft)
    said_as = np.full(target.size, MISSING, np.int32)
    for meaning, id in _ids_by_meaning(target).items():
        said_as[id] = theirs.get(meaning, MISSING)
    taken = set(said_as.tolist())
    for our, their in ((target.bos_token_id, draft.bos_token_id), (target.eos_token_id, draft.eos_token_id)):
        if our is not None and their is not None and said_as[our] == MISSING and their not in taken:
            said_as[our] = their
            taken.add(their)
    return CommonTokens(said_as, _read_as(target, draft, said_as), draft.size)


def _ids_by_meaning(tokenizer: Tokenizer) -> dict[bytes | str, int]:
    """Ids by what they mean: the bytes of ordinary tokens, the spelling of special ones."""
    spellings = tokenizer.vocabulary()
    ids: dict[bytes | str, int] = {}
    # A vocabulary may have a token twice, as itself and as the byte that it is made of: the last that is written here counts.
    in_order = sorted(range(len(spellings)), key=lambda id: (_is_byte(spellings[id]), id), reverse=True)
    contents = tokenizer.token_bytes()
    for id in in_order:
        spelling, content = spellings[id], contents[id]
        if spelling is not None and content != b"":
            ids[spelling if content is None else content] = id
    return ids


def _is_byte(spelling: str | None) -> bool:
    return spelling is not None and re.fullmatch("<0x[0-9A-F]{2}>", spelling) is not None


def _read_as(target: Tokenizer, draft: Tokenizer, said_as: np.ndarray) -> np.ndarray:
    stand_in = next((id for id in (draft.bos_token_id, draft.eos_token_id) if id is not None), 0)
    contents = target.token_bytes()
    missing = np.flatnonzero(said_as == MISSING)
    texts = [(contents[id] or b"").decode(errors="ignore") for id in missing]
    encoded = draft.backend.encode_batch(texts, add_special_tokens=False)
    read_as = said_as.copy()
    read_as[missing] = [encoding.ids[-1] if encoding.ids else stand_in for encoding in encoded]
    return read_as


def same_tokens(target: Model, draft: Model) -> bool:
    """Whether every id means the same to both, or one of them has no tokenizer to tell."""
    if target.tokenizer is None or draft.tokenizer is None:
        return True
    return target.tokenizer.vocabulary() == draft.tokenizer.vocabulary()


def in_vocabulary_of(target: Model, draft: Model, least_share: float = LEAST_SHARE) -> tuple[Model, CommonTokens]:
    """A draft model of another vocabulary behind the ids of its target, for ``specjax.drafters.draft_model``.

    It drafts the tokens that both have, q restricted to them and renormalised (Timor et al. 2025, arXiv:2502.05202, section
    4.3), so the output keeps the target's distribution. The fewer they are, the less it can be right.

    Args:
      target: the model whose ids are used.
      draft: the model that drafts.
      least_share: share of the target's tokens that ``draft`` must have, 0 to 1.

    Returns:
      The draft model with the target's tokenizer, and the tokens in common, which print as a line.

    Raises:
      ValueError: a model has no tokenizer, or fewer tokens than ``least_share`` are in common.

    Example:
      >>> import tokenizers
      >>> from tokenizers import models
      >>> from specjax.certificates.tiny import table_model
      >>> target, draft = (
      ...     dataclasses.replace(table_model(3, seed=0), tokenizer=Tokenizer(tokenizers.Tokenizer(models.WordLevel(words, "a"))))
      ...     for words in ({"a": 0, "b": 1, "c": 2}, {"c": 0, "a": 1, "d": 2}))
      >>> dressed, common = in_vocabulary_of(target, draft)
      >>> dressed.tokenizer is target.tokenizer, common.num_common
      (True, 2)
    """
    for name, model in (("target", target), ("draft", draft)):
        if model.tokenizer is None:
            raise ValueError(f"in_vocabulary_of: {name} ({model.name}) has no tokenizer, so it is not known what its ids mean")
    if isinstance(least_share, bool) or not isinstance(least_share, (int, float)) or not 0 <= least_share <= 1:
        raise ValueError(f"in_vocabulary_of: least_share is {least_share!r}; it must be from 0 to 1")
    assert target.tokenizer is not None
    assert draft.tokenizer is not None
    common = common_tokens(target.tokenizer, draft.tokenizer)
    if common.num_common == 0 or common.share < least_share:
        raise ValueError(
            f"the vocabularies of the target {target.name} and the draft {draft.name} have too little in common: {common}; "
            f"at least {least_share:.1%} of the target's are needed"
        )
    same = {"tokenizer": target.tokenizer, "stop_token_ids": target.stop_token_ids}
    return with_other_ids(draft, common.read_as, common.said_as, **same), common
