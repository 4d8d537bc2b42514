"""Composes short stories for small children from the plots in `plots/*.txt`.

    python compose.py COUNT [--seed N] [--plot NAME]     # prints stories
    python compose.py --list                             # the plots, and how many wordings each has

A story is a function of its seed and of the plots alone. A plot file is a series of entries:

    : sad                       a phrase, used as <sad h>; <1> is its first argument
    <1> began to cry. | <1> was very sad.

    === kite * 2                a plot, told twice as often as others: who and what is in it, a line ---, then its text
    h = child                   a character (see `cast`)
    food := a pear | a plum     words chosen once for the whole story
    a, b := wet ; dry | hot ; cold      words chosen together
    ---
    <open h>                    a phrase; <h> a name, <he> <his> <him> its pronouns, <f.he> another's
    [He ran | He walked] home.  one of several wordings, which may nest

A blank line begins a paragraph. Sentences get their capitals, and "a" becomes "an", at the end. A phrase may have
variants by the kind of its first argument (`open.child`) or by the season of the story (`day.winter`).
"""

import argparse
import pathlib
import random
import re

FOLDER = pathlib.Path(__file__).parent / "plots"
HELD_OUT = 1 << 40           # stories from this number on are never trained on
SEASONS = ("spring", "summer", "autumn", "winter")

# ---------------------------------------------------------------- who there is

BOYS = ("Tom Ben Sam Max Jack Leo Finn Hugo Peter Oscar Will Ned Theo Milo Noah Luke Adam Toby Robin Emil Anton Karl Omar Amir Kofi "
        "Juma Ravi Kenji Mateo Pablo Tariq Ivan Bram Jan Paul Simon Henry Arthur Daniel David Jonah Eli Otto Rufus Timo Sipho Joseph "
        "Martin Edward Frank Walter Harry Charlie George John Felix Ali Samuel Anders Mark Jacob Benno Rico Hassan Dani Piet").split()
GIRLS = ("Lily Anna Mia Lucy Rose Emma Nora Ella Ida Clara Lena Maya Zoe Ruby Alice Jane Mary Molly Daisy Sara Greta Hanna Marta Elsa "
         "Nina Ada Eva Amina Zuri Asha Leila Priya Yuki Lola Sofia Kate Pia Julia Ellen Betty Martha Sophie Grace Lotte Tilda Olga Vera "
         "Hattie Susan Helen Polly Nelly Maria Rosa Fatima Thandi Johanna Flora Violet Stella Emily Kitty Ruth Lina Elin Sanna").split()
HE_PETS = ("Pip Nibble Bobo Patch Button Moss Tumble Pepper Olly Whisk Bruno Rusty Bim Hopper Biscuit Toto Barney Rolo Taro Momo Tiko "
           "Fuzz Humphrey Jasper Basil Bertie Monty Chester Archie Ziggy Nutkin Fergus Benji Pog Scamp").split()
SHE_PETS = ("Dot Tilly Fern Hazel Poppy Bramble Clover Muffin Mimi Coco Willow Honey Bella Luna Pearl Maple Olive Ivy Juniper Penny "
            "Pippa Tansy Dolly Snowdrop Minnie Heather Birdie Plum Lulu Nell Peach Tuppy Sorrel Holly Cricket").split()

