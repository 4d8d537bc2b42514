"""What the composer of stories (`tales.py`) is made with: names, pronouns and the language of its templates.

    <h> <he> <his>              a being, a pronoun, a word of the story
    <says h>                    a phrase; <1> is its first argument
    [He ran | He walked] home.  one of several wordings, which may nest

A blank line begins a paragraph. Sentences get their capitals, and "a" becomes "an", at the end.
"""

import re

HELD_OUT = 1 << 40           # documents from this number on are never trained on

BOYS = ("Tom Ben Sam Max Jack Leo Finn Hugo Peter Oscar Will Ned Theo Milo Noah Luke Adam Toby Robin Emil Anton Karl Omar Amir Kofi "
        "Juma Ravi Kenji Mateo Pablo Tariq Ivan Bram Jan Paul Simon Henry Arthur Daniel David Jonah Eli Otto Rufus Timo Sipho Joseph "
        "Martin Edward Frank Walter Harry Charlie George John Felix Ali Samuel Anders Mark Jacob Benno Rico Hassan Dani Piet").split()
GIRLS = ("Lily Anna Mia Lucy Rose Emma Nora Ella Ida Clara Lena Maya Zoe Ruby Alice Jane Mary Molly Daisy Sara Greta Hanna Marta Elsa "
         "Nina Ada Eva Amina Zuri Asha Leila Priya Yuki Lola Sofia Kate Pia Julia Ellen Betty Martha Sophie Grace Lotte Tilda Olga Vera "
         "Hattie Susan Helen Polly Nelly Maria Rosa Fatima Thandi Johanna Flora Violet Stella Emily Kitty Ruth Lina Elin Sanna").split()
PRONOUNS = dict(m=("he", "him", "his", "himself"), f=("she", "her", "her", "herself"), n=("it", "it", "its", "itself"))


def parse(text):
    """A template as a list of text, ('ref',) and [alternatives]; the whole may be alternatives itself."""
    at = 0

    def sequence(closing):
        nonlocal at
        alternatives, current = [], []
        while at < len(text):
            c = text[at]
            if c == "[":
                at += 1
                current.append(sequence("]"))
            elif c == "<":
                end = text.index(">", at)
                current.append((text[at + 1:end],))
                at = end + 1
            elif c == "|":
                at += 1
                alternatives.append(current)
                current = []
            elif c == closing:
                at += 1
                break
            else:
                end = re.compile(r"[\[\]<|]|$").search(text, at).start()
                if end == at:
                    raise ValueError(f"stray {c!r} near {text[max(0, at - 60):at + 20]!r}")
                current.append(text[at:end])
                at = end
        else:
            if closing:
                raise ValueError(f"no {closing!r} in {text[:80]!r}")
        return alternatives + [current]

    whole = sequence("")
    return whole[0] if len(whole) == 1 else [whole]


def pieces(text, mark):
    """`text` at every `mark` that is in no bracket."""
    out, depth = [""], 0
    for c in text:
        depth += (c == "[") - (c == "]")
        if c == mark and not depth:
            out.append("")
        else:
            out[-1] += c
    return [p.strip() for p in out]
