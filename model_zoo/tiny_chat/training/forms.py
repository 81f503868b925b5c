"""Sentences to be written as JSON: the keys are named in the prompt, the values in the text."""

import json
from random import Random
from typing import Any

from .phrases import dress, read_sections
from .skills import half_phrased, is_held, retry
from .values import a_city, a_clock, an_address, one_of, some_words
from .words import any_name

TEXTS = read_sections("forms.txt")
SUBJECTS = ("person", "product", "event")
# Field of a text: what its key may be called, the JSON type.
FIELDS = {
    "person": {
        "name": ("name,person,first_name,who,user_name", "string"),
        "age": ("age,years,age_years,years_old", "integer"),
        "city": ("city,town,location,lives_in,home", "string"),
        "job": ("job,profession,occupation,work", "string"),
        "email": ("email,mail,address,contact", "string"),
    },
    "product": {
        "item": ("item,product,article,thing", "string"),
        "price": ("price,cost,amount,price_eur", "number"),
        "color": ("color,colour,shade", "string"),
        "count": ("count,quantity,number,pieces", "integer"),
    },
    "event": {
        "title": ("title,event,topic,what", "string"),
        "day": ("day,weekday,date,on", "string"),
        "clock": ("time,start,at,begins", "string"),
        "city": ("city,place,location,where", "string"),
    },
}
JOBS = one_of("teacher,doctor,baker,painter,engineer,nurse,pilot,cook,student,farmer,writer,driver")
COLORS = one_of("red,green,blue,black,white,yellow,brown,grey,pink,purple,orange")
WEEKDAYS = one_of("Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday")
TITLES = one_of("meeting,concert,dinner,party,workshop,match,talk,wedding,lesson,festival")


def values_of(random: Random, held: bool) -> dict[str, Any]:
    return {
        "name": retry(lambda: any_name(random), held),
        "age": random.randint(1, 99),
        "city": retry(lambda: a_city(random), held),
        "job": JOBS(random),
        "email": retry(lambda: an_address(random), held),
        "item": retry(lambda: some_words(1, 1)(random), held),
        "price": random.choice((random.randint(1, 400), round(random.uniform(1, 99), 2))),
        "color": COLORS(random),
        "count": random.randint(2, 60),
        "title": TITLES(random),
        "day": WEEKDAYS(random),
        "clock": a_clock(random),
    }


def form(random: Random, held: bool, *, keys_named: bool = True) -> tuple[str | None, str, str]:
    """System prompt or None, question, and the JSON.

    held        keys, values and half the phrasings are held out
    keys_named  in the prompt; if not, the JSON has keys for what the text tells only
    """
    subject = random.choice(SUBJECTS)
    text = a_text(random, subject, held)
    values = values_of(random, held)
    fields = keys_of(random, subject, text, held)
    if not keys_named:
        fields = {key: slot for key, slot in fields.items() if f"{{{slot}}}" in text}
    answer = {key: values[slot] if f"{{{slot}}}" in text else None for key, slot in fields.items()}
    for slot, value in values.items():
        text = text.replace(f"{{{slot}}}", str(value))
    types = {key: FIELDS[subject][slot][1] for key, slot in fields.items()}
    section = random.choices(("ask", "ask schema"), weights=(3, 1))[0]
    section = section if keys_named else "ask values"
    wanted = named(random, types) if section == "ask" else schema_of(types)
    slots = {"keys": wanted, "text": text}
    template = half_phrased(random, TEXTS[section], held)
    written = json.dumps(answer, ensure_ascii=False)
    if random.random() < 0.3:
        slots["text"] = "the text"
        return dress_kept(random, template, slots), text, written
    return None, dress_kept(random, template, slots), written


def a_text(random: Random, subject: str, held: bool) -> str:
    """A text with slots; in training a fifth are notes, put together anew each time."""
    if held or random.random() > 0.2:
        return TEXTS[subject].pick(random, held and random.random() < 0.5)
    slots = random.sample(list(FIELDS[subject]), random.randint(2, 4))
    notes = [TEXTS[f"{subject} {slot}"].pick(random, False) for slot in slots]
    if random.random() < 0.3:
        notes.insert(random.randint(0, len(notes)), random.choice(TEXTS["nothing"].train))
    return random.choice((", ", ", ", ". ", "; ", " - ", " and ", "\n", " ")).join(notes)


def dress_kept(random: Random, template: str, slots: dict[str, str]) -> str:
    return dress(random, template, slots, keep=True).rstrip(" ?!.") + random.choice(("", ".", "."))


def keys_of(random: Random, subject: str, text: str, held: bool) -> dict[str, str]:
    """Some keys and their slots, mostly of what the text tells."""
    fields = FIELDS[subject]
    told = [slot for slot in fields if f"{{{slot}}}" in text]
    others = [slot for slot in fields if slot not in told]
    while True:
        slots = random.sample(told, random.randint(1, len(told)))
        if others and random.random() < 0.2:
            slots.append(random.choice(others))
        if random.random() < 0.4:
            random.shuffle(slots)
        keys = [random.choice(fields[slot][0].split(",")) for slot in slots]
        if is_held(",".join(keys)) == held:
            return dict(zip(keys, slots, strict=True))


def named(random: Random, types: dict[str, str]) -> str:
    """The keys in words: "name, age and city", or with types or in quotes."""
    style = random.random()
    words = list(types)
    if style < 0.2:
        words = [f"{key} ({kind})" for key, kind in types.items()]
    elif style < 0.35:
        words = [f'"{key}"' for key in types]
    if style < 0.7 and len(words) > 1:
        return ", ".join(words[:-1]) + " and " + words[-1]
    return ", ".join(words)


def schema_of(types: dict[str, str]) -> str:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return json.dumps({"type": "object", "properties": properties, "required": list(types)})
