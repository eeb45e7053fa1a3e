"""The eight plots of the synthetic stories; each returns the paragraphs of one story."""

from collections.abc import Callable

from .stories import Scene, opening, say, some_day
from .wordlists import capitalized, load_table, without_article


def lost_and_found(scene: Scene) -> list[str]:
    """A thing is lost, a friend helps to look for it."""
    hero, friend, name, pick = scene.hero, scene.friend, scene.thing_name, scene.pick
    first, second, found = scene.rng.sample(load_table("words")["hiding_places"], 3)
    start = pick(
        f"{hero.start} had {scene.thing} and loved it very much.",
        f"{hero.start}'s favorite thing in the world was {scene.thing}.",
        f"{hero.he} had {scene.thing}, and {hero.subject} took it everywhere.",
    )
    sad = pick(
        f"{hero.start} was very sad.",
        f"{hero.start} began to cry.",
        f"{hero.start} did not know what to do.",
    )
    offer = pick(
        "Do not worry. I will help you look for it.",
        "Let us look for it together.",
        "I have sharp eyes. I will help you.",
    )
    joy = pick(
        f"{hero.start} jumped for joy.",
        f"{hero.start} smiled and hugged {friend.name}.",
        f"{hero.start} was so happy that {hero.subject} laughed out loud.",
    )
    thanks = pick(
        "Thank you, my friend.",
        "Thank you! You are so kind.",
        "I could not have done it without you.",
    )
    when = pick("At last", "After a long time", "Just before dark")
    end = f"From that day on, {hero.name} and {friend.name} were best friends."
    return [
        f"{opening(scene)} {start}",
        f"{some_day(scene)}, the {name} was gone. {sad} {hero.he} looked {first}, but it was not"
        f" there. {hero.he} looked {second}, but it was not there either.",
        f"Then {hero.name} met {friend.intro}."
        f" {say(scene, friend.name, 'Why are you so sad?', 'asked')}"
        f" {say(scene, hero.name, f'I have lost my {name}.')} {say(scene, friend.name, offer)}",
        f"They went to {scene.place} and looked everywhere. {when}, {friend.name} saw something"
        f" {found}. It was the {name}! {joy} {say(scene, hero.name, thanks)}",
        pick(end, scene.moral("help")),
    ]


def sharing(scene: Scene) -> list[str]:
    """The hero keeps food for himself, and feels lonely."""
    hero, friend, pick = scene.hero, scene.friend, scene.pick
    food = pick(
        "a big cake",
        "a basket of apples",
        "a pot of soup",
        "a loaf of warm bread",
        "a bag of nuts",
        "a jar of honey",
        "a plate of cookies",
    )
    what = without_article(food)
    what = what.split(" of ")[-1] if " of " in what else what.split()[-1]
    greed = pick("This is all mine!", "I will eat it all by myself.", "Nobody else will get any.")
    hungry = pick(f"{friend.he} looked hungry and tired.", f"{friend.he} had not eaten all day.")
    ask = pick("Please, may I have a little?", "I am so hungry. Can you share with me?")
    refusal = pick("said no.", f"shook {hero.possessive} head.", "turned away.")
    regret = pick(
        "the food did not taste so good anymore.",
        f"{hero.subject} felt lonely.",
        f"{hero.subject} could not stop thinking about {friend.name}.",
    )
    return [
        f"{opening(scene)} {scene.rng.choice(load_table('words')['weather'])}",
        f"{some_day(scene)}, {hero.name} found {food}. {say(scene, hero.name, greed)}"
        f" {hero.he} sat down to eat.",
        f"Soon {friend.intro} came by. {hungry} {say(scene, friend.name, ask, 'asked')} But"
        f" {hero.name} {refusal} {friend.start} walked away slowly.",
        f"{hero.start} ate and ate, but {regret} So {hero.subject} ran after {friend.name}."
        f" {say(scene, hero.name, 'I am sorry. Come and eat with me.')}"
        f" They sat together and shared the {what}.",
        scene.moral("share"),
    ]