# noun: (classes, home, food, what it walks or reaches with, colours)
ANIMALS = {
    "mouse": ("small wood climber friend", "in a hole under an old oak tree", "seeds", "paw", "grey brown white"),
    "squirrel": ("small wood climber friend", "high up in a hollow tree", "nuts", "paw", "red brown grey"),
    "hedgehog": ("small wood prickly friend", "under a heap of dry leaves", "beetles", "paw", "brown"),
    "rabbit": ("small wood digger fast friend", "in a burrow at the edge of the wood", "carrots", "paw", "brown white grey"),
    "hare": ("wood fast friend", "in the long grass of the meadow", "clover", "paw", "brown"),
    "mole": ("small wood digger friend", "in a tunnel under the meadow", "worms", "paw", "black"),
    "frog": ("small wood water hopper friend", "in a pond among the reeds", "flies", "foot", "green"),
    "robin": ("small wood bird friend", "in a nest in the hedge", "worms", "wing", "brown"),
    "sparrow": ("small wood bird friend", "in a nest under the roof", "crumbs", "wing", "brown"),
    "owl": ("wood bird wise", "in the top of an old pine tree", "beetles", "wing", "brown grey white"),
    "crow": ("wood bird clever", "in a nest at the top of an elm tree", "bread", "wing", "black"),
    "magpie": ("wood bird clever", "in a nest of sticks in a poplar tree", "berries", "wing", "black"),
    "fox": ("wood clever fast", "in a den under the roots of a tree", "eggs", "paw", "red"),
    "badger": ("wood digger wise friend", "in a deep, warm den under the hill", "roots", "paw", "grey"),
    "bear": ("wood big climber", "in a cave on the hill", "honey", "paw", "brown black"),
    "wolf": ("wood big fierce", "in a cave in the rocks", "meat", "paw", "grey"),
    "deer": ("wood big fast gentle", "deep in the forest", "leaves", "foot", "brown"),
    "otter": ("water wood swimmer friend", "on the bank of the river", "fish", "paw", "brown"),
    "beaver": ("water wood swimmer friend", "in a house of sticks on the river", "bark", "paw", "brown"),
    "duck": ("farm water swimmer bird friend", "in the reeds beside the pond", "bread", "wing", "white brown"),
    "goose": ("farm water swimmer bird", "in a shed behind the barn", "grass", "wing", "white grey"),
    "hen": ("farm bird friend", "in a little house in the yard", "corn", "wing", "white brown red speckled"),
    "pig": ("farm friend", "in a sty beside the barn", "apples", "foot", "pink"),
    "lamb": ("farm small gentle", "in the green field behind the farm", "grass", "foot", "white black"),
    "goat": ("farm climber", "on the side of the hill", "leaves", "foot", "white brown black"),
    "donkey": ("farm big", "in an old stable", "hay", "foot", "grey brown"),
    "cow": ("farm big gentle", "in a warm barn", "grass", "foot", "brown white"),
    "horse": ("farm big fast gentle", "in a stable behind the house", "hay", "foot", "brown white black"),
    "cat": ("farm pet climber", "in a basket beside the stove", "milk", "paw", "grey black white"),
    "dog": ("farm pet fast", "in a kennel in the yard", "bones", "paw", "brown black white"),
    "tortoise": ("slow wise friend", "in a corner of the garden", "salad", "foot", "green"),
    "snail": ("small slow wood", "under a big leaf", "lettuce", "foot", "yellow"),
    "ant": ("tiny", "in an anthill under the pine trees", "crumbs", "foot", "black red"),
    "bee": ("tiny flier", "in a hive at the end of the garden", "honey", "wing", "golden"),
    "elephant": ("savanna giant gentle", "on the wide, hot plain", "leaves", "foot", "grey"),
    "lion": ("savanna giant fierce", "in the tall yellow grass", "meat", "paw", "golden"),
    "monkey": ("savanna climber clever", "in the top of a fig tree", "bananas", "hand", "brown"),
    "giraffe": ("savanna giant gentle", "among the thorn trees", "leaves", "foot", "yellow"),
    "zebra": ("savanna big fast", "on the wide, hot plain", "grass", "foot", "striped"),
    "parrot": ("savanna bird clever", "in the top of a palm tree", "figs", "wing", "green red"),
    "hippo": ("savanna giant", "in the brown river", "grass", "foot", "grey"),
}
# noun: (classes, sex)
GROWN = {
    "old woman": ("old poor", "f"), "old man": ("old poor", "m"), "baker": ("worker", "mf"), "farmer": ("worker country", "m"),
    "miller": ("worker country", "m"), "fisherman": ("sea", "m"), "shoemaker": ("worker craft", "m"), "tailor": ("worker craft", "m"),
    "weaver": ("worker craft", "f"), "potter": ("worker craft", "mf"), "carpenter": ("worker craft", "m"), "smith": ("worker craft", "m"),
    "woodcutter": ("worker country poor", "m"), "shepherd": ("country", "mf"), "gardener": ("worker country", "mf"),
    "teacher": ("town", "mf"), "doctor": ("town", "mf"), "sailor": ("sea", "m"), "clockmaker": ("worker craft", "m"), "widow": ("poor", "f"),
    "king": ("royal", "m"), "queen": ("royal", "f"), "prince": ("royal young", "m"), "princess": ("royal young", "f"),
    "merchant": ("rich town", "m"), "giant": ("huge", "m"), "witch": ("magic", "f"), "fairy": ("magic", "f"), "wizard": ("magic", "m"),
    "postman": ("town", "m"),
}
KIN = dict(mother="f", father="m", grandmother="f", grandfather="m", aunt="f", uncle="m", sister="f", brother="m")
# class: (adjectives, nouns)
THINGS = {
    "kite": ("red blue yellow green paper", "kite"), "boat": ("red white blue little wooden", "boat"),
    "ball": ("red blue yellow green striped", "ball"), "hat": ("red blue green woollen straw", "hat"),
    "toy": ("red blue wooden new little", "train cart drum top horse"), "cuddly": ("old brown soft grey little", "bear rabbit"),
    "treasure": ("golden silver", "ring coin key cup"), "warm": ("red blue green woollen thick", "scarf coat blanket"),
    "tool": ("old new sharp heavy", "hammer saw axe"), "flower": ("red white yellow blue", "rose tulip lily poppy"),
    "shiny": ("silver bright golden", "button spoon bell ring"), "music": ("old wooden little", "flute fiddle drum"),
    "carry": ("big old round little", "basket pail"), "tree": ("old tall big young", "oak elm ash"),
}
PRONOUNS = dict(m=("he", "him", "his", "himself"), f=("she", "her", "her", "herself"), n=("it", "it", "its", "itself"))


