"""Token ids to text, piece by piece."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) a character."""


class IncrementalDecoder:
    """Turns a growing list of ids into pieces of text that join to the text of the whole.

    A token is not a piece of text: a character may be spread over several tokens, and a token may read differently behind
    another (a space that only stands between words). So the newest tokens are always decoded together with the ones before
    them, and a piece is held back while it ends in an unfinished character.

    Args:
      decode: from ids to text.

    Example:
      >>> decoder = IncrementalDecoder(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
      >>> [decoder.push([byte]) for byte in "né".encode()]
      ['n', '', 'é']
      >>> decoder.finish()
      ''
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        # Text of ids[:read] has been given out; ids[context:read] are decoded again as the left context of what follows.
        self._context = 0
        self._read = 0

    def push(self, ids: Sequence[int]) -> str:
        """Takes in ids and returns the text that is now certain, which may be empty."""
        self._ids.extend(ids)
        return self._advance(final=False)

    def finish(self) -> str:
        """The rest of the text; an unfinished character becomes U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._ids[self._context : self._read])
        after = self._decode(self._ids[self._context :])
        if not final and after.endswith(REPLACEMENT):
            return ""
        if not after.startswith(before):
            # The left context reads differently now; the whole text is the only safe reference.
            before = self._decode(self._ids[: self._read])
            after = self._decode(self._ids)
        piece = after[len(before) :]
        if piece:
            self._context = self._read
        # Ids without text (special tokens) are no left context: behind them a space would be taken for a leading one.
        self._read = len(self._ids)
        return piece
