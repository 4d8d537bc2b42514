"""Composes stories about anybody who wants anything anywhere, and the requests they answer.

    python tales.py COUNT [--seed N]      # prints documents as the model reads them

It crosses tables: who (`world/nouns.txt`), where (`world/realms.txt`), what is loved,
feared, wished, lost or found (`world/*.txt`), and how it goes (`arcs/*.txt`, the template language of `compose.py`).
A document is a list of (role, text); it is a function of its number. No document holds a prompt of `visitors.txt`,
nor puts a visitor's noun beside the word that the file names for it.
"""

import argparse
import json
import pathlib
import random
import re

from compose import BOYS, GIRLS, HELD_OUT, PRONOUNS, parse, pieces

FOLDER = pathlib.Path(__file__).parent
WORLD, ARCS = FOLDER / "world", FOLDER / "arcs"
MASS = set("snow rain frost thunder moonlight sunshine sand smoke ice mud silence music gold".split())
UNIQUE = {"moon", "sun", "wind", "sea", "sky", "north wind", "tooth fairy", "sandman", "snow queen", "winter", "summer", "autumn", "spring"} | MASS
MEN = set("fisherman sailor miller shepherd farmer baker king page jester grandfather policeman postman hermit pedlar prince uncle ringmaster "
          "toymaker knight guard".split()) | {"old sailor", "old fisherman", "old king", "old miller", "stable boy", "new boy", "old man",
          "north wind", "chess king", "tin soldier", "old violinist", "night watchman", "old merchant", "bull", "rooster", "cock", "stag"}
WOMEN = set("grandmother princess queen widow witch nurse maid goose hen cow aunt headmistress mermaid".split()) | {
    "wise woman", "old woman", "girl from the next class", "old queen", "farmer's grandmother", "water witch", "rag doll", "fortune teller",
    "snow queen", "tooth fairy", "milkmaid", "oldest doll"}
SMALL_TABLES = dict(love="ing do did tool out good bad others", fear="it when like place truth step after",
                    wish="do ing try try2 way moment after", trait="adj shows trouble good after", loss="n why",
                    find="a special whose came", odd="now past")
DRIVES = "love fear wish trait loss find plain magic odd pair".split()
WEIGHTS = [16, 9, 13, 15, 7, 9, 8, 3, 9, 16]
LEAST, MOST = 95, 285           # words of a story
HELD = 10                       # tries that one plot has, so that long plots are told as often as short ones
OWN = 2                         # a plot of the drive's own is told so many times as often as one that fits any drive
WORD = re.compile(r"[a-z0-9']+")


def lines(path):
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.strip() and not line.startswith("#"):
            yield line.rstrip()


def choices(text):
    """A template whose top level is a choice, or none."""
    return parse(text.strip())


class Tables:
    """Everything in world/ and arcs/, parsed once."""

    def __init__(self):
        self.phrases, self.arcs, shared = {}, {d: [] for d in DRIVES}, []
        for path in sorted(ARCS.glob("*.txt")):
            source = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.M)
            for entry in re.split(r"^(?=: |=== )", source, flags=re.M):
                head, _, body = entry.partition("\n")
                if head.startswith(": "):
                    self.phrases[head[2:].strip()] = choices(body)
                elif head.startswith("=== "):
                    name, _, drives = map(str.strip, head[4:].partition(":"))
                    for d in re.split(r"[, ]+", drives):
                        (shared if d == "any" else self.arcs[d]).append((name, choices(body)))
        self.arcs["odd"] = list(self.arcs["plain"])
        self.shared = shared
        self.rows = {}
        for d, fields in SMALL_TABLES.items():
            fields, rows = fields.split(), []
            name = {"love": "loves", "fear": "fears", "wish": "wishes", "trait": "traits", "loss": "losses", "find": "finds", "odd": "odd"}[d]
            for line in lines(WORLD / f"{name}.txt"):
                parts = pieces(line, ";")
                assert len(parts) == len(fields), f"{name}: {len(parts)} fields: {line[:60]}"
                rows.append({f: choices(p) for f, p in zip(fields, parts)})
                rows[-1]["key"] = parts[0]
            self.rows[d] = rows
        self.realms = {}
        for block in re.split(r"^== ", (WORLD / "realms.txt").read_text(encoding="utf-8"), flags=re.M)[1:]:
            name, *rest = block.strip().split("\n")
            realm = {}
            for line in rest:
                key, _, value = line.partition(": ")
                if key in ("names", "folk", "wise", "food", "thing"):
                    realm[key] = [v.strip() for v in value.split(";")]
                elif key == "block":
                    realm[key] = [[choices(x.strip().rstrip(",")) for x in pair.split(" ; ")] for pair in value.split("||")]
                    assert all(len(p) == 2 for p in realm[key]), name
                else:
                    realm[key] = [choices(p.rstrip(", ")) for p in pieces(value, "|") if p]
            self.realms[name] = realm
        self.nouns = []
        for line in lines(WORLD / "nouns.txt"):
            head, _, words = line.partition(": ")
            kind, sex, realms = head.split()
            realms = [r for r in realms.split(",") if r in self.realms]
            for w in words.split():
                self.nouns.append((kind, sex, realms, w.replace("_", " ")))
        self.by_noun = {n[3]: n for n in self.nouns}
        self.verbs = [[x.strip() for x in line.split(";")] for line in lines(WORLD / "verbs.txt")]
        self.qualities = (WORLD / "qualities.txt").read_text(encoding="utf-8").split()
        more = dict(line.split(": ") for line in lines(WORLD / "more_names.txt"))
        self.names = dict(m=BOYS + more["he"].split(), f=GIRLS + more["she"].split(), n=more["other"].split())
        self.visitors = [[x.strip() for x in line.split("|", 3)] for line in lines(FOLDER / "visitors.txt")]
        self.apart = [(re.compile(rf"\b{re.escape(n)}"), re.compile(rf"\b{re.escape(q)}")) for _, n, q, _ in self.visitors]
        self.forbidden = {normal(p) for *_, p in self.visitors}
        self.asks = {k.strip(): choices(v) for k, v in (e.split("\n", 1) for e in re.split(
            r"^: ", "\n" + (WORLD / "asks.txt").read_text(encoding="utf-8"), flags=re.M)[1:])}

    def allowed(self, prompt):
        """Whether a prompt is none of the visitors' and holds none of their pairs of noun and quality."""
        low = prompt.lower()
        return normal(prompt) not in self.forbidden and not any(n.search(low) and q.search(low) for n, q in self.apart)


