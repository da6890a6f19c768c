"""How fast decoding is with and without speculation, beside what the formula says: what ``specjax bench`` measures and shows.

prompts.py    what is answered: the prompts that come with the library, or a user's file
cases.py      what is compared: drafters, rules, draft lengths, slots, temperatures
clock.py      timing in turns; medians and spreads
answers.py    the cases answer the prompts, in turns
equality.py   whether they gave the tokens of plain decoding, and how near a call it was where not
parts.py      a round taken apart, passes of the target counted, bytes over bandwidth
run.py        all of it, one after the other
report.py     arithmetic, and the document that comes of it
show.py       the document as tables
pictures.py   the document as pictures
"""
