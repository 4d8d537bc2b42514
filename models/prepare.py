"""Turns books and stories into clean story documents, and trains the tokenizer on them.

    python prepare.py CORPORA OUT
    python prepare.py tokenizer OUT

CORPORA holds `pg_simple_train.jsonl.zst`, `pg_simple_valid.jsonl.zst` (Project Gutenberg books:
pg, title, author, child, fre, wps, text), `african_storybook_en.jsonl` (license, title, text) and
`synthetic_persona_chat.jsonl` (messages). OUT receives `docs.jsonl.zst` and `held_out.jsonl` (one
{"kind", "opens", "turns"} a line) and `tokenizer.json`. A document is one tale or one chapter, from its first sentence
to its last. Composed documents (`tales.py`) are made while training runs; here they only have their part in the tokenizer
and in what is held out. `world/sentences.json` and `world/smalltalk.json`, which the composer needs, are made here too:
sentences of books and of small talk that name something a story can be about.
Needs `tokenizers` and `zstandard`.
"""

import collections
import io
import json
import multiprocessing
import pathlib
import re
import sys

import pyarrow

from compose import HELD_OUT
from tales import SPECIAL, WORLD, Tables, Teller

VOCAB = 6144
HELD_OUT_MODERN = 10  # every tenth CC BY story is held out
COMPOSED_HELD_OUT, COMPOSED_FOR_TOKENS = 200, 4000
# The share of each kind that is kept, the plainest first.
KEPT = dict(tale=1.0, modern=1.0, child=0.7, plain=0.5)
# One book in so many of each kind is read: books are a small part of the training.
EVERY = dict(tale=1, child=4, plain=8)

# ---------------------------------------------------------------- which books, and as what kind

TALE_TITLES = re.compile(
    r"fairy (book|tale|stor)|grimm|andersen|aesop|household stories|snowdrop|just so|happy prince"
    r"|book of dragons|mother goose|wonderful stories for children|stories from hans|sand-hills"
    r"|ice-maiden|prince prigio|ricardo|princess nobody|johnny nut|tale of (tom|peter|the f|ginger|j|m|b|s|t|p)"
    r"|tolstoi for the young|what men live|where love is|santa claus|little wizard|nine unlikely"
    r"|cozy lion|good wolf|racketty|blue flower|pussy and doggy|twinkle|lulu.s library|live toys"
    r"|policeman bluejay|magical monar|enchanted island|queen zixi|barty crusoe|story of peter pan"
    r"|rudy and babette|children stories|cat and dog|nursery alice|my robin|sunny boy|hunchback zia"
    r"|gold of fairnilee|daffydowndilly|child's dream", re.I)
# Verse, plays, logic, letters, dialect, or matter that a story model should not learn from.
LEFT_OUT_TITLES = re.compile(
    r"plays|logic|letters to|comus|dante|vision of hell|means\b|huckleberry|on the plantation|pictures of"
    r" sweden|fall of a nation|comic tragedies|der tag|game of|mr\. punch|redemption|ghosts|pillars of"
    r"|sea-gull|swan song|light shines|vera|o'flaherty|old scrooge|red true story|animal story book"
    r"|tangled tale|royal children|fruitlands|swanston|eyes of asia|danny's own|karma|cause of it all"
    r"|for love of the king|scrap-bag, vol. 5|three days in the village|human drift|lady doc|me-smith"
    r"|thrums|little minister|catriona|jaufry|bel ami|maupassant|lodusky|surly tim|seth|that lass", re.I)
FAR_AUTHORS = re.compile(r"henty|trollope|dumas|dostoevsky|ibsen|henry james|balzac|gorky", re.I)