def normal(text):
    return " ".join(WORD.findall(text.lower()))


def made_up(rng):
    """A word that nobody knows, to be copied."""
    first = "b bl br c cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sk sl sm sn sp squ st t tr tw v w wh z".split()
    middle = "a e i o u oo ee ai".split()
    last = "b bble ck dge ff ffle g gg k ll lk m mble mp n ng ngle nk p pple r rf rk rp sk sp ss t tch th x zz zzle".split()
    word = "".join(rng.choice(first) + rng.choice(middle) for _ in range(rng.choice((1, 1, 2)))) + rng.choice(last)
    return word + rng.choice(("", "", "", "er", "ling", "o", "y"))


class Being:
    def __init__(self, noun, sex, name=None, looks="", kind=""):
        self.noun, self.sex, self.name, self.looks, self.kind = noun, sex, name, looks, kind
        self.met = False

    def word(self, which, rng):
        noun, name = self.noun, self.name
        the = "the " + noun
        if which == "":
            if name and (not noun or rng.random() < (0.85 if self.kind == "child" else 0.38)):
                return name
            if self.looks and rng.random() < 0.12:
                return f"the {self.looks} {noun}"
            return the
        if which in ("he", "him", "his", "himself"):
            return PRONOUNS[self.sex][("he", "him", "his", "himself").index(which)]
        if which == "n":
            return noun
        if which == "name":
            return name or the
        if which == "the":
            return the
        if not noun:
            return name
        if noun in UNIQUE:
            return the
        described = f"{self.looks} {noun}" if self.looks else noun
        if which in ("a", "A"):
            first, self.met = not self.met, True
            if not first:
                return name or the
            return f"a {described}" + (f" {rng.choice(('named', 'called'))} {name}" if name else "")
        if which in ("an", "alone"):
            return f"a {described if which == 'alone' else noun}"
        raise KeyError(which)


# Rows for what no table holds: {n} is one thing, {s} several, {v} a verb's forms, {q} a quality.
OPEN_ROWS = dict(
    odd=dict(now="{now}", past="{past}"),
    trait=dict(adj="{q}", shows="everyone could [see|tell] [at once|from afar] how {q} <he> was | <he> had always been {q}, [winter and summer|from the very first day]",
               trouble="being {q} [was not easy|made nothing easier] | [just|only] because <he> was so {q}, [everything went wrong|nobody asked <him> along]",
               good="{q} as <he> was, <he> [saw what nobody else saw|knew what to do|did not give up] | [just that|exactly this], being {q}, was what [helped|was needed]",
               after="<he> was still {q}, [and nobody minded|but not alone with it|and that was as it should be]"),
    fear=dict(it="{s}", when="[when|whenever] there were {s} [near|about]", like="{s} [seemed|looked] [huge|wild] and [one never knew|came from all sides]", place="[where the {s} were|right among the {s}]",
              truth="{s} are [just as frightened themselves|quite harmless when one knows them|only lonely]", step="[looked at|greeted] a very small {n}[| from far off]", after="[had|kept] [two|seven] {s} of <his> own | [greeted|nodded to] all {s}, [large and small|one by one]"),
    love=dict(ing="{ing}", do="{do}", did="was busy {ing}", tool="a [bag|box|book] [for|about] {s}", out="the [best|finest] {s} [anyone had seen|of all]", good="it went [better than ever|as if by itself], {s} and all",
              bad="it all went wrong with the {s} | the {s} [got away|were all over the floor]", others="[marvelled at the {s}|had never seen such {s}|clapped]"),
    wish=dict(do="{do}", ing="{ing}", **{"try": "tried it [alone|with a ladder|at midnight], and [nothing came of it|came home with a cold]"}, try2="tried it [again|with a spoon|with eyes shut], but [it would not go|something broke]",
              way="[asked|found] somebody who knew all about {s} | [was patient|waited for the right moment] and [began small|did it step by step]", moment="there it was: <he> could {do}, [really and truly|as in the dream]",
              after="[still liked to {do}|told everyone how it was, {ing}]"),
    loss=dict(n="{n}", why="it was [the only {n} <he> had|a present] and [could not be replaced|meant a great deal]"),
    find=dict(a="{an}", special="it was [no ordinary {n}|the strangest {n} in the world]: it [glowed|hummed|was warm] | [on the {n}|on it] was written: [not for sale|please return]",
              whose="the {n} belonged to [somebody old|a child far away|an inventor] who [missed it|had looked everywhere]", came="[the {n} went home|they got the {n} back], and [there was great joy|the thanks were great]"))


def plural(noun):
    if noun in ("sheep", "deer", "salmon", "trout"):
        return noun
    if noun.endswith(("man", "woman")) and noun != "shaman":
        return noun[:-2] + "en"
    for end, many in (("mouse", "mice"), ("goose", "geese"), ("tooth", "teeth"), ("child", "children"), ("wolf", "wolves"), ("leaf", "leaves"), ("loaf of bread", "loaves of bread"), ("dwarf", "dwarfs"), ("thief", "thieves"), ("calf", "calves"), ("elf", "elves")):
        if noun.endswith(end):
            return noun[:-len(end)] + many
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "sh", "ch", "x", "z")) else "s")


