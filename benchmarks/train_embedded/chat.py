"""Seeded generator of chat turns in ChatML: definitions, countries, intents, stories, code, JSON.

Facts come from two tables that prepare.py writes (definitions.json and countries.json); fixed
questions and answers are in data/intents.json.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .plots import ALL_PLOTS
from .stories import make_scene, tell
from .wordlists import capitalized, chance, load_table, pick, pseudo_word, with_article

Turn = tuple[str, str]

NOUN_CLASSES = {
    "animal": "animals",
    "food": "foods",
    "plant": "plants",
    "artifact": "objects",
    "body": "parts of the body",
}
PRODUCT_COLORS = ("red", "blue", "green", "yellow", "black", "white")
JOBS = (
    "teacher",
    "doctor",
    "farmer",
    "baker",
    "student",
    "pilot",
    "singer",
    "writer",
    "nurse",
    "carpenter",
)
SYSTEM_TURN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


@dataclass(slots=True, kw_only=True)
class ChatGenerator:
    """Draws chat turns; every method ending in _turn returns a question and its answer."""

    rng: random.Random
    definitions: list[dict[str, Any]]
    countries: list[dict[str, str]]
    weights: dict[str, float] = field(default_factory=dict)

    def conversation(self) -> str:
        """Return one conversation of one to four turns."""
        text = SYSTEM_TURN if chance(self.rng, 0.15) else ""
        for _ in range(self.rng.choice([1, 1, 1, 2, 2, 3, 4])):
            question, answer = self.turn()
            text += f"<|im_start|>user\n{question}<|im_end|>\n"
            text += f"<|im_start|>assistant\n{answer}<|im_end|>\n"
        return text.strip()

    def turn(self) -> Turn:
        """Return one turn of a random kind, its question sometimes carelessly typed."""
        weights = self.weights or DEFAULT_WEIGHTS
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        question, answer = TURN_KINDS[kind](self)
        if chance(self.rng, 0.12):
            question = question[0].lower() + question[1:]
        if chance(self.rng, 0.08):
            question = question.rstrip(".?!")
        return question, answer

    def pick(self, *options: str) -> str:
        """Return one of the options."""
        return pick(self.rng, *options)

    def common_definition(self) -> dict[str, Any]:
        """Return a definition; the table is sorted by frequency and the front is favoured."""
        return self.definitions[int(len(self.definitions) * self.rng.random() ** 2)]

    def person_name(self) -> str:
        """Return a first name."""
        words = load_table("words")
        return pick(self.rng, *words["girls"], *words["boys"])


def definition_turn(chat: ChatGenerator) -> Turn:
    """What a common noun means."""
    entry = chat.common_definition()
    word, text = entry["word"], re.sub(r"^\(.*?\)\s*", "", entry["definition"])
    question = chat.pick(
        f"What is {with_article(word)}?",
        f"What is {with_article(word)}?",
        f'Define "{word}".',
        f'What does the word "{word}" mean?',
        f"Can you explain what {with_article(word)} is?",
        f"what is {word}",
    )
    if re.match(r"(a|an|the|any|some|one|someone|something|that|either)\b", text):
        answer = f"{capitalized(with_article(word))} is {text}."
    else:
        answer = chat.pick(f'The word "{word}" means: {text}.', f"{capitalized(word)}: {text}.")
    if entry["synonyms"] and chance(chat.rng, 0.5):
        return question, f"{answer} It is also called {with_article(entry['synonyms'][0])}."
    if entry["kind"] and chance(chat.rng, 0.5):
        return question, f"{answer} It is a kind of {entry['kind']}."
    return question, answer


def kind_turn(chat: ChatGenerator) -> Turn:
    """Which kind of thing a noun is."""
    entry = chat.common_definition()
    if not entry["kind"]:
        return definition_turn(chat)
    noun = with_article(entry["word"])
    if chance(chat.rng, 0.6):
        answer = f"{capitalized(noun)} is a kind of {entry['kind']}."
        return f"What kind of thing is {noun}?", answer
    return (
        f"Is {noun} a kind of {entry['kind']}?",
        f"Yes, {noun} is a kind of {entry['kind']}.",
    )


def country_turn(chat: ChatGenerator) -> Turn:
    """Capital, location, climate, languages or terrain of a country."""
    country = chat.rng.choice(chat.countries)
    name = country["name"]
    topics = (
        ["capital"] * 8 + ["location"] * 4 + ["climate"] * 3 + ["languages"] * 3 + ["terrain"] * 2
    )
    topic = chat.rng.choice(topics)
    fact = country.get(topic)
    if not fact:
        return country_turn(chat)
    if topic == "capital":
        question = chat.pick(
            f"What is the capital of {name}?",
            f"Tell me the capital of {name}.",
            f"Which city is the capital of {name}?",
        )
        return question, chat.pick(
            f"The capital of {name} is {fact}.", f"{fact} is the capital of {name}."
        )
    if topic == "location":
        place = f"in the following place: {fact}" if "island," in fact else f"located in {fact}"
        return chat.pick(f"Where is {name}?", f"Where is {name} located?"), f"{name} is {place}."
    if topic == "languages":
        question = chat.pick(
            f"What languages are spoken in {name}?",
            f"Which languages do people speak in {name}?",
        )
        return question, f"The languages of {name} include {fact}."
    if topic == "climate":
        return f"What is the climate like in {name}?", f"The climate of {name} is {fact}."
    return f"Describe the terrain of {name}.", f"The terrain of {name} is {fact}."


def arithmetic_turn(chat: ChatGenerator) -> Turn:
    """Small sums, differences and products, or counting."""
    topic = chat.rng.choices(["plus", "minus", "times", "count"], [35, 25, 25, 15])[0]
    largest = 10 if topic == "times" or chance(chat.rng, 0.7) else 20
    a, b = chat.rng.randint(0, largest), chat.rng.randint(0, largest)
    if topic == "count":
        numbers = range(a + 1, a + chat.rng.randint(5, 11))
        answer = ", ".join(str(number) for number in numbers)
        return f"Count from {numbers[0]} to {numbers[-1]}.", f"{answer}."
    if topic == "minus":
        a, b = max(a, b), min(a, b)
    sign = {"plus": "+", "minus": "-", "times": "*"}[topic]
    order = {"plus": f"Add {a} and {b}.", "minus": f"Subtract {b} from {a}."}
    question = chat.pick(
        f"What is {a} {topic} {b}?",
        f"What is {a} {sign} {b}?",
        order.get(topic, f"Multiply {a} by {b}."),
    )
    result = {"plus": a + b, "minus": a - b, "times": a * b}[topic]
    answer = chat.pick(
        f"{a} {sign} {b} = {result}.",
        f"The answer is {result}.",
        f"{a} {topic} {b} is {result}.",
    )
    return question, answer


def list_turn(chat: ChatGenerator) -> Turn:
    """A few examples of a class of things."""
    noun_class, plural = chat.rng.choice(list(NOUN_CLASSES.items()))
    pool = [entry["word"] for entry in chat.definitions if entry["class"] == noun_class][:160]
    items = chat.rng.sample(pool, min(len(pool), chat.rng.randint(3, 5)))
    count = load_table("words")["numbers"][len(items)]
    question = chat.pick(
        f"Name {count} {plural}.",
        f"List {count} {plural}.",
        f"Give me {count} examples of {plural}.",
    )
    numbered = "\n".join(f"{i}. {capitalized(item)}" for i, item in enumerate(items, 1))
    sentence = f"Here are {count} {plural}: {', '.join(items[:-1])} and {items[-1]}."
    return question, chat.pick(numbered, sentence)


def story_turn(chat: ChatGenerator) -> Turn:
    """A short story, often about a wanted character."""
    words = load_table("words")
    kind = chat.rng.choice([*words["characters"], "girl", "boy"])
    scene = make_scene(chat.rng, kind)
    friend = scene.friend
    friend_phrase = friend.name if friend.name[0].isupper() else with_article(friend.kind)
    question = chat.pick(
        f"Tell me a story about {with_article(kind)}.",
        f"Tell me a short story about {with_article(kind)}.",
        f"Write a story about {with_article(kind)} and {friend_phrase}.",
        f"Can you tell me a story with {with_article(kind)} in it?",
        f"Tell me a story about {scene.hero.intro}.",
        "Tell me a story.",
        "Write a short story.",
    )
    return question, tell(scene, ALL_PLOTS)


def opposite_turn(chat: ChatGenerator) -> Turn:
    """The opposite of a word."""
    first, second = chat.rng.sample(chat.rng.choice(load_table("words")["opposites"]), 2)
    question = chat.pick(f"What is the opposite of {first}?", f'Give me the opposite of "{first}".')
    return question, chat.pick(
        f"The opposite of {first} is {second}.", f'The opposite of "{first}" is "{second}".'
    )


def sequence_turn(chat: ChatGenerator) -> Turn:
    """The days of the week and the like."""
    name, items = chat.rng.choice(list(load_table("words")["sequences"].items()))
    question = chat.pick(f"What are the {name}?", f"List the {name}.", f"Name the {name}.")
    return question, f"The {name} are {items}."


def sentence_turn(chat: ChatGenerator) -> Turn:
    """A sentence with a given word."""
    word = chat.rng.choice(load_table("words")["plain_nouns"])
    sentence = chat.pick(
        f"The old {word} reminded {chat.person_name()} of home.",
        f"{chat.person_name()} looked at the {word} and smiled.",
        f"There was {with_article(word)} at the end of the road.",
        f"We talked about the {word} all evening.",
        f"Every {word} has a story to tell.",
        f"She drew a picture of {with_article(word)}.",
        f"I have never seen such a beautiful {word}.",
    )
    question = chat.pick(
        f'Write a sentence with the word "{word}".', f'Use the word "{word}" in a sentence.'
    )
    return question, sentence


def words_turn(chat: ChatGenerator) -> Turn:
    """Repeat, sort or count a few words."""
    pool = [entry["word"] for entry in chat.definitions[:300]]
    items = chat.rng.sample(pool, chat.rng.randint(2, 5))
    listed, topic = ", ".join(items), chat.rng.random()
    if topic < 0.4:
        return chat.pick(f"Repeat after me: {listed}", f"Repeat: {listed}"), listed
    if topic < 0.7:
        return f"Sort these words: {listed}", ", ".join(sorted(items))
    count = load_table("words")["numbers"][len(items)]
    return f"How many words are in this list: {listed}?", f"There are {count} words in the list."


def code_turn(chat: ChatGenerator) -> Turn:
    """A short Python function."""
    table = load_table("functions")
    function = chat.rng.choice(table["functions"])
    names = [chat.rng.choice(table["argument_names"][name]) for name in function["arguments"]]
    does = function["does"]
    code = f"def {function['name']}({', '.join(names)}):\n{function['body'].format(*names)}"
    question = chat.pick(
        f"Write a Python function that {does}.",
        f"Write a function that {does}.",
        f"Show me a Python function that {does}.",
        f"Python code that {does}, please.",
    )
    answer = f"```python\n{code}\n```"
    if chance(chat.rng, 0.5):
        lead = chat.pick(
            f"Here is a function that {does}:", "Sure! Here it is:", f"This function {does}:"
        )
        answer = f"{lead}\n\n{answer}"
    return question, answer


def json_turn(chat: ChatGenerator) -> Turn:
    """A JSON object for a person or a product."""
    indent = chat.rng.choice([None, 2])
    if chance(chat.rng, 0.5):
        name, age = chat.person_name(), chat.rng.randint(5, 80)
        job, city = chat.rng.choice(JOBS), chat.rng.choice(chat.countries)["capital"]
        question = chat.pick(
            f"Give me a JSON object for {with_article(job)} named {name}, age {age}, who lives in"
            f" {city}.",
            f"Write JSON for a person: name {name}, age {age}, job {job}, city {city}.",
        )
        person = {"name": name, "age": age, "job": job, "city": city}
        return question, json.dumps(person, indent=indent)
    color, price = chat.rng.choice(PRODUCT_COLORS), chat.rng.randint(1, 99)
    product = chat.rng.choice(load_table("words")["objects"]).split()[-1]
    question = chat.pick(
        f"Write JSON for a product: {color} {product}, price {price}.",
        f"Give me JSON for a {color} {product} that costs {price} dollars.",
    )
    item = {"product": product, "color": color, "price": price}
    return question, json.dumps(item, indent=indent)


def intent_turn(group: str) -> Callable[[ChatGenerator], Turn]:
    """Return a function that draws a fixed question of the group and its answer."""

    def turn(chat: ChatGenerator) -> Turn:
        intent = chat.rng.choice(load_table("intents")[group])
        return chat.rng.choice(intent["questions"]), chat.rng.choice(intent["answers"])

    return turn


def unknown_turn(chat: ChatGenerator) -> Turn:
    """A question that a small model cannot answer, and a polite refusal."""
    table, words = load_table("unknown"), load_table("words")
    question = chat.rng.choice(table["questions"])
    fillers: dict[str, Callable[[], Any]] = {
        "name": chat.person_name,
        "surname": lambda: chat.rng.choice(table["surnames"]),
        "day": lambda: chat.rng.choice(table["days"]),
        "object": lambda: chat.rng.choice(words["objects"]),
        "noun": lambda: chat.common_definition()["word"],
        "country": lambda: chat.rng.choice(chat.countries)["name"],
        "city": lambda: chat.rng.choice(chat.countries)["capital"],
        "year": lambda: chat.rng.randint(1500, 2050),
        "big": lambda: chat.rng.randint(100, 9999),
        "small": lambda: chat.rng.randint(2, 99),
        "pseudo": lambda: pseudo_word(chat.rng),
        "Pseudo": lambda: capitalized(pseudo_word(chat.rng)),
    }
    question = re.sub(r"\{(\w+)\}", lambda match: str(fillers[match.group(1)]()), question)
    return question, chat.rng.choice(table["answers"])


TURN_KINDS: dict[str, Callable[[ChatGenerator], Turn]] = {
    "definition": definition_turn,
    "country": country_turn,
    "arithmetic": arithmetic_turn,
    "list": list_turn,
    "kind": kind_turn,
    "story": story_turn,
    "opposite": opposite_turn,
    "sequence": sequence_turn,
    "facts": intent_turn("facts"),
    "about": intent_turn("about"),
    "small_talk": intent_turn("small_talk"),
    "unknown": unknown_turn,
    "code": code_turn,
    "json": json_turn,
    "sentence": sentence_turn,
    "words": words_turn,
}

# Stories are long: 3 % of the turns are a tenth of the text.
DEFAULT_WEIGHTS: dict[str, float] = {
    "definition": 14,
    "country": 13,
    "arithmetic": 7,
    "list": 5,
    "kind": 4,
    "story": 4,
    "opposite": 4,
    "sequence": 3,
    "facts": 20,
    "about": 28,
    "small_talk": 12,
    "unknown": 10,
    "code": 8,
    "json": 5,
    "sentence": 4,
    "words": 4,
}