class Being:
    """A character or a thing. `mention` is how a sentence in the middle of the story calls it."""

    def __init__(self, kind, noun, sex, name=None, looks="", row=None):
        self.kind, self.noun, self.sex, self.name, self.looks, self.row = kind, noun, sex, name, looks, row
        self.alone = True               # no other being of the story has this noun
        self.met = False                # whether its name has been told

    def word(self, which, rng):
        """<h.which> in words."""
        noun, name = self.noun, self.name
        described = f"{self.looks} {noun}" if self.looks else noun
        he, him, his, himself = PRONOUNS[self.sex]
        if which == "":
            if self.kind == "thing":
                return f"the {described}" if rng.random() < 0.4 else f"the {noun}"
            if self.kind == "kin":
                return name
            if name and not self.met and self.kind == "animal":
                self.met = True
                return f"{name} the {noun}"
            if name is None or (self.alone and rng.random() < 0.13):
                return f"the {noun}" if rng.random() < 0.85 or self.kind == "grown" else f"the {self.looks or 'little'} {noun}"
            return name
        if which == "a":
            self.met = True
            if name and self.kind != "kin":
                return f"a {described} {rng.choice(('named', 'called'))} {name}"
            return f"a {described}"
        if which in ("he", "him", "his", "himself"):
            return dict(he=he, him=him, his=his, himself=himself)[which]
        if which in ("home", "food", "hand", "colour"):
            return self.row[which]
        if which == "name":
            self.met = True
            return name if name and self.kind != "kin" else noun
        if which == "call":             # how others speak to it
            return name if name and self.kind != "kin" else noun.split()[-1].capitalize() if self.kind == "animal" else f"dear {noun}"
        if which == "an":
            return f"a {described}"
        if which == "full":
            return described
        if which == "n":
            return noun
        if which == "the":
            return f"the {noun}"
        if which == "looks":
            return self.looks
        if which == "child":
            return dict(m="boy", f="girl")[self.sex]
        if which == "son":
            return dict(m="son", f="daughter")[self.sex]
        if which == "man":
            return dict(m="man", f="woman")[self.sex]
        raise KeyError(which)