class World:
    """One story's people, place and trouble. `want` fixes what a conversation has settled already."""

    def __init__(self, tables, rng, want=None):
        self.t, self.rng = tables, rng
        want = want or {}
        rng_choice = rng.choice
        self.h = want.get("h") or self.subject()
        kind_realms = self.h_realms
        self.realm_name = want.get("realm") or (rng_choice(kind_realms) if kind_realms and rng.random() < 0.7 else rng_choice(list(tables.realms)))
        self.realm = tables.realms[self.realm_name]
        self.drive = want.get("drive") or rng.choices(DRIVES, WEIGHTS)[0]
        if want.get("row"):
            self.row = want["row"]
        else:
            self.row = rng_choice(tables.rows[self.drive]) if self.drive in tables.rows else {}
            if self.drive in OPEN_ROWS and rng.random() < 0.5:
                self.row = self.open_row()
        taken = {self.h.noun}
        self.c = want.get("c") or self.other("folk", taken, 0.55)
        self.v = self.other("folk", taken | {self.c.noun}, 0)
        self.w = self.other("wise", taken | {self.c.noun, self.v.noun}, 0)
        for b in (self.h, self.c):
            b.met = False
        r = self.realm
        self.fixed = {}
        for key in ("food", "thing"):
            self.fixed[key] = rng_choice([x for x in r[key] if x not in taken] or r[key])
        spots = rng.sample(r["spot"], 2)
        travels = rng.sample(r["travel"], 2)
        weathers = rng.sample(r["weather"], 2)
        self.trees = dict(spot=spots[0], spot2=spots[1], travel=travels[0], travel2=travels[1], weather=weathers[0], weather2=weathers[1],
                          night=rng_choice(r["night"]), party=rng_choice(r["party"]))
        self.trees["in"] = want.get("in") or rng_choice(r["in"])
        self.block = rng_choice(r["block"])
        self.fixed["far"] = self.tell(rng_choice(r["far"]), {})
        self.tone, self.siblings = want.get("tone", ""), want.get("siblings")
        self.closed, self.said, self.arc, self.tail, self.must = False, {}, want.get("arc"), "", ()

    h_realms = ()

    def open_row(self):
        """A row made of any verb, any thing or any quality."""
        t, rng = self.t, self.rng
        now, past, ing, do, count = rng.choice(t.verbs)
        things = do in ("eat", "swallow", "break", "steal", "wash", "sell", "make", "hide", "polish", "chase", "live in", "live under", "drive", "build", "repair", "carry", "invent")
        while True:
            kind, _, _, noun = rng.choice(t.nouns)
            if rng.random() < 0.12:
                noun = made_up(rng)
            elif things and kind not in ("thing", "machine"):
                continue
            if noun not in UNIQUE and noun != self.h.noun:
                break
        many, one = plural(noun), ("an " if noun[0] in "aeiou" else "a ") + noun
        if rng.random() < 0.12:
            many = rng.choice(("old ", "tiny ", "red ", "lost ", "golden ")) + many
        thing = many if count == "many" else one
        words = dict(n=noun, s=many, an=one, q=rng.choice(t.qualities), now=f"{now} {thing}", past=f"{past} {thing}", ing=f"{ing} {thing}", do=f"{do} {thing}")
        row = {k: choices(v.format(**words)) for k, v in OPEN_ROWS[self.drive].items()}
        row["key"] = dict(odd=words["now"], trait=words["q"], fear=many, love=words["ing"], wish=words["do"], loss=noun, find=one)[self.drive]
        return row

    def subject(self):
        t, rng = self.t, self.rng
        x = rng.random()
        if x < 0.07:
            noun, sex, kind, self.h_realms = made_up(rng), rng.choice("mfn"), "made-up", ()
        elif x < 0.17:
            sex, kind = rng.choice("mf"), "child"
            noun = dict(m="boy", f="girl")[sex]
            name = rng.choice(t.names[sex])
            self.h_realms = ("village", "city", "farm", "beach", "house", "school", "forest", "mountain")
            return Being(noun if rng.random() < 0.75 else "", sex, name, rng.choice(("", "little", "young", "small")), kind)
        else:
            kinds = rng.choices(("person", "animal", "machine", "thing", "nature", "fantasy"), (24, 32, 9, 13, 7, 15))[0]
            if not hasattr(t, "by_kind"):
                t.by_kind = {}
                for n in t.nouns:
                    t.by_kind.setdefault(n[0], []).append(n)
            kind, sex, self.h_realms, noun = rng.choice(t.by_kind[kinds])
        if sex == "mf":
            sex = rng.choice("mf") if kind != "animal" else rng.choices("mfn", (44, 44, 12))[0]
        elif sex == "n":
            sex = rng.choices("nmf", (62, 19, 19))[0]
        if noun in WOMEN:
            sex = "f"
        elif noun in MEN:
            sex = "m"
        if kind == "fantasy" and noun not in WOMEN | MEN:
            sex = {"witch": "f", "enchantress": "f", "mermaid": "f", "fairy": "f", "nymph": "f", "wizard": "m", "sorcerer": "m", "merman": "m",
                   "kraken": rng.choice("nm")}.get(noun, rng.choice("mf"))
        looks = ""
        if rng.random() < 0.4 and noun not in UNIQUE and " " not in noun:
            looks = rng.choice(dict(person=("young", "old", "tall", "little", "poor", "merry", "round"), animal=("little", "young", "small", "big", "old",
                    "brown", "white", "grey"), machine=("old", "little", "red", "rusty", "small", "blue", "new"), thing=("old", "little", "small",
                    "red", "blue", "tiny"), nature=("little", "small", "young", "old"), fantasy=("little", "young", "old", "small", "green", "tiny")
                    ).get(kind, ("little", "small", "strange", "blue", "round")))
            if noun.startswith("old ") or noun in ("boy", "girl", "child", "grandmother", "grandfather", "kitten", "puppy"):
                looks = rng.choice(("", "little")) if noun in ("boy", "girl", "child", "kitten", "puppy") else ""
        name = None
        if rng.random() < 0.42 and noun not in UNIQUE:
            pool = t.names["n"] if kind in ("machine", "thing", "nature", "made-up") or (kind in ("animal", "fantasy") and rng.random() < 0.5) else t.names[sex if sex != "n" else "n"]
            name = rng.choice(pool)
            if rng.random() < 0.12:
                name = made_up(rng).capitalize()
        return Being(noun, sex, name, looks, kind)

    def other(self, where, taken, named):
        rng = self.rng
        noun = rng.choice([n for n in self.realm[where] if n not in taken])
        sex = "m" if noun in MEN else "f" if noun in WOMEN else dict(m="f", f="m").get(self.h.sex) or rng.choice("mf")
        name = None
        if rng.random() < named and noun not in UNIQUE:
            name = rng.choice([n for n in (self.t.names[sex] if rng.random() < 0.6 else self.t.names["n"]) if n != self.h.name])
        looks = rng.choice(("", "", "little", "young", "small", "friendly")) if where == "folk" and " " not in noun else ""
        return Being(noun, sex, name, looks)

    # ------------------------------------------------------------ telling

    def tell(self, tree, local):
        out, rnd = [], self.rng.random
        for node in tree:
            if node.__class__ is str:
                out.append(node)
            elif node.__class__ is list:
                out.append(self.tell(node[int(rnd() * len(node))], local))
            else:
                out.append(self.refer(node[0], local))
        return "".join(out)

    def refer(self, ref, local):
        name, *args = ref.split()
        if name[0].isupper():
            name = name[0].lower() + name[1:]
        head, _, which = name.partition(".")
        if not args:
            if head in local:
                return local[head].word(which, self.rng)
            if head in ("h", "c", "v", "w"):
                if which == "The":
                    which = "the"
                return getattr(self, head).word(which, self.rng)
            if name in ("he", "him", "his", "himself"):
                return self.h.word(name, self.rng)
            if head in ("love", "fear", "wish", "trait", "loss", "find", "odd"):
                return self.given_row(which)
            if name in self.trees:
                return self.tell(self.trees[name], {})
            if name in self.fixed:
                return self.fixed[name]
            if name == "thing.a":
                return "a " + self.fixed["thing"]
            if name == "thing.the":
                return "the " + self.fixed["thing"]
            if name == "block.p":
                return self.tell(self.block[0], {})
            if name == "block.s":
                return self.tell(self.block[1], {})
            if name == "episode2":
                return self.tell(self.t.phrases["episode"], {})
            if name in ("trouble", "pay", "after"):
                return self.tell(self.t.phrases[f"{name}.{self.drive}"], {})
            if name == "who":
                return self.tell(self.t.phrases["who." + self.drive], {})
            if name == "close" and self.tone:
                self.closed = True
                return self.tell(self.t.phrases["close." + self.tone], {})
        args = [local.get(a) or getattr(self, a) for a in args]
        if name == "cries" or name == "courage" or name in self.t.phrases:
            return self.tell(self.t.phrases[name], {str(i): a for i, a in enumerate(args, 1)})
        raise KeyError(f"<{ref}>")

    def given_row(self, which):
        """A field of the drive's row; what has been called one thing stays that."""
        if which in self.said:
            return self.said[which]
        text = self.tell(self.row["shows" if which == "shows2" else which], {})
        if which in ("do", "ing", "a", "it", "n", "tool", "past"):
            self.said[which] = text
        return text

    def opening(self):
        t, rng = self.t, self.rng
        if self.siblings:
            text = self.tell(t.phrases["open.siblings"], {"1": self.h, "2": self.c}).replace("SIBLING", plural(self.siblings))
            if self.drive != "pair":
                text += f" {self.h.name} {self.tell(t.phrases['who.' + self.drive], {})}."
        else:
            text = self.tell(t.phrases["open.pair" if self.drive == "pair" else "open"], {})
        if rng.random() < 0.75:
            text += " " + self.tell(t.phrases["more." + self.drive], {})
        if self.tone in ("scary", "bedtime", "funny") and rng.random() < 0.6:
            text = self.tell(t.phrases["start." + self.tone], {}) + " " + text
        elif rng.random() < 0.1:
            text = self.tell(t.phrases["setting"], {}) + " " + text
        return text

    def body(self):
        arcs, shared = self.t.arcs[self.drive], self.t.shared
        if self.rng.random() * (OWN * len(arcs) + len(shared)) >= OWN * len(arcs):
            arcs = shared
        if self.tone == "bedtime" and self.drive in ("plain", "odd", "fear") and self.rng.random() < 0.6:
            arcs = [a for a in arcs if a[0] == "the night"] or arcs
        self.arc = self.arc or self.rng.choice(arcs)
        text = self.tell(self.arc[1], {})
        if self.tone and not text.rstrip().endswith("asleep."):
            if not self.closed:
                text += " " + self.tell(self.t.phrases["close." + self.tone], {})
        return text