def kind_of(book):
    """`tale`, `child`, `boys`, `plain` or `far` (from the style wanted); None when the book is left out."""
    title, author = book["title"] or "", book["author"] or ""
    if LEFT_OUT_TITLES.search(title):
        return None
    if TALE_TITLES.search(title):
        return "tale"
    if FAR_AUTHORS.search(author):
        return "far"
    if book["child"]:
        boys = re.search(r"aviator|scout|dreadnought|motor ranger|border boys|bungalow|wireless|verne"
                         r"|altshel|boy inventors|blackwood|wells|ghost stor|in the wave", title + author, re.I)
        return "boys" if boys else "child"
    return "plain" if book["fre"] >= 75 and book["wps"] <= 16.5 else "far"


# ---------------------------------------------------------------- text

SLURS = re.compile(
    r"\b(nigg\w*|dark(y|ies|ey|eys)|pickaninn\w*|coons?|redskins?|squaws?|chinam[ae]n|chinks?|japs?|dago\w*"
    r"|greasers?|half-(breed|caste)s?|savages|jews?|jewess|hebrews?|negro\w*|negress\w*|injuns?|blackamoors?"
    r"|coolies?|mulatto\w*|heathens?|kaffirs?|hottentots?|rap(ed|ist)|whores?|mammy|massa)\b", re.I)
ARCHAIC = re.compile(r"\b(thee|thou|thy|thine|hath|doth|ye|wilt|shalt|quoth|whilom|forsooth|\w{3,}est thou)\b", re.I)
DIALECT = re.compile(
    r"(\b(ain't|yer|ter|sez|ye'll|ye're|o'|wi'|an'|th'|d'ye|dat|dis|dey|dem|de|wid|gwine|wuz|jest|hev|yez|oi|av|"
    r"me lad|ave|fer|git|aw|nowt|summat|ower|frae|nae|dinna|canna|wull|bairn|ain|ony|mair|auld|och|vas|vot|mit|"
    r"ze|vill|und|sah|marse|feller|warn't|hain't|y'r|ole|wot|'im|'er|'ed|'is)(?![\w'])|in' )", re.I)
LEFT_OUT_SECTIONS = re.compile(
    r"preface|introduct|contents|author's note|dedicat|illustrations|foreword|advertis|glossary|appendix|^notes?\b"
    r"|transcriber|life of|index|bibliograph|errata|publish|by the same|epilogue to|to (the|my) readers?|to the children"
    r"|footnote|copyright|prologue|list of|about the", re.I)
SMALL = set("a an and as at by for from had has her his how in into is it its no not of on or out over she so "
            "that the their they to up was were who with what when where or, i".split())
ELIDED = set("tis twas em til till twere twill twould tisn twasn cause bout ere e bacco un gainst neath".split())
NUMBER = r"[ivxlc]+|\d+|one|two|three|four|five|six|seven|eight|nine|ten|(?:the )?first|(?:the )?last|the \w+"
CHAPTER = re.compile(rf"(?:(?:chapter|part|book|section|scene)[ .]+({NUMBER})\b|([ivxlc]+|\d+)(?:[.]|$))", re.I)
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


def double_quotes(paragraph):
    """British 'speech' as "speech" and the other way round inside it; apostrophes stay."""
    out, last, opened = [], len(paragraph) - 1, False
    for i, c in enumerate(paragraph):
        if c == '"':
            out.append("'")
        elif c != "'":
            out.append(c)
        else:
            before = paragraph[i - 1] if i else " "
            after = paragraph[i + 1] if i < last else " "
            if before in " (—\n\"[" and (after.isalnum() or after in "\"—"):
                word = WORD.match(paragraph, i + 1)
                elided = word is not None and word.group().lower() in ELIDED
                out.append("'" if elided else '"')
                opened = opened or not elided
            elif before in ".,!?;:—-)\"" and not after.isalnum():
                out.append('"')
                opened = False
            elif opened and before.isalpha() and before != "s" and after in ",;.!?)" or (opened and i == last):
                out.append('"')
                opened = False
            else:
                out.append("'")
    return "".join(out)