class Story:
    """The beings and words of one story while it is told."""

    def __init__(self, rng, phrases):
        self.rng, self.phrases, self.words = rng, phrases, {}
        self.words["season"] = rng.choice(SEASONS)

    def cast(self, spec):
        """A being for `child`, `child girl`, `animal wood small`, `animal =fox`, `grown worker`, `kin mother`, `thing kite`.

        `named` and `plain` give an animal a name or none; `same` and `other` its sex beside the hero's. Without these a second character is of
        the other sex, so that pronouns stay clear. `=a,b` names the nouns, `-a,b` leaves some out, several classes must all hold."""
        rng = self.rng
        spec = rng.choice(spec.split("|")).split()
        kind, rest = spec[0], spec[1:]
        flags = {w for w in rest if w in ("named", "plain", "same", "other", "boy", "girl", "he", "she", "little")}
        only = [n.replace("_", " ") for w in rest if w[0] == "=" for n in w[1:].split(",")]
        without = {n.replace("_", " ") for w in rest if w[0] == "-" for n in w[1:].split(",")}
        classes = [w for w in rest if w not in flags and w[0] not in "=-"]
        beings = [b for b in self.words.values() if isinstance(b, Being)]
        taken = {b.noun for b in beings} | without
        hero = self.words.get("h")
        sex = rng.choice("mf")
        if isinstance(hero, Being) and hero.sex != "n":
            sex = hero.sex if "same" in flags else dict(m="f", f="m")[hero.sex]
        sex = "m" if flags & {"boy", "he"} else "f" if flags & {"girl", "she"} else sex

        def fresh(names):
            used = {b.name for b in beings}
            return rng.choice([n for n in names if n not in used])

        if kind == "child":
            noun, name = ("boy", fresh(BOYS)) if sex == "m" else ("girl", fresh(GIRLS))
            being = Being("child", noun, sex, name, "little" if rng.random() < 0.7 else "")
        elif kind == "animal":
            nouns = only or [n for n, row in ANIMALS.items() if all(c in row[0].split() for c in classes)]
            noun = rng.choice([n for n in nouns if n not in taken])
            row = ANIMALS[noun]
            named = "named" in flags or ("plain" not in flags and rng.random() < (0.65 if hero is None else 0.25))
            sex = "f" if noun in ("hen", "cow") else sex
            name = fresh(HE_PETS if sex == "m" else SHE_PETS) if named else None
            colour = rng.choice(row[4].split())
            big = "big" in row[0] or "giant" in row[0]
            looks = "little" if "little" in flags else rng.choice(["", colour, "big" if big else "little", "young"])
            being = Being("animal", noun, sex, name, looks, dict(home=row[1], food=row[2], hand=row[3], colour=colour))
        elif kind == "grown":
            nouns = only or [n for n, row in GROWN.items() if all(c in row[0].split() for c in classes)]
            noun = rng.choice([n for n in nouns if n not in taken])
            may = GROWN[noun][1]
            being = Being("grown", noun, sex if sex in may else may[0], None, "")
        elif kind == "kin":
            noun = rng.choice(classes)
            being = Being("kin", noun, KIN[noun], f"{hero.word('his', rng)} {noun}")
        elif kind == "thing":
            looks, noun = (rng.choice(x.split()) for x in THINGS[rng.choice(classes)])
            being = Being("thing", noun, "n", None, looks)
        else:
            raise KeyError(kind)
        for b in beings:
            if b.noun == being.noun:
                b.alone = being.alone = False
        return being

    def tell(self, tree, local):
        """The text of a template. `local` holds a phrase's arguments."""
        out = []
        for node in tree:
            if isinstance(node, str):
                out.append(node)
            elif isinstance(node, list):
                out.append(self.tell(self.rng.choice(node), local))
            else:
                out.append(self.refer(node[0], local))
        return "".join(out)

    def refer(self, ref, local):
        name, *args = ref.split()
        upper = name[0].isupper() or name[0] == "^"
        name = name.lstrip("^")
        name = name[0].lower() + name[1:]
        text = self.resolve(name, args, local)
        return text[0].upper() + text[1:] if upper and text else text

    def resolve(self, name, args, local):
        head, _, which = name.partition(".")
        value = local.get(head, self.words.get(head))
        if value is not None and not args:
            if isinstance(value, Being):
                return value.word(which, self.rng)
            if not which:
                return value
        if name in ("he", "him", "his", "himself"):
            return self.words["h"].word(name, self.rng)
        args = [local.get(a, self.words.get(a)) for a in args]
        kind = args[0].kind if args and isinstance(args[0], Being) else None
        for full in (f"{name}.{kind}", f"{name}.{self.words['season']}", name):
            if full in self.phrases:
                return self.tell(self.phrases[full], {str(i): a for i, a in enumerate(args, 1)})
        raise KeyError(f"<{name}>: no such phrase, character or word")


# ---------------------------------------------------------------- templates

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