SPECIAL = ("<|bos|>", "<|endoftext|>", "<|user|>", "<|teller|>")


def encode(tokenizer, documents):
    """The tokens of documents: 0 opens, 1 ends a text or a turn, 2 begins the reader's turn and 3 the teller's."""
    texts = [text for doc in documents for _, text in doc]
    ids = iter(tokenizer.encode_batch(texts))
    out = []
    for doc in documents:
        one = [0]
        for role, _ in doc:
            one += {"raw": [], "user": [2], "teller": [3]}[role] + next(ids).ids + [1]
        out.append(one)
    return out


def runs(words, n):
    return [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]


def sound(text, nouns, least=LEAST, most=MOST):
    """Whether a story has the right length, no phrase of five words twice, and each noun in both halves."""
    words = WORD.findall(text.lower())
    if not least <= len(words) <= most:
        return False
    phrases = runs(words, 5)
    if len(set(phrases)) < len(phrases):
        return False
    half = len(text) // 2
    first, second = text[:half].lower(), text[half:].lower()
    return all(n.lower() in first and n.lower() in second for n in nouns if n)


SPEAKING = re.compile(r"thought (?:the |[A-Z])|(?:[\w']+ ){0,4}?(?:said|asked|cried|called|whispered|shouted|answered|replied|murmured|wondered|exclaimed|advised|growled|rumbled|begged|sighed|sounded|wanted to know|came the|was the)\b")
OTHER_WORDS = [row.split("/") for row in (
    "began to/started to", "right away/at once", "everyone/everybody", "nobody/no one", "suddenly/all at once/all of a sudden", "in the end/finally/at last", "looked at/gazed at",
    "laughed/had to laugh/chuckled", "happy/glad/cheerful", "beautiful/lovely/pretty", "afraid/scared/frightened", "for a long time/for ages/for a good while", "far away/far off/a long way off",
    "perhaps/maybe", "terribly/awfully", "clever/smart/bright", "ran/rushed/hurried", "soon/before long/shortly", "nodded/agreed", "a while/some time", "did not know/had no idea", "of course/naturally",
    "a whole/an entire", "that evening/that night", "in the morning/at daybreak/when it grew light", "in the night/during the night", "stayed/remained", "asked for/begged for", "trembling/shaking",
    "trembled/shook", "softly/gently/quietly", "hardly/scarcely/barely", "indeed/truly", "almost/nearly", "in secret/secretly", "all day long/the whole day",
    "from then on/after that/from that day", "sat down/took a seat", "set out/set off", "helped/lent a hand", "once more/once again", "for the first time/for the very first time",
    "the others/the rest/all the others", "wonderful/marvellous/splendid", "very quiet/quite still/perfectly quiet", "a long way/a great way", "smiled/beamed/grinned", "shouted/called out", "tiny/very small",
    "a little later/a moment later/soon after", "in front of/before", "went home/walked home/made their way home", "was silent/said nothing/did not speak", "a voice/somebody's voice", "stood there/was standing there",
    "had never seen/had not once seen", "could not sleep/lay awake", "sat there/was sitting there", "all the time/the whole time", "ask/ask", "friends/good friends", "warm/cosy", "strange/odd/curious", "tired/weary")]