def tidy(text):
    """Straight quotes, one kind of dash, no editorial marks; paragraphs stay apart."""
    for old, new in (("\r", ""), ("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'"), ("–", "-"), ("\u00a0", " "),
                     ("…", "..."), ("æ", "ae"), ("Æ", "Ae"), ("œ", "oe"), ("\t", " "), ("_", ""), ("`", "'")):
        text = text.replace(old, new)
    text = re.sub(r"\[[^\]]{0,400}\]", "", text)
    text = re.sub(r"\s*\(\d{1,3}\)|\*+|[{}|\[\]]", "", text)
    text = re.sub(r"(\. ){2,}\.", "...", text)
    text = re.sub(r"\.{4,}", "...", text)
    text = re.sub(r" *(--+|—+) *", "—", text)
    text = re.sub(r"(!|\?)\1+", r"\1", text)
    return re.sub(r"[ ]+", " ", text)


def heading(paragraph):
    """Whether a paragraph names a chapter or a tale rather than telling part of it."""
    p = paragraph.strip()
    if "\n" in p and len(p) > 120:
        return False
    p = p.replace("\n", " ")
    if len(p) > 90 or not p:
        return not p
    letters = [c for c in p if c.isalpha()]
    if not letters:
        return True
    if re.match(r"(chapter|part|book|section|scene|act|letter)\b[ .]*([ivxlc\d]+|one|two|the \w+)\b", p, re.I):
        return True
    if all(c.isupper() for c in letters):
        return len(letters) > 3 and not p.startswith('"') or re.fullmatch(r"[IVXLC]+\.?", p) is not None
    if p[-1] in "!?:;,\"'—)" or p[0] in "\"'(—" or len(p) > 70:
        return False
    words = re.findall(r"[A-Za-z'-]+", p)
    named = all(w[0].isupper() or w.lower() in SMALL for w in words) and words[0][0].isupper()
    return named and (p[-1] != "." or (len(words) >= 2 and sum(w[0].isupper() for w in words) >= 2))


def decapitals(paragraph, proper):
    """"ONCE upon a time" and "I do NOT" in ordinary letters. `proper` holds names."""
    def lower(m):
        word, at = m.group(), m.start()
        if word.lower() in proper:
            return word.capitalize()
        start = at == 0 or paragraph[max(0, at - 2):at].strip() in (".", "!", "?", '"', '."', '!"', '?"')
        return word.capitalize() if start or at <= 1 else word.lower()
    if sum(c.isupper() for c in paragraph) > 0.5 * max(1, sum(c.isalpha() for c in paragraph)):
        return paragraph
    paragraph = re.sub(r"\b(?!(?:[IVX]+|TV|USA|OK|SOS|HMS|[A-Z]{2,3}\.)\b)[A-Z][A-Z]+\b", lower, paragraph)
    # "A LITTLE girl": the first letter stays, and a lone "I" is never touched.
    return paragraph[:1].upper() + paragraph[1:]


def paragraphs(text):
    """Paragraphs of flowing prose, and the short rhymes among them; long verse is left out."""
    for p in text.split("\n\n"):
        lines = [line.strip() for line in p.strip().split("\n") if line.strip()]
        if not lines:
            continue
        if len(lines) == 1 or (len(lines) > 1 and sum(map(len, lines)) / len(lines) > 58):
            yield " ".join(lines), False
        elif len(lines) <= 6 and max(map(len, lines)) < 70:
            yield "\n".join(lines), True
        else:
            yield None, True


