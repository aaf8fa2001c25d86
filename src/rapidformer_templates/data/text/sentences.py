"""Splits a text into sentences by a short rule that needs no data.

A sentence ends at a blank line, and after ``.``, ``!``, ``?`` or ``…`` (including closing quotes and brackets) before
white space. It does not end if a lower-case letter follows, or if a full stop belongs to a common abbreviation or a
single initial. Chinese and Japanese marks end a sentence without white space.
"""

from __future__ import annotations

import re

ABBREVIATED = re.compile(
    r"""
    (?: ^ | [\s(\["'“‘] )
    (?: [A-Z]  # an initial
      | (?i: mr | mrs | ms | dr | prof | st | sr | jr | rev | gen | col | lt | sgt | capt
           | vs | etc | e\.g | i\.e | cf | al | figs? | eqs? | nos? | vol | pp? | ch | sec | eds? | approx
           | inc | ltd | co | corp | dept
           | jan | feb | mar | apr | jun | jul | aug | sept? | oct | nov | dec )
    ) \. $
    """,
    re.VERBOSE,
)
BOUNDARY = re.compile(
    r"""
      \s*\n\s*\n\s*                        # a blank line
    | (?<=[.!?…]) \s+ (?![a-z])            # a mark, white space, and no lower-case letter
    | (?<=[.!?…]["'”’»)\]]) \s+ (?![a-z])  # the same with a closing quote or bracket
    | (?<=[。！？]) (?![。！？”」』）]) \s*  # marks that need no white space
    """,
    re.VERBOSE,
)


def split_sentences(text: str) -> list[str]:
    """Return the non-empty sentences of a text without the white space around them."""
    sentences: list[str] = []
    start = 0
    for boundary in BOUNDARY.finditer(text):
        sentence = text[start : boundary.start()]
        if boundary.group().count("\n") < 2 and ABBREVIATED.search(sentence[-20:]):
            continue
        sentences.append(sentence)
        start = boundary.end()
    sentences.append(text[start:])
    return [stripped for sentence in sentences if (stripped := sentence.strip())]