def being_brave(scene: Scene) -> list[str]:
    """The hero is afraid, and helps all the same."""
    hero, friend, pick = scene.hero, scene.friend, scene.pick
    fear = pick("the dark", "the deep water", "the big dog next door", "thunder", "high places")
    cry = pick("Help! Please help me!", "Is anyone there? I need help!")
    body = pick(
        f"{capitalized(hero.possessive)} knees were shaking.",
        f"{capitalized(hero.possessive)} heart was beating fast.",
    )
    resolve = pick("I must be brave.", "I have to try.")
    rescue = pick(
        f"pulled {friend.name} out.",
        f"reached out {hero.possessive} hand.",
        f"found a long stick to help {friend.name}.",
    )
    praise = pick("You are very brave.", "You saved me! Thank you.")
    hidden = scene.rng.choice(load_table("words")["hiding_places"])
    return [
        f"{opening(scene)} {hero.start} was afraid of {fear}.",
        f"{some_day(scene)}, {hero.name} heard a small voice."
        f" {say(scene, 'the voice', cry, 'cried')} It was {friend.intro}, stuck {hidden}.",
        f"{hero.start} was afraid. {body} {say(scene, hero.name, resolve, 'thought')}"
        f" {hero.he} took a deep breath, went closer, and {rescue}",
        f"Soon {friend.name} was safe. {say(scene, friend.name, praise)}"
        f" {hero.start} {pick('smiled.', 'felt warm inside.', 'laughed.')}"
        f" {say(scene, hero.name, 'I was afraid, but I did it anyway.')}",
        scene.moral("brave"),
    ]


def telling_the_truth(scene: Scene) -> list[str]:
    """The hero breaks a thing, lies, and then tells the truth."""
    hero, friend, name, pick = scene.hero, scene.friend, scene.thing_name, scene.pick
    denial = pick("No, I have not seen it.", "I do not know where it is.")
    guilt = pick(
        f"{hero.he} could not eat {hero.possessive} dinner.",
        f"{hero.he} could not sleep that night.",
    )
    pardon = pick(
        "Thank you for telling me the truth.", "I am glad you told me. We can fix it together."
    )
    repair = pick(
        "They worked all day, and soon it was as good as new.",
        "They mended it with glue and string.",
    )
    words = load_table("words")
    return [
        f"{opening(scene)} {scene.rng.choice(words['weather'])}",
        f"{some_day(scene)}, {hero.name} was playing near {scene.place} and broke {scene.thing}. It"
        f" belonged to {friend.intro}. {hero.start} hid the pieces"
        f" {scene.rng.choice(words['hiding_places'])}.",
        f"Later, {friend.name} came looking."
        f" {say(scene, friend.name, f'Have you seen my {name}?', 'asked')}"
        f" {say(scene, hero.name, denial)} But {hero.subject} felt bad. {guilt}",
        f"In the morning {hero.name} went to {friend.name}."
        f" {say(scene, hero.name, f'I broke your {name}. I am very sorry.')} {friend.start} was"
        f" quiet for a moment. {say(scene, friend.name, pardon)} {repair}",
        scene.moral("honest"),
    ]


def growing_a_plant(scene: Scene) -> list[str]:
    """A seed needs time."""
    hero, friend, pick = scene.hero, scene.friend, scene.pick
    plant = pick(
        "a pumpkin", "a sunflower", "an apple tree", "a tomato plant", "some beans", "a rose"
    )
    mood = pick("angry", "sad", "ready to give up")
    advice = pick(
        "You must be patient. Seeds need sun, water, and time.",
        "Give it water every day and wait. It will grow.",
    )
    when = pick("A week later", "One morning", "After many days")
    return [
        f"{opening(scene)} {hero.start} wanted to grow {plant}.",
        f"{some_day(scene)}, {hero.subject} put a seed in the ground and gave it water."
        f" {say(scene, hero.name, 'Grow, little seed!')} {hero.he} waited one hour, but nothing"
        f" happened. {hero.he} waited one day, but nothing happened.",
        f"{hero.start} was {mood}. Then {friend.intro} came to visit."
        f" {say(scene, friend.name, advice)}",
        f"So {hero.name} gave the seed water every day. {when}, there was a tiny green leaf. It"
        f" grew and grew. At the end of the summer {hero.subject} had the best"
        f" {without_article(plant)} near {scene.place}. {hero.start} showed it to {friend.name},"
        " and they were both very happy.",
        scene.moral("patient"),
    ]


