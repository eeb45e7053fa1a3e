"""Seeded generator of short children's stories: two characters, a place, a thing, a plot."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from .wordlists import capitalized, chance, load_table, pick, with_article, without_article


@dataclass(frozen=True, slots=True, kw_only=True)
class Character:
    """Somebody in a story. `name` may be "Anna" or "the fox"; `intro` is used once."""

    kind: str
    name: str
    intro: str
    subject: str  # he, she
    objective: str  # him, her
    possessive: str  # his, her

    @property
    def start(self) -> str:
        """The name as the first word of a sentence."""
        return capitalized(self.name)

    @property
    def he(self) -> str:
        """The pronoun as the first word of a sentence."""
        return capitalized(self.subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a plot is told about."""

    rng: random.Random
    hero: Character
    friend: Character
    at: str  # "in a deep forest"
    place: str  # "the forest"
    thing: str  # "a red ball"

    @property
    def thing_name(self) -> str:
        """The thing without its article."""
        return without_article(self.thing)

    def pick(self, *options: str) -> str:
        """Return one of the options."""
        return pick(self.rng, *options)

    def moral(self, *topics: str) -> str:
        """Return a closing sentence on one of the topics, about the hero."""
        options = [text for topic in topics for text in load_table("words")["morals"][topic]]
        moral: str = self.rng.choice(options)
        return moral.format(a=self.hero.name, A=self.hero.start)


def make_character(rng: random.Random, kind: str | None = None) -> Character:
    """Return a character of the wanted kind ("girl", "boy" or an animal), or of any."""
    words = load_table("words")
    kind = kind or pick(rng, "girl", "boy", "animal", "animal")
    is_child = kind in ("girl", "boy")
    if kind == "animal":
        kind = rng.choice(list(words["characters"]))
    trait = rng.choice(words["traits"])
    if is_child:
        subject = "she" if kind == "girl" else "he"
        adjective, is_named = pick(rng, "little", "young", trait), True
    else:
        entry = words["characters"][kind]
        subject, is_named = entry["pronoun"], chance(rng, 0.35)
        last = "little" if is_named else pick(rng, "little", "young")
        adjective = pick(rng, entry["adjective"], trait, last)
    intro, name = with_article(f"{adjective} {kind}"), f"the {kind}"
    if is_named:
        name = rng.choice(words["girls" if subject == "she" else "boys"])
        intro += f" named {name}"
    objective, possessive = ("her", "her") if subject == "she" else ("him", "his")
    return Character(
        kind=kind,
        name=name,
        intro=intro,
        subject=subject,
        objective=objective,
        possessive=possessive,
    )


def make_other(rng: random.Random, hero: Character) -> Character:
    """Return a second character who cannot be mistaken for the first."""
    while True:
        other = make_character(rng)
        is_child = other.kind in ("girl", "boy")
        if other.name != hero.name and (other.kind != hero.kind or is_child):
            return other


def say(scene: Scene, who: str, text: str, verb: str | None = None) -> str:
    """Return direct speech."""
    verb = verb or scene.pick("said", "said", "said", "answered", "replied")
    if who[0].isupper() and chance(scene.rng, 0.2):
        return f'{capitalized(who)} {verb}, "{text}"'
    quoted = text[:-1] + "," if text.endswith(".") else text
    return f'"{quoted}" {verb} {who}.'


def opening(scene: Scene) -> str:
    """Return the first sentences, which introduce the hero and the place."""
    hero, at = scene.hero, scene.at
    return scene.pick(
        f"Once upon a time there was {hero.intro}. {hero.he} lived {at}.",
        f"Once upon a time, {at}, there lived {hero.intro}.",
        f"There once was {hero.intro} who lived {at}.",
        f"{capitalized(at)} there lived {hero.intro}.",
        f"Long ago, {hero.intro} lived {at}.",
    )


def some_day(scene: Scene) -> str:
    """Return a phrase that starts the action."""
    return scene.pick(
        "One day",
        "One morning",
        "One afternoon",
        "One evening",
        "Early one morning",
        "On a Sunday",
        "The next day",
    )


def make_scene(rng: random.Random, kind: str | None = None) -> Scene:
    """Return a scene whose hero is of the wanted kind."""
    words = load_table("words")
    hero = make_character(rng, kind)
    friend = make_other(rng, hero)
    place = rng.choice(words["places"])
    return Scene(
        rng=rng,
        hero=hero,
        friend=friend,
        at=place["at"],
        place=place["name"],
        thing=rng.choice(words["objects"]),
    )


def tell(scene: Scene, plots: list[Callable[[Scene], list[str]]]) -> str:
    """Return the story of a scene, told with one of the plots."""
    paragraphs = scene.rng.choice(plots)(scene)
    if chance(scene.rng, 0.3):
        paragraphs.append("The end.")
    return re.sub(r"\b(the|The) \1\b", r"\1", "\n\n".join(paragraphs))
