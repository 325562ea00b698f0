"""Kinds of tools. Their names, keys, descriptions and the wording of questions vary, so that a call can be written only by who read the declaration."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .any_tool import any_tool
from .skills import listed
from .source import SMALL_NUMBERS, Source, words
from .tool import Case, Tool, declare, failure, key, named, object_result, schema

_UNITS = words("dollars euros pounds yen francs meters feet miles inches grams ounces liters gallons")
_ROOMS = words("kitchen hall bedroom bathroom garage office garden cellar attic studio")


def weather(source: Source) -> Tool:
    place, days, unit = key(source, "city place location town"), key(source, "days num_days"), key(source, "unit units scale")
    has_days, has_unit = source.chance(0.4), source.chance(0.6)
    properties = {place: schema(source, "string", "Name of the city")}
    if has_days:
        properties[days] = schema(source, "integer", "Number of days")
    if has_unit:
        properties[unit] = schema(source, "string", "Unit of temperature", **({"enum": ["celsius", "fahrenheit"]} if source.chance(0.8) else {}))
    name = named(source, "get fetch check show read", "weather forecast climate temperature")

    def ask(source: Source) -> Case:
        cities = [source.city() for _ in range(2 if source.chance(0.12) else 1)]
        more: dict[str, Any] = {}
        text = source.pick(
            ("What is the weather in {}", "How is the weather in {}", "Tell me the weather in {}", "Weather in {}", "What's the weather like in {}")
        )
        text = text.format(listed(cities))
        if has_days and source.chance(0.5):
            more[days] = source.integer(2, 10)
            text += f" for {SMALL_NUMBERS[more[days]] if source.chance(0.4) else more[days]} days"
        if has_unit and source.chance(0.5):
            more[unit] = source.pick(("celsius", "fahrenheit"))
            text += f" in {more[unit]}"
        results, answers = zip(*(_weather_result(source, city) for city in cities), strict=True)
        return Case(f"{text}?", tuple({place: city, **more} for city in cities), results, " ".join(answers))

    return Tool("weather", name, declare(source, name, "Get the weather of a city", properties, [place]), ask)


def _weather_result(source: Source, city: str) -> tuple[str, str]:
    if failed := failure(source):
        return failed
    degrees, sky = source.integer(-20, 40), source.pick(("sunny", "cloudy", "rainy", "windy", "clear", "foggy", "snowy"))
    number_key, sky_key = source.pick(("temperature", "temp", "degrees")), source.pick(("sky", "condition", "weather", "summary"))
    form = source.weighted(("number", "both", "text", "plain"), (0.3, 0.4, 0.15, 0.15))
    if form == "number":
        return object_result(source, {number_key: degrees}), f"It is {degrees} degrees in {city}."
    if form == "both":
        return object_result(source, {number_key: degrees, sky_key: sky}), f"It is {degrees} degrees and {sky} in {city}."
    return (sky, f"It is {sky} in {city}.") if form == "text" else (f"{degrees} degrees", f"It is {degrees} degrees in {city}.")


def arithmetic(source: Source) -> Tool:
    first, second = source.pick((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("number1", "number2")))
    kind = source.pick(("integer", "number"))
    name = source.pick(("add", "sum", "plus", "add_numbers", "calculate_sum", "add_two", "addition"))
    properties = {first: schema(source, kind, "First number"), second: schema(source, kind, "Second number")}

    def ask(source: Source) -> Case:
        a, b = (source.integer(0, 999) if kind == "integer" else source.number(0, 99) for _ in range(2))
        question = source.pick((f"What is {a}+{b}?", f"What is {a} + {b}?", f"Add {a} and {b}.", f"How much is {a} plus {b}?", f"Use {name} on {a} and {b}."))
        result, answer = failure(source) or _total(source, round(a + b, 2))
        return Case(question, ({first: a, second: b},), (result,), answer)

    return Tool("arithmetic", name, declare(source, name, "Add two numbers", properties, [first, second]), ask)


def _total(source: Source, total: int | float) -> tuple[str, str]:
    text = str(total) if source.chance(0.6) else object_result(source, {source.pick(("result", "sum", "total", "value")): total})
    return text, f"The sum is {total}."


def search(source: Source) -> Tool:
    query, limit = key(source, "query q text keywords search_term"), key(source, "limit count max_results top_k num")
    name = named(source, "search find lookup query", "web documents items catalog docs products") if source.chance(0.8) else "search"
    properties = {query: schema(source, "string", "What to search for")}
    if has_limit := source.chance(0.75):
        properties[limit] = schema(source, "integer", "How many results to return")

    def ask(source: Source) -> Case:
        text = " ".join(source.thing() for _ in range(source.integer(1, 3)))
        arguments: dict[str, Any] = {query: text}
        if has_limit and source.chance(0.6):
            arguments[limit] = source.integer(1, 20)
            question = source.pick(("Find {n} results for {t}.", "Search for {t}, {n} results.", "Show me {n} results for {t}.")).format(
                n=arguments[limit], t=text
            )
        else:
            question = source.pick((f"Search for {text}.", f"Find {text}.", f"Look up {text}.", f"Please search for {text}."))
        found = [source.thing() for _ in range(source.integer(1, 3))]
        as_list = json.dumps(found), f"I found {listed(found)}."
        as_object = object_result(source, {"results": found}), f"I found {listed(found)}."
        result, answer = failure(source) or source.weighted((as_list, as_object, ("[]", "I found nothing.")), (0.6, 0.3, 0.1))
        return Case(question, (arguments,), (result,), answer)

    return Tool("search", name, declare(source, name, "Search for something", properties, [query]), ask)


def alarm(source: Source) -> Tool:
    hour, minute, repeat = key(source, "hour hours h"), key(source, "minute minutes m"), key(source, "repeat daily every_day recurring")
    name = named(source, "set create add new", "alarm timer reminder wakeup")
    properties = {hour: schema(source, "integer", "Hour of the day"), minute: schema(source, "integer", "Minute of the hour")}
    if has_repeat := source.chance(0.75):
        properties[repeat] = schema(source, "boolean", "Whether it rings every day")

    def ask(source: Source) -> Case:
        at = (source.integer(0, 23), source.integer(0, 59))
        time = f"{at[0]}:{at[1]:02d}"
        question = source.pick((f"Set an alarm for {time}", f"Wake me at {time}", f"Set the alarm to {time}", f"I need an alarm at {time}"))
        arguments: dict[str, Any] = {hour: at[0], minute: at[1]}
        if has_repeat and source.chance(0.7):
            arguments[repeat] = source.chance(0.5)
            question += source.pick((" every day", " each day", " daily")) if arguments[repeat] else source.pick((" once", " just once", " only today"))
        result = source.pick(("ok", "done", '{"status": "ok"}', "Alarm set", '{"ok": true}'))
        result, answer = failure(source) or (result, f"The alarm is set for {time}.")
        return Case(f"{question}.", (arguments,), (result,), answer)

    return Tool("alarm", name, declare(source, name, "Set an alarm", properties, [hour, minute]), ask)


def message(source: Source) -> Tool:
    to, body, urgent = key(source, "to recipient person receiver"), key(source, "text body message content"), key(source, "urgent important priority")
    name = named(source, "send write post", "message mail note email text")
    properties = {to: schema(source, "string", "Who gets it"), body: schema(source, "string", "What it says")}
    if has_urgent := source.chance(0.5):
        properties[urgent] = schema(source, "boolean", "Whether it is urgent")

    def ask(source: Source) -> Case:
        who, said = source.name(), " ".join(source.thing() for _ in range(source.integer(1, 5)))
        said += source.pick(("", "", "!", "."))
        arguments: dict[str, Any] = {to: who, body: said}
        question = source.pick((f'Send "{said}" to {who}', f'Tell {who} "{said}"', f'Write "{said}" to {who}'))
        if has_urgent and source.chance(0.6):
            arguments[urgent] = source.chance(0.5)
            question += ", it is urgent" if arguments[urgent] else ", it is not urgent"
        result, answer = failure(source) or (source.pick(("sent", "ok", '{"sent": true}', "delivered")), f"The message to {who} is sent.")
        return Case(f"{question}.", (arguments,), (result,), answer)

    return Tool("message", name, declare(source, name, "Send a message to a person", properties, [to, body]), ask)


def conversion(source: Source) -> Tool:
    amount, start, end = key(source, "amount value quantity"), *source.pick((("from", "to"), ("source", "target"), ("from_unit", "to_unit"), ("start", "end")))
    name = named(source, "convert change exchange", "currency units money value")
    properties = {amount: schema(source, "number", "How much"), start: schema(source, "string", "Given in"), end: schema(source, "string", "Wanted in")}

    def ask(source: Source) -> Case:
        value = source.number(1, 500)
        one, other = source.some(_UNITS, 2)
        form = source.pick(("Convert {v} {a} to {b}.", "How much is {v} {a} in {b}?", "What are {v} {a} in {b}?", "Change {v} {a} to {b}."))
        total = source.number(1, 900)
        text = str(total) if source.chance(0.5) else object_result(source, {source.pick(("result", "amount", "value")): total})
        result, answer = failure(source) or (text, f"{value} {one} are {total} {other}.")
        return Case(form.format(v=value, a=one, b=other), ({amount: value, start: one, end: other},), (result,), answer)

    return Tool("conversion", name, declare(source, name, "Convert an amount", properties, [amount, start, end]), ask)


def shopping(source: Source) -> Tool:
    items = key(source, "items products entries things list")
    name = named(source, "add put append", "items cart basket list")
    properties = {items: schema(source, "array", "What to add", items={"type": "string"})}

    def ask(source: Source) -> Case:
        things = [source.thing() for _ in range(source.integer(1, 4))]
        where = source.pick(("list", "shopping list", "cart", "basket"))
        question = source.pick((f"Add {listed(things)} to the {where}.", f"Put {listed(things)} in the {where}.", f"I need {listed(things)} in my {where}."))
        result, answer = failure(source) or (source.pick(("ok", "added", "done", '{"ok": true}')), f"I added {listed(things)}.")
        return Case(question, ({items: things},), (result,), answer)

    return Tool("shopping", name, declare(source, name, "Add things to a list", properties, [items]), ask)


def average(source: Source) -> Tool:
    numbers = key(source, "numbers values data points")
    what = source.pick(("average", "mean", "maximum", "minimum", "median"))
    name = source.pick((what, f"get_{what}", f"compute_{what}", f"{what}_of"))
    properties = {numbers: schema(source, "array", "The numbers", items={"type": "number"})}

    def ask(source: Source) -> Case:
        values = [source.number(0, 99) for _ in range(source.integer(2, 5))]
        total = source.number(0, 99)
        question = source.pick(("What is the {} of {}?", "Compute the {} of {}.", "Give me the {} of {}.")).format(
            what, listed([str(value) for value in values])
        )
        text = str(total) if source.chance(0.6) else object_result(source, {source.pick(("result", what)): total})
        result, answer = failure(source) or (text, f"The {what} is {total}.")
        return Case(question, ({numbers: values},), (result,), answer)

    return Tool("average", name, declare(source, name, f"Compute the {what} of numbers", properties, [numbers]), ask)


def account(source: Source) -> Tool:
    whole = key(source, "user person profile customer")
    name = named(source, "create add register save", "user person customer account profile")
    fields = {"name": {"type": "string"}, "age": {"type": "integer"}}
    inner = {"type": "object", "properties": fields} if source.chance(0.7) else {"type": "object"}

    def ask(source: Source) -> Case:
        who, age = source.name(), source.integer(1, 99)
        question = source.pick((f"Create a user named {who}, aged {age}.", f"Register {who}, {age} years old.", f"Save a person: {who}, {age}."))
        number = source.integer(1, 9999)
        result, answer = failure(source) or (object_result(source, {"id": number}), f"{who} is saved with id {number}.")
        return Case(question, ({whole: {"name": who, "age": age}},), (result,), answer)

    return Tool("account", name, declare(source, name, "Create a user", {whole: inner}, [whole]), ask)


def clock(source: Source) -> Tool:
    name = named(source, "get read tell check", "time clock hour current_time")

    def ask(source: Source) -> Case:
        time = f"{source.integer(0, 23)}:{source.integer(0, 59):02d}"
        question = source.pick(("What time is it?", "Tell me the time.", "What is the time?", "What is the time now?"))
        text = time if source.chance(0.5) else object_result(source, {"time": time})
        result, answer = failure(source) or (text, f"It is {time}.")
        return Case(question, ({},), (result,), answer)

    return Tool("clock", name, declare(source, name, "Get the current time", {}, []), ask)


def light(source: Source) -> Tool:
    room, on, level = key(source, "room place area"), key(source, "on state enabled power"), key(source, "level brightness dim")
    name = named(source, "set switch turn control", "light lamp lights")
    properties = {room: schema(source, "string", "Which room"), on: schema(source, "boolean", "Whether it is on")}
    if has_level := source.chance(0.6):
        properties[level] = schema(source, "number", "How bright")

    def ask(source: Source) -> Case:
        rooms = source.some(_ROOMS, 2 if source.chance(0.12) else 1)
        is_on = source.chance(0.5)
        more: dict[str, Any] = {on: is_on}
        question = f"Turn {'on' if is_on else 'off'} the light in the {' and the '.join(rooms)}"
        if has_level and is_on and source.chance(0.6):
            more[level] = source.number(1, 9)
            question += f" at level {more[level]}"
        done = source.pick(("ok", "done", '{"ok": true}', f'{{"on": {json.dumps(is_on)}}}'))
        results, answers = zip(*(failure(source) or (done, f"The light in the {one} is {'on' if is_on else 'off'}.") for one in rooms), strict=True)
        return Case(f"{question}.", tuple({room: one, **more} for one in rooms), results, " ".join(answers))

    return Tool("light", name, declare(source, name, "Switch a light", properties, [room, on]), ask)


FAMILIES: tuple[tuple[Callable[[Source], Tool], float], ...] = (
    (any_tool, 4),
    (weather, 2),
    (search, 1.5),
    (alarm, 1.5),
    (arithmetic, 1.5),
    (message, 1),
    (conversion, 1),
    (shopping, 1),
    (average, 1),
    (account, 1),
    (light, 1),
    (clock, 0.5),
)