def load(folder=FOLDER):
    """({name: phrase}, {name: (cast, text, weight)}) of every plot file."""
    phrases, plots = {}, {}
    for path in sorted(folder.glob("*.txt")):
        source = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.M)
        for entry in re.split(r"^(?=: |=== )", source, flags=re.M):
            head, _, body = entry.partition("\n")
            if head.startswith(": "):
                name, target = head[2:].strip(), phrases
                value = parse(body.strip())
            elif head.startswith("=== "):
                name, _, weight = map(str.strip, head[4:].partition("*"))
                target = plots
                cast, _, body = body.partition("---\n")
                steps = []
                for line in filter(None, map(str.strip, cast.split("\n"))):
                    left, given, right = re.match(r"(.+?)\s*(:?=)\s*(.+)", line).groups()
                    if given == "=":
                        steps.append((left, right))
                    else:
                        rows = [[parse(x) for x in pieces(row, ";")] for row in pieces(right, "|")]
                        names = [n.strip() for n in left.split(",")]
                        assert all(len(row) == len(names) for row in rows), f"{path.name}: {name}: {line}"
                        steps.append((names, rows))
                value = steps, parse(body.strip()), int(weight or 1)
            elif entry.strip():
                raise ValueError(f"{path.name}: {entry[:60]!r} belongs to no entry")
            else:
                continue
            if name in target:
                raise ValueError(f"{path.name}: {name} is there twice")
            target[name] = value
    return phrases, plots


# ---------------------------------------------------------------- stories

SAYS = (r"(?:(?:[A-Z]\w+|s?he|it|they|people|(?:the|his|her|an?)(?: old| little)? \w+)(?: both| all)? )?"
        r"(?:said|asked|cried|called|whispered|shouted|thought|answered|replied|sang|laughed|told|came|was the|growled|moaned|screamed|wanted|asks"
        r"|says|sings)\b")


def finish(text):
    """Spaces, capitals and articles put right."""
    paragraphs = []
    for p in re.split(r"\n\s*\n|//", text):
        p = re.sub(r"\s+", " ", p).strip()
        if not p:
            continue
        p = re.sub(r" ([,.!?;:])", r"\1", p)
        p = re.sub(r"\b([Aa]) (?=[aeiou](?!ne\b|nce\b|se|ni))", r"\1n ", p)
        p = re.sub(r'([.!?]),"', r'\1"', p)
        p = re.sub(r'([!?])[.!?](?=["\s]|$)', r'\1', re.sub(r'([.!?]")\.', r'\1', p))
        # Speech ends in a comma before "said Tom", and in a full stop before anything else.
        p = re.sub(rf'(\w)" (?={SAYS})', r'\1," ', p)
        p = re.sub(r'(\w)"(?:\.|$| (?="|(?:And|But|So|Then|He|She|They|The)\b))', lambda m: f'{m[1]}."' + " " * m[0].endswith(" "), p)
        p = re.sub(rf'([!?]" )(?!{SAYS})([a-z])', lambda m: m[1] + m[2].upper(), p)
        # After a full stop, after the mark that opens a speech, and at the start.
        p = re.sub(r'(^"?|[.!?] "?|[.!?]" "|[.]" |: ")([a-z])', lambda m: m[1] + m[2].upper(), p)
        paragraphs.append(p)
    return "\n\n".join(paragraphs)


class Composer:
    """Stories by number: the same number gives the same story."""

    def __init__(self, folder=FOLDER):
        self.phrases, self.plots = load(folder)
        self.names = [n for n in sorted(self.plots) for _ in range(self.plots[n][2])]

    def story(self, number, plot=None):
        rng = random.Random(number)
        name = plot or rng.choice(self.names)
        cast, text, _ = self.plots[name]
        story = Story(rng, self.phrases)
        for names, value in cast:
            if isinstance(names, list):
                for n, tree in zip(names, rng.choice(value)):
                    story.words[n] = story.tell(tree, {})
            else:
                story.words[names] = story.cast(value)
        return finish(story.tell(text, {}))


def wordings(tree):
    """How many texts a template has, phrases counted as one."""
    count = 1
    for node in tree:
        if isinstance(node, list):
            count *= sum(wordings(a) for a in node)
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    composer = Composer()
    if args.list:
        for name in sorted(composer.plots):
            print(f"{name:24} {wordings(composer.plots[name][1]):.1e} wordings")
        return
    for number in range(args.seed, args.seed + args.count):
        print(composer.story(number, args.plot), end="\n\n----\n\n")


if __name__ == "__main__":
    main()
