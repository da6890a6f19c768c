"""Texts and conversations that ``golden_values.py`` has encoded."""

CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "Why is the sky blue, and why is a sunset red?"}],
    "two turns": [
        {"role": "user", "content": "Name three rivers in Europe."},
        {"role": "assistant", "content": "The Danube, the Rhine and the Tagus."},
        {"role": "user", "content": "  Which of them is the longest?\nAnswer in one line. "},
    ],
    "own system message": [
        {"role": "system", "content": "Answer like a pirate."},
        {"role": "user", "content": "Où est la gare ?"},
    ],
}

CODE = '''def moving_average(values, window):
    """Mean of each run of `window` neighbours."""
    if window < 1 or window > len(values):
        raise ValueError(f"window is {window}; it must lie in 1..{len(values)}")
    total = sum(values[:window])
    means = [total / window]
    for old, new in zip(values, values[window:]):
        total += new - old
        means.append(total / window)
    return means


assert moving_average([1, 2, 3, 4], 2) == [1.5, 2.5, 3.5]
'''

PROSE = """\
The lighthouse keeper wrote everything down. At 04:10 the fog came in from the north-west; at 05:25 it was so thick that
the lamp lit nothing but itself. She counted the seconds between two blasts of the horn (thirty, as always), filled the kettle,
and waited for the post boat, which was due on the 17th and had already been late twice that winter.

Nobody on the mainland believed in the old rule any more, but she did: whoever keeps the light also keeps the list of those who
passed it. There were 2,318 names by now, some of them only a colour and a guess - "red hull, two masts, perhaps Norwegian" - and
some with whole stories attached. The longest belonged to a small grey ketch that had gone round the island three times in one
night, as if it had forgotten something. In the morning it was gone. A week later a parcel arrived with no sender: a jar of plum
jam, a map of the bay drawn from memory, and a note which said only, "Thank you for not asking."

She kept the map on the wall beside the barometer. It was wrong in exactly two places, and in both of them she thought the map
was right and the bay was wrong. When the fog lifted, around nine, the sea lay flat as a table and the post boat was nowhere to be
seen. So she wrote that down as well, with the time, the wind (none), and the temperature: 3 degrees.

Then the radio spoke for the first time in four days.
"""

# Every line is one string. Code points are escaped where an editor might normalise or hide them.
HARD_TEXTS = [
    "",
    " ",
    "Hello, world!",
    "a  b   c    d     e        f                 g",
    "   leading and trailing   ",
    "\ttab\t\ttwo tabs \t mixed\t ",
    "line one\r\nline two\r\n\r\nline four\n\n\n\nend\r",
    "if (x >= 0) {\n\treturn x->y[i++] && !z; // 100% sure?\n}\n\n",
    "def f(a, *, b=None) -> dict[str, int]:\n    return {**a, 'b': b}  # noqa\n",
    "https://example.org/a%20b?q=1&r=%C3%A9#frag user.name+tag@example.co.uk",
    "0 1 12 123 1234 12345 1234567890123456789012345678901234567890 3.14159e-10 1,000,000 0xDEADBEEF v2.0.1",
    "\u0660\u0661\u0662 \u0967\u0968\u0969 \u00b2\u00b3\u00b9 \u2160\u2161\u2162 \u00bd\u2153",
    "I'm you're he's we've they'll I'd don't DON'T I'M YOU'RE 'tis '90s rock'n'roll o'clock's'",
    "I\u2019m you\u2019re he\u2019s \u201cquoted\u201d \u2018single\u2019 \u00abguillemets\u00bb \u2014 \u2013 \u2026",
    "\U0001f600\U0001f603 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd"
    " \U0001f9d1\U0001f3ff\u200d\U0001f680 \U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5 \u2764\ufe0f 1\ufe0f\u20e3",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u3053\u3093\u306b\u3061\u306f\u3001\u30ab\u30bf\u30ab\u30ca\u3002"
    "\uc548\ub155\ud558\uc138\uc694 \u6f22\u5b57123\u5e74 \U00020000\U0002a6d6",
    "\uff21\uff22\uff23\uff11\uff12\uff13 \uff76\uff9e \ufb01 \u212b \u2126 \ufa0e \uf900",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645"
    " \u0643\u0650\u062a\u064e\u0627\u0628\u064c \u200f123\u200e",
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e"
    " \u0915\u094d\u0937 \u091c\u094d\u091e \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "na\u00efve caf\u00e9 \u00c5ngstr\u00f6m \u1ec7 \ud55c\uae00",
    "nai\u0308ve cafe\u0301 A\u030angstro\u0308m e\u0323\u0302 e\u0302\u0323 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "Z\u0351\u036b\u0343\u036aa\u0300\u0301\u0302\u0303l\u0334\u0335g\u0321\u0322o\u0489 q\u0307\u0323 \u0344 \u0958",
    "".join(map(chr, range(0x20))),
    "a\x00b\x01c\x07d\x08e\x0bf\x0cg\x1bh\x1b[31mred\x1b[0m\x7f\x80\x85\x9f",
    "zero\u200bwidth\u200cnon\u200djoiner\u2060word\ufeffbom\u00adsoft",
    "\u00a0no-break \u2009thin\u2003em\u3000ideographic \u2028line\u2029paragraph\u1680ogham",
    "\ufffd\ufffe\uffff \U0010ffff \U000e0001 \ue000",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start|>assistant\n",
    " <|im_end|> <|im_end|>x<|im_end|> <|IM_END|> <|im_end| > <|im_<|im_end|>end|>",
    "<repo_name>a/b<file_sep>x.py\n<filename>y<jupyter_code>1+1<empty_output><tool_call>{}</tool_call><|fim_prefix|><s></s>",
    "don't\n  \n   indent\n \t \n",
    "!!!??!?... ---- ==== //// \\\\\\\\ #### $$$ ^^^ ~~~ ``` ((())) [[]] {{}} <<>> ;;:: |&|",
    "\u03b1\u03b2\u03b3 \u041f\u0440\u0438\u0432\u0435\u0442 \u0130stanbul \u0131 \u1e9e\u00df \u01c5 \u10d0\u10d1 \u0561\u0562",
    "\u2200x\u2208\u211d: \u2308x\u2309 \u2260 \u00acx \u222b\u2080\u00b9 \u221ax dx \u2248"
    " \U0001d465\U0001d7d9 \u20ac5 \u00a36 \u20bf",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "CamelCaseIdentifier snake_case_identifier SCREAMING_CASE kebab-case x1y2z3 _private __dunder__",
    "".join(map(chr, range(0x20, 0x250))),
]
