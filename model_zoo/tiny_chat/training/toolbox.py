"""Functions as they are offered to tiny-chat in training, and the arguments of their calls.

Names of functions and parameters are put together anew for each example, so that the model has to
read the schema; a fifth of the combinations is held out.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from .functions import FUNCTIONS, Function, JsonValue, Parameter
from .skills import is_held, retry
from .words import pseudo_word

UNDESCRIBED = 0.35  # of the descriptions are left out


@dataclass(frozen=True)
class Offer:
    """One function as it is offered: its schema, and which slot each parameter takes."""

    concept: str
    schema: JsonValue  # name, description, parameters
    slots: dict[str, str]  # parameter name -> slot

    @property
    def name(self) -> str:
        return str(self.schema["name"])


# Slots whose values are held out like words are, not only where the names are.
HELD_VALUES = ("city", "city2", "query", "text", "task", "item", "song", "restaurant", "address")


def a_name(random: Random, function: Function) -> str:
    """get_weather, weather, fetchForecast, city-weather, babi_get_weather, ..."""
    verb = random.choice(function.verbs.split(","))
    words = random.choice(function.nouns.split(",")).split("_")
    if verb and verb not in words:
        words.insert(0, verb)
    if random.random() < 0.08:
        words.insert(random.choice((0, len(words))), pseudo_word(random))
    style = random.random()
    if style < 0.12:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    return ("-" if style < 0.17 else "." if style < 0.2 else "_").join(words)


def offer(random: Random, concept: str, held: bool, slots: tuple[str, ...] = ()) -> Offer:
    """A function for this purpose whose names are on one side of the split.

    slots  optional parameters that it must have
    """
    function = FUNCTIONS[concept]
    wanted = {
        slot: parameter
        for slot, parameter in function.parameters.items()
        if not parameter.optional or slot in slots or random.random() < 0.3
    }
    while True:
        name = a_name(random, function)
        named = [parameter_name(random, parameter) for parameter in wanted.values()]
        if len({*named}) == len(named) and is_held(f"{name}({','.join(named)})") == held:
            break
    slots_of = dict(zip(named, wanted, strict=True))
    order = sorted(named) if random.random() < 0.2 else named
    return Offer(concept, schema_of(random, name, order, slots_of, function), slots_of)


def parameter_name(random: Random, parameter: Parameter) -> str:
    name = random.choice(parameter.names.split(","))
    if random.random() < 0.06:
        return pseudo_word(random) + "_" + name
    if "_" in name and random.random() < 0.1:
        first, *others = name.split("_")
        return first + "".join(word.capitalize() for word in others)
    return name


def schema_of(
    random: Random, name: str, order: list[str], slots: dict[str, str], function: Function
) -> JsonValue:
    titled = random.random() < 0.12  # as libraries that make schemas of code write them
    described = random.random() > UNDESCRIBED
    properties: JsonValue = {}
    for key in order:
        parameter = function.parameters[slots[key]]
        kind = parameter.kind
        if kind != "string" and random.random() < 0.12:
            kind = "string"
        field: JsonValue = {"type": kind}
        if parameter.choices and random.random() < 0.8:
            field["enum"] = list(parameter.choices)
        if titled:
            field = {"title": key.replace("_", " ").title(), **field}
        if described and parameter.description and random.random() < 0.7:
            field["description"] = parameter.description
        properties[key] = field
    required = [key for key in order if not function.parameters[slots[key]].optional]
    parameters: JsonValue = {"type": "object", "properties": properties}
    if random.random() < 0.9:
        parameters["required"] = required
    if random.random() < 0.2:
        parameters["additionalProperties"] = False
    if titled:
        parameters = {key: parameters[key] for key in sorted(parameters)}
    schema: JsonValue = {"name": name}
    if random.random() > UNDESCRIBED:
        schema["description"] = function.description + random.choice(("", "."))
    return {**schema, "parameters": parameters}


def a_value(random: Random, concept: str, slot: str, held: bool) -> Any:
    make = FUNCTIONS[concept].parameters[slot].make
    if slot not in HELD_VALUES:
        return make(random)
    return retry(lambda: str(make(random)), held)


def arguments_of(offered: Offer, values: dict[str, Any]) -> JsonValue:
    """The call's arguments in the schema's order, each of the type that the schema names."""
    arguments: JsonValue = {}
    for key, field in offered.schema["parameters"]["properties"].items():
        slot = offered.slots[key]
        if slot in values:
            value = values[slot]
            arguments[key] = str(value) if field["type"] == "string" else value
    return arguments