def good_advice(scene: Scene) -> list[str]:
    """The hero does not listen, and needs help."""
    hero, friend, pick = scene.hero, scene.friend, scene.pick
    danger, plan = scene.rng.choice(
        [
            ("the ice is thin", "walk on the ice"),
            ("the river is fast", "swim across the river"),
            ("a storm is coming", "sail out to sea"),
            ("the bees are angry", "touch the hive"),
            ("the bridge is old", "run over the bridge"),
        ]
    )
    warning = f"Be careful! {capitalized(danger)}."
    trouble = pick(
        "Suddenly there was a loud crack.", "Then something went wrong.", "It was a bad idea."
    )
    thanks = pick(
        "I am sorry. I should have listened to you.", "You were right. Thank you for saving me."
    )
    relief = pick("I am just glad you are safe.", "Let us go home and have some hot tea.")
    return [
        f"{opening(scene)} {hero.he} loved to play outside.",
        f"{some_day(scene)}, {hero.name} wanted to {plan}. {capitalized(friend.intro)} saw this."
        f" {say(scene, friend.name, warning, pick('said', 'warned'))} But {hero.name} did not"
        " listen.",
        f"{hero.start} went on alone. {trouble} {hero.start} was in trouble."
        f" {say(scene, hero.name, 'Help! Help!', 'cried')} {friend.start} came running with a long"
        f" rope and pulled {hero.objective} to safety.",
        f"{hero.start} was cold and wet, but safe. {say(scene, hero.name, thanks)}"
        f" {say(scene, friend.name, relief)}",
        scene.moral("listen"),
    ]


def a_wish(scene: Scene) -> list[str]:
    """Kindness is rewarded."""
    hero, friend, pick = scene.hero, scene.friend, scene.pick
    plea = pick(
        "I am cold and tired. Can you help me?", "I cannot find my way home. Will you help me?"
    )
    kindness = pick(
        f"gave {friend.objective} some warm soup.",
        f"walked with {friend.objective} all the way home.",
        f"gave {friend.objective} a place to rest by the fire.",
    )
    wish = pick(f"I wish for {scene.thing}.", f"I would like {scene.thing}, please.")
    ending = pick(
        f"{hero.start} kept the {scene.thing_name} for the rest of {hero.possessive} life.",
        f"{hero.start} learned that kindness always comes back.",
        scene.moral("help"),
    )
    return [
        f"{opening(scene)} More than anything, {hero.name} wished for {scene.thing}.",
        f"{some_day(scene)}, {hero.name} met {friend.intro}."
        f" {say(scene, friend.name, plea, 'asked')} {hero.start} {kindness}",
        f"{say(scene, friend.name, 'You have a good heart. What do you wish for?')} {hero.start}"
        f" thought about the {scene.thing_name}. {say(scene, hero.name, wish)} {friend.start}"
        " smiled and said nothing.",
        f"The next morning, there was a box in front of the door. Inside was {scene.thing}!"
        f" {hero.start} ran to {scene.place} to say thank you, but {friend.name} was gone.",
        ending,
    ]


def a_contest(scene: Scene) -> list[str]:
    """Practice beats pride."""
    hero, friend, pick = scene.hero, scene.friend, scene.pick
    goal = pick(
        "run the fastest",
        "build the best boat",
        "sing the best song",
        "bake the best pie",
        "jump the highest",
    )
    boast = pick("I will win, because I am the best!", "Nobody can beat me!")
    failure = pick(
        "fell asleep under a tree.",
        "did not practice at all and made many mistakes.",
        "was too proud and forgot the rules.",
    )
    comfort = pick("You can try again next year.", "Come, let us share the prize.")
    work = pick("practiced every day.", "worked hard every evening.")
    return [
        f"{opening(scene)} {some_day(scene)}, there was a contest near {scene.place} to see who"
        f" could {goal}.",
        f"{capitalized(friend.intro)} laughed. {say(scene, friend.name, boast)} {hero.start} said"
        f" nothing and {work}",
        f"When the day came, everyone was there. {friend.start} {failure} {hero.start} did"
        f" {hero.possessive} best. At the end, {hero.name} won the prize: {scene.thing}.",
        f"{friend.start} was sad. {say(scene, hero.name, comfort)} {friend.start}"
        f" {pick('smiled.', 'felt better.')}"
        f" {say(scene, friend.name, 'You worked hard. You are the winner today.')}",
        scene.moral("patient", "share"),
    ]


ALL_PLOTS: list[Callable[[Scene], list[str]]] = [
    lost_and_found,
    sharing,
    being_brave,
    telling_the_truth,
    growing_a_plant,
    good_advice,
    a_wish,
    a_contest,
]
