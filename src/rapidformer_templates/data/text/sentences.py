"""Sentences of a text, by a rule of a few lines that needs no data.

A sentence ends at a blank line, and after ``.``, ``!``, ``?`` or ``…`` (closing quotes and brackets
included) before white space, unless a lower-case letter follows, or a usual abbreviation or a single
initial stands before a full stop. Chinese and Japanese marks end one without white space.
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
    """The sentences of a text, without the white space around them; none of them is empty."""
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
