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
        # Characters of the text of ids[read:] that have been given out: those before an unfinished one.
        self._given = 0

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
        if not after.startswith(before):
            # The left context reads differently now; the whole text is the only safe reference.
            before = self._decode(self._ids[: self._read])
            after = self._decode(self._ids)
        text = after[len(before) :]
        certain = text if final else text.rstrip(REPLACEMENT)
        piece = certain[self._given :]
        if len(certain) < len(text):
            self._given = max(self._given, len(certain))
            return piece
        if text:
            self._context = self._read
        # Ids without text (special tokens) are no left context: behind them a space would be taken for a leading one.
        self._read = len(self._ids)
        self._given = 0
        return piece


class CompletionText:
    """The text of a completion in the making, up to the first stop string.

    Stop strings are looked for in the text alone, so it does not matter how they fall on tokens, nor how the tokens fall on
    calls of :meth:`push`. The match that is complete first wins; of two that are complete at the same character, the longer.

    Args:
      decode: from ids to text.
      stop: strings that end the text; not empty.
      include_stop: whether the text keeps the stop string that ended it.
      min_tokens: a stop string that is complete within the first ``min_tokens`` tokens ends nothing.

    Example:
      >>> text = CompletionText(lambda ids: bytes(ids).decode(), stop=["</a>"])
      >>> text.push(b"x</"), text.take()   # "</" may be the beginning of the stop string
      (3, 'x')
      >>> text.push(b"b></a>yz"), text.take(), text.stopped
      (6, '</b>', True)
      >>> text.whole
      'x</b>'
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        self._decoder = IncrementalDecoder(decode)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._taken = 0
        self._finished = False
        self.whole = ""
        """The text so far, without what follows a stop string."""
        self.stopped = False
        """Whether a stop string has ended the text."""

    def push(self, ids: Sequence[int]) -> int:
        """Takes in ids up to the one that completes a stop string, and returns how many these are."""
        for count, token in enumerate(ids):
            if self.stopped:
                return count
            self._num_tokens += 1
            self._add(self._decoder.push([token]))
        return len(ids)

    def take(self) -> str:
        """The text that has become certain since the last call; a tail that may begin a stop string is held back."""
        end = len(self.whole) - (0 if self._finished or self.stopped else self._num_held_back())
        piece = self.whole[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def finish(self) -> None:
        """No ids follow: what is held back is certain now."""
        if not self.stopped:
            self._add(self._decoder.finish())
        self._finished = True

    def _add(self, piece: str) -> None:
        old = len(self.whole)
        self.whole += piece
        if not piece or self._num_tokens <= self._min_tokens:
            return
        # Only matches that end in the new piece; earlier ones have been found, or came too early to count.
        begins = [(self.whole.find(stop, max(0, old - len(stop) + 1)), len(stop)) for stop in self._stop]
        found = [(begin + size, begin) for begin, size in begins if begin >= 0]
        if found:
            end, begin = min(found)
            self.whole = self.whole[: end if self._include_stop else begin]
            self.stopped = True

    def _num_held_back(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        if self._include_stop:
            return 0
        return max(
            (size for stop in self._stop for size in range(1, len(stop)) if self.whole.endswith(stop[:size])),
            default=0,
        )
