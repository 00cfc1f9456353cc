"""The words of the invented world: names, attributes, and how they are stated and asked."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["person", "town", "organisation"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


FIRST_NAMES = _words(
    "Ada Orla Ivo Tamsin Bruno Celia Doran Edda Fenn Greta Hugo Ines Jonas Kira Leif Mira Nils Olga Pavel Quinn "
    "Rosa Sven Thea Ulric Vera Wim Xenia Yara Zeno Alma Boris Clara Dario Elsa Felix Gilda Hans Ilse Jarl Katya "
    "Lars Magda Nora Otto Petra Ravi Selma Tomas Ursula Viktor Wanda Yusuf Zora Anton Berta Cyril Delia Emil Freya "
    "Goran Hilda Igor Judit Klaus"
)
SURNAME_HEADS = _words(
    "Brack Hal Tor Wint Ost Mar Feld Grim Lang Storm Kest Vann Holm Ash Birk Crow Dun Ever Frost Gold Hazel Iron "
    "Jas Kil Lock Moss North Oak Pell Quill Reed Stein Thorn Under Vale West Yar Zell Clay Drum"
)
SURNAME_TAILS = _words(
    "wen son berg man lund ley by shaw rick mund stad croft bourne well hurst more dale kin hart gren sley vik "
    "strand low fell nor tide ware beck lin"
)
TOWN_HEADS = _words(
    "Brel Tess Kor Nim Ald Bel Cass Dorn Esk Far Gal Harn Ister Jor Kal Lum Mel Nor Orm Pell Quor Ras Sel Tarn Ulm "
    "Var Wex Yel Zan Crim Drav Fos Glen Hest Ilm Kress Lor Mird Nav Osk"
)
TOWN_TAILS = _words(
    "moor vale ford haven port wick stead mouth field gate bridge minster holt ness combe dene mere thorpe burg "
    "cliff pool cross dal hythe"
)
ORGANISATION_HEADS = _words(
    "Aster Bolt Cobalt Delta Ember Falcon Granite Harbor Indigo Juniper Keystone Lantern Meridian Nimbus Orchard "
    "Pinnacle Quartz Raven Summit Timber Umber Vector Willow Zenith Anchor Beacon Cedar Drift Echo Flint"
)
ORGANISATION_TAILS = _words(
    "line mark wright smith forge craft path works light stone crest spring field wave bond root gate star ridge wing "
    "peak song loom yard"
)
ORGANISATION_KINDS = _words("Guild Institute Company Society Foundry Academy League Trust")

COMPOUNDS = (
    (SURNAME_HEADS, SURNAME_TAILS),
    (TOWN_HEADS, TOWN_TAILS),
    (ORGANISATION_HEADS, ORGANISATION_TAILS),
)

PROFESSIONS = _phrases(
    "a baker, a surgeon, a botanist, a cartographer, a judge, a carpenter, a glassblower, a violin maker, a geologist, "
    "a poet, a sculptor, a beekeeper, a locksmith, a pilot, a tailor, a historian, a chemist, a printer, a gardener, "
    "a diver, a weaver, a watchmaker, a teacher, a painter, a miner, a potter, a dentist, a lawyer, a sailor, a farmer, "
    "a librarian, a butcher, a blacksmith, a translator, a photographer, an architect, an actor, an engineer, "
    "an astronomer, an editor"
)
INSTRUMENTS = _phrases(
    "the flute, the harp, the cello, the trumpet, the banjo, the oboe, the organ, the lute, the drums, the piano, "
    "the guitar, the violin, the clarinet, the horn, the tuba, the mandolin, the accordion, the bassoon, the zither, "
    "the fiddle, the bagpipes, the viola, the trombone, the harmonica, the xylophone, the sitar, the ukulele, "
    "the dulcimer, the recorder, the bells"
)
INVENTIONS = _phrases(
    "the tidal clock, the folding kite, the paper lamp, the silent bell, the steam loom, the glass compass, "
    "the salt battery, the wind harp, the copper map, the rolling bridge, the rain gauge, the ice saw, the pocket stove, "
    "the double anchor, the spring ladder, the moon dial, the cork boat, the star chart, the iron flute, "
    "the hanging garden, the water mirror, the velvet drum, the sand filter, the feather scale, the night lens, "
    "the honey press, the coal engine, the thread counter, the spiral stair, the floating mill"
)
PETS = _phrases(
    "a goat, a parrot, a ferret, a tortoise, a greyhound, a raven, a donkey, a hedgehog, a crow, a spaniel, a pony, "
    "a magpie, a rabbit, a terrier, a llama, a toad, a gecko, a canary, a squirrel, a poodle, a mule, a peacock, "
    "a lizard, a beagle, a goose, an otter, an owl, an eel, a duck, a mouse"
)
DISHES = _phrases(
    "onion soup, plum cake, smoked trout, barley bread, lentil stew, apple pie, fried squid, mushroom pie, "
    "pickled herring, ginger biscuits, roast duck, potato salad, pepper jam, rice pudding, bean curry, lemon tart, "
    "garlic noodles, pumpkin ravioli, cheese dumplings, walnut bread, fig jam, cabbage rolls, corn porridge, "
    "cherry cake, crab soup, turnip mash, honey ham, almond tart, leek pancakes, beet salad"
)
PRODUCTS = _phrases(
    "salt, linen, cheese, tin, honey, rope, paper, wool, amber, cider, pottery, timber, copper, silk, tea, wax, glue, "
    "leather, bricks, candles, marble, pearls, sugar, vinegar, ink, coal, tiles, cotton, soap, olives, barley, glass, "
    "nails, slate, herring, mustard, saffron, carpets, cork, lace"
)
LANDMARK_ADJECTIVES = _words(
    "copper leaning sunken white twin crooked golden broken red hollow marble blue silver mossy old iron painted"
)
LANDMARK_NOUNS = _words(
    "bridge tower lighthouse fountain windmill abbey arch clock castle market temple theatre observatory well gate "
    "library statue stair"
)
FESTIVALS = _phrases(
    "lanterns, kites, apples, drums, masks, boats, snow, bread, horses, candles, bells, ribbons, stars, fish, mirrors, "
    "songs, barrels, flowers, puppets, honey, giants, smoke, fools, swans, pumpkins, feathers, torches, wheels, ropes, "
    "shadows"
)
FIELDS = _phrases(
    "ship engines, weather maps, rare orchids, ancient coins, deep caves, wool dyes, clockwork toys, river locks, "
    "bee diseases, stage lighting, bird songs, paper money, bridge cables, sea salt, road signs, glass eyes, "
    "fire pumps, fishing nets, comets, earthquakes, tulip bulbs, sailing boats, printing presses, desert plants, "
    "snow ploughs, railway clocks, volcanoes, mountain rescue, violin strings, telescopes, glaciers, folk tales, "
    "garden tools, forest fires, water wheels, medical herbs, hot air balloons, bicycles, radio towers, fossils"
)
COLOURS = _words("green red white black golden silver blue purple orange grey yellow pink brown crimson")
EMBLEM_ANIMALS = _words(
    "heron wolf lion bear stag fox eagle salmon bull swan badger hare dragon horse boar dolphin tiger spider snake "
    "beetle bat crab whale lynx"
)


@dataclass(frozen=True)
class Attribute:
    """One kind of fact: how it is drawn, stated (`{e}` the entity, `{v}` the value) and asked."""

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    pair_question: str
    draw: Callable[[random.Random], str] = lambda rng: ""
    links_to: Kind | None = None
    bridge: str = ""  # how the value is named through the entity, in questions that need two passages


def _from(values: tuple[str, ...]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(values)


def _year(rng: random.Random) -> str:
    return str(rng.randint(1800, 1999))


def _emblem(rng: random.Random) -> str:
    colour = rng.choice(COLOURS)
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {rng.choice(EMBLEM_ANIMALS)}"


ATTRIBUTES: dict[Kind, tuple[Attribute, ...]] = {
    "person": (
        Attribute(
            "birthplace",
            ("{e} was born in the town of {v}.", "{e} grew up in {v}.", "the birthplace of {e} is {v}."),
            ("Where was {e} born?", "What is the birthplace of {e}?", "In which town was {e} born?"),
            "Where were {a} and {b} born?",
            links_to="town",
            bridge="the town where {e} was born",
        ),
        Attribute(
            "birth year",
            ("{e} was born in the year {v}.", "{e} came into the world in {v}.", "the year of birth of {e} is {v}."),
            ("When was {e} born?", "In which year was {e} born?", "What is the year of birth of {e}?"),
            "When were {a} and {b} born?",
            _year,
        ),
        Attribute(
            "profession",
            (
                "{e} earns a living as {v}.",
                "by profession {e} is {v}.",
                "{e} was trained as {v} and still works as one.",
            ),
            ("What is the profession of {e}?", "What does {e} do for a living?", "What is {e} by profession?"),
            "What are the professions of {a} and {b}?",
            _from(PROFESSIONS),
        ),
        Attribute(
            "employer",
            (
                "{e} is employed by the {v}.",
                "{e} has worked for the {v} for many years.",
                "{e} joined the {v} long ago.",
            ),
            ("Who employs {e}?", "Which organisation does {e} work for?", "Where does {e} work?"),
            "Who employs {a} and {b}?",
            links_to="organisation",
            bridge="the organisation that employs {e}",
        ),
        Attribute(
            "instrument",
            ("{e} plays {v} in the evenings.", "in a small band {e} plays {v}.", "{e} learned to play {v} as a child."),
            ("Which instrument does {e} play?", "What does {e} play?", "What instrument did {e} learn?"),
            "Which instruments do {a} and {b} play?",
            _from(INSTRUMENTS),
        ),
        Attribute(
            "invention",
            (
                "{e} became famous for inventing {v}.",
                "{e} is the inventor of {v}.",
                "people know {e} as the maker of {v}.",
            ),
            ("What did {e} invent?", "What is {e} famous for inventing?", "Which invention is by {e}?"),
            "What did {a} and {b} invent?",
            _from(INVENTIONS),
        ),
        Attribute(
            "pet",
            ("{e} keeps {v} as a pet.", "at home {e} looks after {v}.", "{e} shares the house with {v}."),
            ("Which pet does {e} keep?", "What animal does {e} have?", "What pet lives with {e}?"),
            "Which pets do {a} and {b} keep?",
            _from(PETS),
        ),
        Attribute(
            "dish",
            ("{e} likes to eat {v} best of all.", "the favourite dish of {e} is {v}.", "on Sundays {e} cooks {v}."),
            ("What does {e} like to eat?", "What is the favourite dish of {e}?", "Which dish does {e} like best?"),
            "What are the favourite dishes of {a} and {b}?",
            _from(DISHES),
        ),
    ),
    "town": (
        Attribute(
            "mayor",
            ("the mayor of {e} is {v}.", "{e} elected {v} as its mayor.", "{e} is governed by the mayor, {v}."),
            ("Who is the mayor of {e}?", "Who governs {e}?", "What is the name of the mayor of {e}?"),
            "Who are the mayors of {a} and {b}?",
            links_to="person",
            bridge="the mayor of {e}",
        ),
        Attribute(
            "founded",
            ("{e} was founded in the year {v}.", "settlers built {e} in {v}.", "the history of {e} begins in {v}."),
            ("When was {e} founded?", "In which year was {e} built?", "In what year does the history of {e} begin?"),
            "When were {a} and {b} founded?",
            _year,
        ),
        Attribute(
            "product",
            (
                "{e} is known for its {v}.",
                "most families in {e} live from making {v}.",
                "traders come to {e} to buy {v}.",
            ),
            ("What is {e} known for?", "What does {e} produce?", "What do traders buy in {e}?"),
            "What do {a} and {b} produce?",
            _from(PRODUCTS),
        ),
        Attribute(
            "landmark",
            (
                "the main sight of {e} is the {v}.",
                "visitors to {e} admire the {v}.",
                "in the centre of {e} stands the {v}.",
            ),
            ("What do visitors admire in {e}?", "What is the main sight of {e}?", "What stands in the centre of {e}?"),
            "What are the main sights of {a} and {b}?",
            lambda rng: f"{rng.choice(LANDMARK_ADJECTIVES)} {rng.choice(LANDMARK_NOUNS)}",
        ),
        Attribute(
            "population",
            ("{e} is home to about {v} people.", "{e} has a population of {v}.", "{e} counts {v} inhabitants."),
            ("How many people live in {e}?", "What is the population of {e}?", "How many inhabitants has {e}?"),
            "How many people live in {a} and {b}?",
            lambda rng: str(rng.randint(11, 99) * 100),
        ),
        Attribute(
            "river",
            (
                "{e} lies on the river {v}.",
                "through {e} flows the river {v}.",
                "{e} was built on the banks of the {v}.",
            ),
            ("Which river flows through {e}?", "On which river does {e} lie?", "What is the river of {e}?"),
            "On which rivers do {a} and {b} lie?",
            lambda rng: rng.choice(SURNAME_HEADS) + rng.choice(("a", "en", "ow", "is", "ine", "ell")),
        ),
        Attribute(
            "festival",
            (
                "every summer {e} holds a festival of {v}.",
                "{e} is proud of its festival of {v}.",
                "each year {e} is filled by a festival of {v}.",
            ),
            ("What is the festival of {e} about?", "What does {e} celebrate?", "Which festival does {e} hold?"),
            "What do {a} and {b} celebrate?",
            _from(FESTIVALS),
        ),
    ),
    "organisation": (
        Attribute(
            "founder",
            ("the {e} was started by {v}.", "the founder of the {e} is {v}.", "the {e} owes its founding to {v}."),
            ("Who founded the {e}?", "Who is the founder of the {e}?", "Who started the {e}?"),
            "Who founded the {a} and the {b}?",
            links_to="person",
            bridge="the founder of the {e}",
        ),
        Attribute(
            "founding year",
            ("the {e} opened in the year {v}.", "the {e} dates from {v}.", "the {e} opened its doors in {v}."),
            ("When did the {e} open?", "In which year did the {e} open?", "From which year does the {e} date?"),
            "When did the {a} and the {b} open?",
            _year,
        ),
        Attribute(
            "headquarters",
            (
                "the {e} has its headquarters in {v}.",
                "the {e} is based in {v}.",
                "the main office of the {e} is in {v}.",
            ),
            ("Where is the {e} based?", "Where are the headquarters of the {e}?", "In which town is the {e} based?"),
            "Where are the {a} and the {b} based?",
            links_to="town",
            bridge="the town where the {e} is based",
        ),
        Attribute(
            "field",
            ("the {e} works on {v}.", "the business of the {e} is {v}.", "the {e} spends its money on {v}."),
            ("What does the {e} work on?", "What is the business of the {e}?", "What does the {e} spend its money on?"),
            "What do the {a} and the {b} work on?",
            _from(FIELDS),
        ),
        Attribute(
            "emblem",
            ("the emblem of the {e} is {v}.", "the flag of the {e} shows {v}.", "the {e} uses {v} as its emblem."),
            ("What is the emblem of the {e}?", "What does the flag of the {e} show?", "Which emblem does the {e} use?"),
            "What are the emblems of the {a} and the {b}?",
            _emblem,
        ),
        Attribute(
            "staff",
            ("the {e} employs {v} people.", "the {e} gives work to {v} people.", "the {e} has a staff of {v}."),
            (
                "How many people work at the {e}?",
                "How many people does the {e} employ?",
                "How large is the staff of the {e}?",
            ),
            "How many people work at the {a} and the {b}?",
            lambda rng: str(rng.randint(4, 98) * 10),
        ),
    ),
}

# No opening starts with a name: after a line break its first token would differ from elsewhere.
OPENINGS: dict[Kind, tuple[str, ...]] = {
    "person": (
        "This page is about {name}.",
        "Many people have heard of {name}.",
        "Few people have led such a life as {name}.",
        "Here are some facts about {name}.",
    ),
    "town": (
        "The town of {name} lies in the hills.",
        "This page is about the town of {name}.",
        "Travellers often pass through {name}.",
        "Here are some facts about {name}.",
    ),
    "organisation": (
        "The {name} is known in the whole country.",
        "This page is about the {name}.",
        "Much has been written about the {name}.",
        "Here are some facts about the {name}.",
    ),
}
REFERENCES: dict[Kind, tuple[str, ...]] = {
    "person": ("this person", "the same person"),
    "town": ("the town", "this town"),
    "organisation": ("organisation", "same organisation"),
}

_BY_NAME = {(kind, a.name): a for kind, attributes in ATTRIBUTES.items() for a in attributes}


def attribute(kind: Kind, name: str) -> Attribute:
    """The attribute called `name` of entities of `kind`."""
    return _BY_NAME[kind, name]