OTHER_WORDS = {row[0]: row for row in OTHER_WORDS if not any("<" in w for w in row)}
OTHER = re.compile(r"\b(" + "|".join(sorted(map(re.escape, OTHER_WORDS), key=len, reverse=True)) + r")\b")


def reworded(text, rng):
    """Some words replaced by others of the same sense, so that phrases repeat less."""
    def other(m):
        if rng.random() < 0.45:
            return m[0]
        row = OTHER_WORDS[m[0]]
        return rng.choice(row)
    return OTHER.sub(other, text)


def polish(text, rng, world):
    """Spaces, capitals, articles and agreement put right; some words exchanged."""
    text = reworded(text, rng)
    food = world.fixed["food"]
    if food.endswith("s"):
        text = re.sub(rf"\b{food} (was|is)\b", lambda m: f"{food} {dict(was='were', **{'is': 'are'})[m[1]]}", text).replace(f"here was {food}", f"here were {food}")
    text = re.sub(r"\b[Tt]he ([\w' -]+?) ?, (?:an?|the) \1\b,?(?=[ .])", r"a \1", text)
    text = re.sub(r"\b([A-Z]\w+), \1\b,?(?=[ .])", r"\1", text)
    out = []
    for p in re.split(r"\n\s*\n", text):
        p = re.sub(r"\s+", " ", p).strip()
        p = re.sub(r" ([,.!?;:])", r"\1", p)
        p = re.sub(r"\b([Aa])n? (?=[aeiouAEIOU])(?!one\b|once\b|use|uni|Uni|eu)", r"\1n ", p)
        p = re.sub(r'([.!?])[,.]+(?=["\s]|$)', r"\1", p)
        p = re.sub(r'([.!?]")[.,]', r"\1", p)
        p = re.sub(r'([!?])[.!?]+(?=["\s]|$)', r"\1", p)
        p = re.sub(r"\.\.+(?!\.)", ".", p)
        p = re.sub(r'(^"?|[.!?] "?|\." "?|: ")([a-z])', lambda m: m[1] + m[2].upper(), p)
        p = re.sub(r'([!?]" )([a-z])', lambda m: m[0] if SPEAKING.match(p, m.end(1)) else m[1] + m[2].upper(), p)
        p = re.sub(r'(?<=[\w,]" )[A-Z](?=he \w)', lambda m: m[0].lower(), p)
        if p:
            out.append(p)
    return "\n\n".join(out)