def sections(book):
    """([headings], [(paragraph, verse)]) for each stretch between headings."""
    titles, body = [""], []
    text = tidy(book["text"])
    for mark in ("\nTranscriber", "\nTRANSCRIBER", "\nFOOTNOTES", "\nEnd of Project", "\nEnd of the Project",
                 "\nILLUSTRATIONS WERE MOVED", "\nIllustrations were moved"):
        cut = text.find(mark, len(text) * 2 // 3)
        text = text[:cut] if cut > 0 else text
    starts = collections.Counter(p[:1] for p in text.split("\n\n"))
    british = starts["'"] > starts['"']
    for p, verse in paragraphs(text):
        if p is not None and heading(p):
            if body:
                yield titles, body
                titles, body = [], []
            titles.append(p)
            continue
        if p is None:
            body.append(("", True))
        elif re.match(r"(Page \d+,|\d+ |\* |Note\b|Printed|See page|From the )", p):
            continue
        else:
            body.append((double_quotes(p) if british else p, verse))
    if body:
        yield titles, body


def opens(book, kind, titles, first):
    """Whether this document begins a story; a later chapter does not, and gets no <|bos|>."""
    numbered = [(m.group(1) or m.group(2)).lower() for t in titles[-3:] if (m := CHAPTER.match(t))]
    if numbered:
        return numbered[-1] in ("i", "1", "one", "first", "the first")
    collection = re.search(r"tales|stories|miscellany|cabman|fairy", book["title"] or "", re.I)
    return first or kind == "tale" or collection is not None


def without_source(text):
    """A tale's text without a last line that only names where the tale comes from."""
    body, _, last = text.rpartition("\n\n")
    if body and (re.fullmatch(r"\(.*\)|From .*", last) and len(last) < 120):
        return body
    m = re.search(r"([.!?]['\"]?) (?:[A-Z][a-z]+(?: and| et| [A-Z]\.)? ?(?:d'|of )?[A-Z]?[a-z]*\.?|\([^()]{4,80}\))$", text)
    return text[:m.end(1)] if m and text.endswith((")", "Moe.", "Aulnoy.", "Grimm.", "Perrault.")) else text


def rate(pattern, text, words):
    return sum(1 for _ in pattern.finditer(text)) / max(1, words)


def documents(book, kind, proper):
    """(opens a story, text) for each document of one book that passes every test."""
    first = True
    for titles, body in sections(book):
        if LEFT_OUT_SECTIONS.search(titles[-1]):
            continue
        kept = [(p, verse) for p, verse in body if p and not SLURS.search(p)]
        lost = sum(len(p) for p, _ in body) - sum(len(p) for p, _ in kept)
        # One such paragraph can go without hurting a long tale; a chapter full of them goes as a whole.
        if not kept or lost > 0.04 * sum(len(p) for p, _ in kept):
            continue
        long_verse = sum(1 for p, _ in body if not p)
        text = without_source("\n\n".join(decapitals(p, proper) for p, _ in kept))
        words = text.count(" ") + 1
        verse = sum(len(p) for p, v in kept if v) / len(text)
        if len(text) < (350 if kind == "tale" else 900) or verse > 0.12 or long_verse * 60 > words:
            continue
        if rate(ARCHAIC, text, words) > (0.012 if kind == "tale" else 0.005):
            continue
        if rate(DIALECT, text, words) > 0.006 or sum(c.isdigit() for c in text) > 0.004 * len(text):
            continue
        if text.rstrip("\"')")[-1:] not in ".!?":
            continue
        if sum(ord(c) > 126 and c != "—" for c in text) > 0.004 * len(text):
            continue
        speech_names = sum(1 for p, _ in kept if re.match(r"[A-Z]{3,}[.:]", p))
        if speech_names * 4 > len(kept):
            continue
        yield opens(book, kind, titles, first), text
        first = False


def modern(story):
    """One CC BY story, a paragraph a page; None when it is a list, a rhyme or too short."""
    lines = [re.sub(r"\s+", " ", tidy(l)).strip() for l in story["text"].split("\n")]
    lines = [l for l in lines if l]
    words = sum(l.count(" ") + 1 for l in lines)
    if words < 60 or words / max(1, len(lines)) < 6:
        return None
    lines = [re.sub(r"\s+([,.!?;])", r"\1", re.sub(r"([,;!?])(?=[A-Za-z])", r"\1 ", l)) for l in lines]
    lines = [re.sub(r"(^|[.!?] )([a-z])", lambda m: m.group(1) + m.group(2).upper(), l) for l in lines]
    if sum(l[-1] in ".!?\"'" for l in lines) < 0.8 * len(lines) or SLURS.search(story["text"]):
        return None
    # A page without its full stop would teach sentences that never end.
    lines = [l if l[-1] in ".!?\"':;,—" else l + "." for l in lines]
    return "\n\n".join(lines)


# ---------------------------------------------------------------- files

def read_books(path):
    with pyarrow.input_stream(str(path), compression="zstd") as f:
        return [json.loads(line) for line in io.TextIOWrapper(f, encoding="utf-8")]


def names_of(books):
    """Words that stand capitalised in mid-sentence at least four times out of five."""
    upper, lower = collections.Counter(), collections.Counter()
    for book in books[::9]:
        upper.update(w.lower() for w in re.findall(r"(?<=[a-z,;] )[A-Z][a-z]+", book["text"]))
        lower.update(re.findall(r"(?<=[a-z,;] )[a-z]+", book["text"]))
    return {w for w, n in upper.items() if n >= 3 and n > 4 * lower[w]}


def plainest(docs):
    """The documents of each kind that are easiest to read, as many as KEPT says.

    Hard is what has long sentences and many words outside the 3,000 most frequent."""
    count = collections.Counter(w for d in docs for w in re.findall(r"[a-z']+", d["text"].lower()))
    common = {w for w, _ in count.most_common(3000)}

    def hard(d):
        words = re.findall(r"[a-z']+", d["text"].lower())
        sentences = 1 + len(re.findall(r"[.!?]", d["text"]))
        return len(words) / sentences / 60 + sum(w not in common for w in words) / len(words)

    kept = []
    for kind, share in KEPT.items():
        mine = sorted((d for d in docs if d["kind"] == kind), key=hard)
        kept += mine[:round(share * len(mine))]
    return kept


def found_sentences(docs, corpora):
    """[(noun, sentence)] of books and of small talk, for openings and remarks that nobody composed."""
    tables = Tables()
    nouns = {n for n in tables.by_noun if " " not in n}
    found, talk, seen = [], [], set()

    def noun_of(sentence):
        m = re.search(r"\b(?:[Tt]he|[Aa]n?|[Mm]y)(?: \w+)? (\w+)\b", sentence)
        return m[1] if m and m[1] in nouns and tables.allowed(sentence) and not SLURS.search(sentence) else None

    for d in docs:
        if d["kind"] in ("tale", "child"):
            for s in re.findall(r"(?:^|(?<=[.!?] ))[A-Z][a-z][^.!?\"\n()—;:]{24,95}[.!](?= |$)", d["text"][:3000], flags=re.M)[:12]:
                noun = noun_of(s)
                if noun and not re.match(r"(?:He|She|They|It|This|That|These|Then|But|And|So|For|You|I|We|His|Her|Their)\b", s) and not re.search(r"\b(I|you|me|my)\b", s):
                    found.append((noun, s))
    with open(corpora / "synthetic_persona_chat.jsonl", encoding="utf-8") as f:
        for line in f:
            for m in json.loads(line)["messages"]:
                for s in re.findall(r"[A-Z][^.!?]{8,70}[.!?]", m["content"]):
                    noun = noun_of(s)
                    if noun and s not in seen and re.match(r"(?:I|My|Do|Have|What)\b", s):
                        seen.add(s)
                        talk.append((noun, s))
    # Every noun only some times, so that no noun drowns the others.
    for name, rows, most in (("sentences", found, 40), ("smalltalk", talk, 25)):
        count, kept = collections.Counter(), []
        for noun, s in rows:
            count[noun] += 1
            if count[noun] <= most:
                kept.append((noun, s))
        print(f"{len(kept)} {name}")
        (WORLD / f"{name}.json").write_text("[\n" + ",\n".join(json.dumps(k, ensure_ascii=False) for k in kept) + "\n]\n", encoding="utf-8")


def clean(job):
    book, kind, proper = job
    return kind, book["child"], list(documents(book, kind, proper))


def main(corpora, out):
    corpora, out = pathlib.Path(corpora), pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    train = read_books(corpora / "pg_simple_train.jsonl.zst")
    valid = read_books(corpora / "pg_simple_valid.jsonl.zst")
    proper = names_of(train)
    held_out, docs = [], []
    with multiprocessing.Pool() as pool:
        kinds, number = [(b, kind_of(b)) for b in train], collections.Counter()
        jobs = [(b, k, proper) for b, k in kinds if k in EVERY and not number.update([k]) and number[k] % EVERY[k] == 0]
        for kind, _, texts in pool.imap(clean, jobs, 4):
            docs += [{"kind": kind, "opens": o, "text": t} for o, t in texts]
        for _, child, texts in pool.imap(clean, [(b, "child", proper) for b in valid]):
            held_out += [{"kind": "held-out children's book" if child else "held-out book",
                          "opens": o, "text": t} for o, t in texts]
    with open(corpora / "african_storybook_en.jsonl", encoding="utf-8") as f:
        stories = [s for s in map(json.loads, f) if s["license"] == "CC-BY"]
    number, seen = 0, set()
    for story in stories:
        text = modern(story)
        if text and text[:80] not in seen:
            seen.add(text[:80])
            place = held_out if number % HELD_OUT_MODERN == 0 else docs
            place.append({"kind": "held-out modern story" if place is held_out else "modern", "opens": True, "text": text})
            number += 1
    docs = plainest(docs)
    found_sentences(docs, corpora)
    teller = Teller()
    # A held-out document must not also be a training document.
    unseen = {d["text"][200:260] for d in docs}
    held_out = [d for d in held_out if d["text"][200:260] not in unseen]
    count, size = collections.Counter(), collections.Counter()
    for d in docs + held_out:
        d["turns"] = [("raw", d["text"])]
        count[d["kind"]] += 1
        size[d["kind"]] += len(d["text"].encode())
    for kind in count:
        print(f"{kind:26} {count[kind]:6} documents {size[kind] / 1e6:8.2f} MB")
    with open(out / "held_out.jsonl", "w", encoding="utf-8") as f:
        held_out += [{"kind": "held-out composed document", "opens": True, "turns": teller.document(HELD_OUT + i)} for i in range(COMPOSED_HELD_OUT)]
        f.writelines(json.dumps({k: d[k] for k in ("kind", "opens", "turns")}, ensure_ascii=False) + "\n" for d in held_out)
    with pyarrow.output_stream(str(out / "docs.jsonl.zst"), compression="zstd") as z:
        for d in docs:
            z.write((json.dumps({k: d[k] for k in ("kind", "opens", "turns")}, ensure_ascii=False) + "\n").encode())


def composed_texts(first):
    teller = Teller()
    return [text for i in range(first, first + 100) for _, text in teller.document(i)]


def train_tokenizer(out):
    """Byte-level BPE over GPT-2's pre-tokeniser: `gpt-2` in a GGUF file."""
    with pyarrow.input_stream(str(out / "docs.jsonl.zst"), compression="zstd") as f:
        docs = [json.loads(line) for line in f.read().decode().split("\n") if line]
    with multiprocessing.Pool() as pool:
        composed = [t for part in pool.imap(composed_texts, range(0, COMPOSED_FOR_TOKENS, 100)) for t in part]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    near = [d["turns"][0][1] for d in docs if d["kind"] in ("tale", "modern")][::2]
    far = [d["turns"][0][1] for d in docs if d["kind"] == "child"][::4]
    tokenizer.train_from_iterator(composed + near + far, trainer)
    tokenizer.save(str(out / "tokenizer.json"))


if __name__ == "__main__":
    if sys.argv[1] == "tokenizer":
        train_tokenizer(pathlib.Path(sys.argv[2]))
    else:
        main(sys.argv[1], sys.argv[2])