class Teller:
    """Documents by number."""

    def __init__(self):
        self.t = Tables()
        self.books = json.loads((WORLD / "sentences.json").read_text())
        self.talk = json.loads((WORLD / "smalltalk.json").read_text())

    def story(self, rng, want=None, opening=None, tries=60, least=LEAST, most=MOST):
        """(world, text): `opening` replaces the beginning."""
        held = {}
        for i in range(tries):
            if i % HELD == 0:
                held = {}
            world = World(self.t, rng, {**(want or {}), **held})
            start = world.opening() if opening is None else opening(world)
            if start is None:
                continue
            text = polish(start + "\n\n" + world.body() + " " + world.tail, rng, world)
            held = dict(drive=world.drive, arc=world.arc)
            nouns = [*world.must, world.siblings or world.h.noun or world.h.name] + ([world.c.noun or world.c.name] if world.drive == "pair" and not world.siblings else []) + list((want or {}).get("nouns", ()))
            if sound(text, nouns, least, most) and self.t.allowed(text.split("\n\n")[0]):
                return world, text
        return None, None

    def say(self, key, world=None, **local):
        """An entry of asks.txt; `local` holds its words."""
        rng = local.pop("rng")
        def tell(tree):
            out = []
            for node in tree:
                if isinstance(node, str):
                    out.append(node)
                elif isinstance(node, list):
                    out.append(tell(rng.choice(node)))
                elif node[0] in local:
                    out.append(local[node[0]])
                else:
                    out.append(tell(self.t.asks[node[0]]))
            return "".join(out)
        text = re.sub(r"\s+", " ", tell(self.t.asks[key])).strip()
        text = re.sub(r" ([,.!?;:])", r"\1", text)
        return re.sub(r"\b([Aa]) (?=[aeiou](?!ne\b|nce\b|se|ni))", r"\1n ", text)

    # ------------------------------------------------------------ requests

    def subject_phrase(self, world, rng):
        """What a reader would call the story's subject: "a shy robot", "a dragon who loves cooking"."""
        h, d, row = world.h, world.drive, world.row
        if world.siblings:
            base = f"{rng.choice(('two', 'two', 'the two', '2'))} {plural(world.siblings)}"
            if d == "pair" or rng.random() < 0.4:
                return base + rng.choice(("", f" named {h.name} and {world.c.name}", f", {h.name} and {world.c.name}", "", " and their adventure"))
            return base + " " + {"find": f"who find {world.given_row('a')}" if d == "find" else "", "odd": f"and {rng.choice(('their secret', 'a storm'))}", "plain": "who go on a journey"}.get(d, "")
        mine = " "
        if h.noun in UNIQUE:
            base = "the " + h.noun
        elif not h.noun:
            base = rng.choice((f"{h.name}", f"a {'boy' if h.sex == 'm' else 'girl'} named {h.name}", f"a {'boy' if h.sex == 'm' else 'girl'} called {h.name}"))
        else:
            base = f"a {h.looks} {h.noun}" if h.looks and rng.random() < 0.7 else f"a {h.noun}"
            if d == "trait" and rng.random() < 0.65:
                base = f"a {rng.choice(('', '', 'very ', 'little ' if not h.looks else ''))}{row['key']} {h.noun}"
                return base + (f" {rng.choice(('named', 'called'))} {h.name}" if h.name and rng.random() < 0.7 else "")
            if h.name and h.kind != "fantasy" and rng.random() < 0.3:
                base = rng.choice((f"my {h.noun} {h.name}", f"our {h.noun} {h.name}", f"my {h.noun}, {h.name}", f"{h.name} the {h.noun}", f"my {h.looks} {h.noun} {h.name}", f"{h.name}, my {h.noun}")).replace("  ", " ")
                mine = rng.choice((", ", ", ", " "))
            elif h.name and rng.random() < 0.75:
                base += f" {rng.choice(('named', 'called', 'whose name is'))} {h.name}"
        he, him, his, _ = PRONOUNS[h.sex]
        who = rng.choice(("who", "who", "that"))
        if rng.random() < 0.22 and d not in ("pair",):
            return base                     # the reader leaves the rest to the teller
        tail = ""
        if d == "love":
            ing, do = (world.given_row(k) for k in ("ing", "do"))
            tail = rng.choice((f"{who} loves {ing}", f"{who} loves {ing}", f"{who} loves to {do}", f"{who} likes {ing}", f"{who} likes to {do}", f"{who} is mad about {ing}",
                               f"{who} dreams of {ing}", f"and {his} love of {ing}", f"{who} can {do}", f"who's crazy about {ing}", f"{who} only wants to {do}"))
        elif d == "fear":
            it = row["key"]
            tail = rng.choice((f"{who} is afraid of {it}", f"{who} is afraid of {it}", f"{who} is scared of {it}", f"{who} was afraid of {it}", f"who's afraid of {it}", f"{who} is terrified of {it}", f"{who} fears {it}"))
        elif d == "wish":
            do, ing = world.given_row("do"), world.given_row("ing")
            tail = rng.choice((f"{who} wants to {do}", f"{who} wants to {do}", f"{who} dreams of {ing}", f"{who} wishes to {do}", f"{who} would like to {do}", f"{who} learns to {do}",
                               f"{who} tries to {do}", f"{who} longs to {do}", f"who wanted to {do}"))
        elif d == "trait":
            tail = f"{who} {rng.choice(('is', 'is', 'is very', 'is too', 'was'))} {row['key']}"
        elif d == "loss":
            tail = rng.choice((f"{who} lost {his} {row['key']}", f"{who} has lost {his} {row['key']}", f"{who} loses {his} {row['key']}", f"and {his} lost {row['key']}", f"looking for {his} {row['key']}"))
        elif d == "find":
            it = world.given_row("a")
            tail = rng.choice((f"{who} finds {it}", f"{who} found {it}", f"{who} discovers {it}", f"and {it}"))
        elif d == "odd":
            tail = f"{who} {row['key']}"
        elif d == "pair":
            c = world.c
            other = f"{c.name}" if not c.noun else f"a {c.noun}" + (f" named {c.name}" if c.name and rng.random() < 0.5 else "")
            if rng.random() < 0.16 and h.noun and h.noun not in UNIQUE:
                return rng.choice(("friendship between {} and {}", "the friendship of {} and {}", "how {} and {} became friends", "an adventure of {} and {}", "a meeting between {} and {}", "{} and {}")).format(base, other)
            tail = rng.choice((f"and {other}", f"and {other}", f"and {other} who are friends", f"who meets {other}", f"and {his} friend, {other}", f"and {other} who become friends"))
        elif d == "magic":
            tail = rng.choice(("with a secret", "with magic powers", f"{who} can do magic", "and a magic secret"))
        else:
            tail = rng.choice(("", "", "and an adventure", "who goes on a journey", "and a stranger", "in a storm"))
        return f"{base}{mine if tail.startswith('who') else ' '}{tail}".strip()

    def request(self, world, rng, realm_said=False):
        about = self.subject_phrase(world, rng)
        text = self.say("request" + ("." + world.tone if world.tone else ""), rng=rng, about=about,
                        place=rng.choice(self.t.realms[world.realm_name]["names"]) if realm_said else "")
        if realm_said:
            place = world.tell(world.trees["in"], {}) if rng.random() < 0.35 else {"sea": "in the sea", "beach": "by the sea", "mountain": "in the mountains", "space": "in space", "sky": "in the sky",
                    "snow": "in the snow", "school": "at school", "farm": "on a farm", "castle": "in a castle", "river": "by the river", "circus": "at the circus"}.get(
                    world.realm_name, "in a " + self.t.realms[world.realm_name]["names"][0])
            text = text.rstrip(".?! ") + rng.choice((" ", " ", ", set ", " who lives " if about.count("who") == 0 and rng.random() < 0.3 else " ")) + place
        x = rng.random()
        if x < 0.3:
            text = text.lower()
        if rng.random() < 0.35:
            text = text.rstrip(".!")
        elif text[-1] not in ".?!" and rng.random() < 0.6:
            text += "."
        if rng.random() < 0.5:
            text = text[0].upper() + text[1:]
        if rng.random() < 0.04 and len(text) > 20:
            i = rng.randrange(3, len(text) - 3)
            if text[i].isalpha() and text[i + 1].isalpha():
                text = text[:i] + text[i + 1] + text[i] + text[i + 2:]
        return text

    def given(self, rng):
        """A function that opens a story with a sentence of the reader's."""
        def opening(world):
            h = world.h
            if self.books and rng.random() < 0.3:
                noun, sentence = rng.choice(self.books)
                h.noun, h.name, h.looks, h.kind = noun, None, "", "thing"
                known = self.t.by_noun.get(noun)
                if known and known[1] in ("m", "f"):
                    h.sex = known[1]
                start = sentence
            else:
                name = h.name or rng.choice(self.t.names["m" if h.sex == "m" else "f"])
                he = h.word("he", rng)
                which = "given.mass" if h.noun in MASS and rng.random() < 0.7 else "given.many" if h.noun and h.noun not in UNIQUE and rng.random() < 0.1 else "given"
                many = plural(h.noun or "child")
                start = self.say(which, rng=rng, a=h.word("alone", rng), the=h.word("the", rng), n=h.noun or "child", name=name, he=he, his=h.word("his", rng), him=h.word("him", rng),
                                 place=world.tell(world.trees["in"], {}), spot=world.tell(world.trees["spot"], {}), other=f"a {world.c.noun}", thing="a " + world.fixed["thing"],
                                 ns=many, far=world.fixed["far"], weather=world.tell(world.trees["weather"], {}), food=world.fixed["food"], year=str(rng.choice((2050, 2080, 2099, 2120, 2200, 2340, 3000, 1850, 1900))),
                                 name2=rng.choice(self.t.names["f" if h.sex == "m" else "m"]), made=made_up(rng).capitalize())
                if which == "given.many":
                    world.tail, world.must = self.say("many.end", rng=rng, ns=many, h="the " + (h.noun or "child")), (many,)
                elif name in start:
                    h.name, world.must = name, (name,)
                    if h.noun not in start:         # only a name: the story keeps to it
                        h.noun, h.looks, h.kind = "", "", "child"
                        h.sex = "m" if h.sex == "m" else "f"
                elif h.noun == "":
                    h.name = name
                start = start[0].upper() + start[1:]
            h.met = True
            if not self.t.allowed(start):
                return None
            world.given_text = start
            return start + " " + world.tell(self.t.phrases["opening.given"], {}) + " " + (world.tell(self.t.phrases["more." + world.drive], {}) if rng.random() < 0.6 else "")
        return opening

    # ------------------------------------------------------------ documents

    def want(self, rng):
        """What a conversation may settle beforehand."""
        want = {}
        x = rng.random()
        if x < 0.24:
            want["tone"] = rng.choice(("bedtime", "happy", "funny", "scary", "happy", "bedtime", "sad"))
        return want

    def pair_of(self, rng, want):
        """Sometimes two who are named together: two brothers, Lily and Ben."""
        x = rng.random()
        if x < 0.3:
            sex = rng.choice("mf")
            noun = dict(m="brother", f="sister")[sex]
            names = rng.sample(self.t.names[sex], 2)
            first, second = rng.choice((("elder", "younger"), ("big", "little"), ("older", "younger")))
            want.update(drive=rng.choice(("pair", "pair", "find", "odd", "plain")), siblings=noun, h=Being(f"{first} {noun}", sex, names[0], kind="person"), c=Being(f"{second} {noun}", sex, names[1]))
        elif x < 0.65:
            sex = rng.choice("mf")
            other = sex if rng.random() < 0.5 else dict(m="f", f="m")[sex]
            a = rng.choice(self.t.names[sex])
            b = rng.choice([n for n in self.t.names[other] if n != a])
            want.update(drive="pair", h=Being("", sex, a, kind="child"), c=Being("", other, b, kind="child"))
        return want

    def document(self, number):
        """[(role, text)]: roles are "user", "teller" and "raw" (plain text after <|bos|>)."""
        rng = random.Random(number * 7919 + 17)
        while True:
            doc = self.attempt(rng)
            if doc:
                if doc[0][0] == "user" and rng.random() < 0.06:     # a system text stands before the first turn; it changes nothing
                    doc[0] = "user", self.say("system", rng=rng) + "\n\n" + doc[0][1]
                if all(self.t.allowed(text) for role, text in doc if role == "user"):
                    return doc

    def attempt(self, rng):
        x = rng.random()
        if x < 0.18:                                    # a plain story
            _, text = self.story(rng, self.pair_of(rng, self.want(rng)) if rng.random() < 0.3 else self.want(rng))
            return text and [("raw", text)]
        if x < 0.34:                                    # a plain opening, any sentence
            _, text = self.story(rng, self.want(rng), self.given(rng))
            return text and [("raw", text)]
        if x < 0.39:                                    # an opening in a conversation: the answer begins with it
            world, text = self.story(rng, {}, self.given(rng)) if rng.random() < 0.7 else self.story(rng)
            if not text:
                return None
            start = getattr(world, "given_text", None) or re.match(r"[^.!?]*[.!?]", text).group()
            if not text.startswith(start):
                return None
            if rng.random() < 0.35 and start.count(" ") > 6:
                keep = rng.randrange(4, start.count(" "))
                start = " ".join(start.split(" ")[:keep])
            return [("user", start), ("teller", text)]
        if x < 0.44:                                    # a request without the conversation's marks
            world, text = self.story(rng, self.want(rng))
            return text and [("raw", self.request(world, rng) + "\n\n" + text)]
        if x < 0.83:
            return self.conversation(rng)
        if x < 0.96:
            return self.off_topic(rng)
        return self.greeting(rng)

    def conversation(self, rng):
        want = self.want(rng)
        pair = {}
        if rng.random() < 0.08:
            want = self.pair_of(rng, want)
        elif rng.random() < 0.12:                       # a child with a name
            sex = rng.choice("mf")
            want["h"] = Being("", sex, rng.choice(self.t.names[sex]), kind="child")
        world, text = self.story(rng, want)
        if not text:
            return None
        ask = self.request(world, rng, rng.random() < 0.16)
        if not self.t.allowed(ask):
            return None
        doc = [("user", ask), ("teller", text)]
        x = rng.random()
        if x < 0.10:                                    # another one about the same
            tone = rng.choice(("", "happy", "funny", "bedtime", "sad", "scary"))
            _, text = self.story(rng, dict(h=world.h, tone=tone))
            if text:
                doc += [("user", self.say("another" + ("." + tone if tone else ""), rng=rng, n=world.h.noun or world.h.name)), ("teller", text)]
        elif x < 0.16:                                  # it goes on
            more, text = self.story(rng, dict(h=world.h, c=world.c, realm=world.realm_name, drive=rng.choice(("plain", "pair"))),
                                    lambda w: self.again(w))
            if text:
                doc += [("user", self.say("continue", rng=rng, n=world.h.noun or world.h.name)), ("teller", text)]
        elif x < 0.22:                                  # a quite different one
            other, text = self.story(rng, self.want(rng))
            if text:
                doc += [("user", self.request(other, rng)), ("teller", text)]
        elif x < 0.27:
            doc += [("user", self.say("thanks", rng=rng)), ("teller", self.say("thanks.reply", rng=rng, n=world.h.noun or world.h.name))]
        if not all(self.t.allowed(x) for role, x in doc if role == "user"):
            return None
        return doc

    def again(self, world):
        for b in (world.h, world.c):
            b.met = True
        return self.say("again", rng=world.rng, h=world.h.word("", world.rng), c=world.c.word("", world.rng), spot=world.tell(world.trees["spot"], {}),
                        weather=world.tell(world.trees["weather"], {}), food=world.fixed["food"])

    def off_topic(self, rng):
        """A question, code, a poem: a kind word, and a short story about what was asked."""
        x = rng.random()
        if x < 0.13:
            land = rng.choice(("Spain", "Italy", "Norway", "Japan", "Peru", "Egypt", "Kenya", "China", "India", "Brazil", "Canada", "Greece", "Poland", "Turkey", "Chile", "Ireland", "Iceland",
                               "Berlin", "London", "Rome", "Paris", "Tokyo", "Cairo", "Madrid", "Sweden", "Finland", "Cuba", "Mexico", "Austria", "Hungary", "Nepal", "Morocco", "Texas", "Africa", "Asia", "Europe"))
            world, text = self.story(rng, {"in": parse(f"in {land}"), "nouns": ()}, most=MOST - 25)
            if not text:
                return None
            tail = self.say("land.end", rng=rng, land=land, h=world.h.word("", rng))
            text = text + " " + tail[0].upper() + tail[1:]
            half = len(text) // 2
            if land not in text[:half] or land not in text[half:]:
                return None
            ask, about = self.say("question.land", rng=rng, land=land), land
        elif x < 0.27:
            name = made_up(rng) + rng.choice(("", "", "ify", "acci", "oni", "ator", "ize", "elli", "ing", "_" + made_up(rng), "ma")) if rng.random() < 0.65 else rng.choice(("sort", "search", "add", "count", "merge", "factorial", "reverse", "sum", "prime", "parse", "filter", "print", "hello", "main", "test", "greet", "swap", "split", "median", "palindrome"))
            h = Being(rng.choice(("program", "number", "computer", "letter")), "n", name, rng.choice(("little", "small", "")), "child")
            world, text = self.story(rng, dict(h=h), most=MOST - 25)
            if not text or name not in text[:len(text) // 2].lower() or name not in text[len(text) // 2:].lower():
                return None
            ask, about = self.say("question.code", rng=rng, name=name), h.name
        else:
            world, text = self.story(rng, most=MOST - 25)
            if not text:
                return None
            noun = world.h.noun or world.h.name
            one = noun if not world.h.noun else "the " + noun if noun in UNIQUE else f"a {noun}"
            ask = self.say(rng.choice(("question.noun", "question.noun", "question.poem", "question.other", "question.chat")), rng=rng, n=noun, a=one, name=rng.choice(self.t.names["f"]), number=str(rng.randrange(1200, 2030)), ns=plural(noun),
                           x=str(rng.randrange(2, 99)), y=str(rng.randrange(2, 99)))
            about = one
            if rng.random() < 0.12:                     # what somebody really said
                noun, ask = rng.choice(self.talk)
                known = self.t.by_noun.get(noun, ("", "n"))[1]
                h = Being(noun, known if known in ("m", "f") else rng.choice("mfn"))
                _, text = self.story(rng, dict(h=h), most=MOST - 25)
                about = f"a {noun}" if noun not in UNIQUE else f"the {noun}"
                about = re.sub(r"^a (?=[aeiou])", "an ", about)
                if not text:
                    return None
        if rng.random() < 0.3:
            ask = ask.lower()
        if rng.random() < 0.5:
            ask = ask[0].upper() + ask[1:]
        reply = self.say("sorry", rng=rng, about=about)
        reply = reply[0].upper() + reply[1:]
        return [("user", ask), ("teller", reply + "\n\n" + text)] if self.t.allowed(ask) else None

    def greeting(self, rng):
        kind = rng.choice(("hello", "who", "how", "bye", "thanks", "feel"))
        world = World(self.t, rng)
        noun = self.subject_phrase(world, rng)
        up = lambda s: s[0].upper() + s[1:]
        doc = [("user", self.say(kind, rng=rng)), ("teller", up(self.say(kind + ".reply", rng=rng, about=noun, n=world.h.noun or world.h.name)))]
        if kind in ("hello", "who", "how", "feel") and rng.random() < 0.6:
            other, text = self.story(rng, self.want(rng))
            if text:
                doc += [("user", self.request(other, rng)), ("teller", text)]
        return doc if all(self.t.allowed(x) for role, x in doc if role == "user") else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    teller = Teller()
    for number in range(args.seed, args.seed + args.count):
        for role, text in teller.document(number):
            print(f"[{role}] {text}")
        print("\n----\n")


if __name__ == "__main__":
    main()
