"""The functions that tiny-chat is offered in training: what they may be called, take and return."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from .values import (
    Make,
    a_city,
    a_clock,
    a_message,
    a_task,
    an_address,
    an_expression,
    an_id,
    number,
    one_of,
    some_words,
    symbol,
)
from .words import any_name, nonsense

JsonValue = dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    """names: what it may be called; optional: users may leave it out, then calls do too."""

    names: str
    description: str
    make: Make
    kind: str = "string"
    optional: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Function:
    verbs: str
    nouns: str
    description: str
    parameters: dict[str, Parameter]  # by the slot of the phrasings
    result: Callable[[Random], JsonValue]


UNITS = (
    "meters,kilometers,miles,feet,inches,grams,kilograms,pounds,liters,gallons,hours,minutes,"
    "seconds,days,dollars,euros,yen,ounces,yards,weeks"
)
LANGUAGES = "French,German,Spanish,Latin,Italian,Japanese,Chinese,Russian,Greek,Dutch,Hindi,Korean"
ROOMS = "kitchen,bedroom,bathroom,hall,garage,garden,office,cellar,living room,attic"
DAYS = "Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday,May 3,June 12,July 30,2026-11-21"
SKY = one_of("sunny,cloudy,rainy,windy,foggy,clear,stormy")
CITY = "city,location,place,town,where,city_name,destination_city,for_city"
CLOCK = "time,at,when,clock_time,hour,start_time"
TEXT = "text,body,message,content,msg,words"


def done(random: Random) -> JsonValue:
    word = random.choice(("ok", "done", "success", "sent", "created", "accepted"))
    extra = {"id": random.randint(1, 9999)} if random.random() < 0.4 else {}
    return {"status": word, **extra}


P = Parameter
FUNCTIONS = {
    "weather": Function(
        "get,fetch,check,current,lookup,",
        "weather,forecast,weather_report,temperature",
        "Weather of a city",
        {
            "city": P(CITY, "Name of the city", a_city),
            "unit": P(
                "unit,units,scale,temperature_unit",
                "Unit of the temperature",
                one_of("celsius,fahrenheit"),
                optional=True,
                choices=("celsius", "fahrenheit"),
            ),
            "days": P("days,num_days,day_count", "Days ahead", number(2, 14), "integer", True),
        },
        lambda r: {"temperature": r.randint(-15, 38), "condition": SKY(r)},
    ),
    "time": Function(
        "get,current,fetch,tell,local,",
        "time,clock,local_time,time_in_city",
        "Local time of a city",
        {"city": P(CITY + ",zone", "Name of the city", a_city)},
        lambda r: {"time": a_clock(r)},
    ),
    "calculate": Function(
        "calculate,evaluate,compute,run,",
        "calculator,expression,math,calculation",
        "Computes an arithmetic expression",
        {
            "expression": P(
                "expression,formula,input,expr,calculation", "What to compute", an_expression
            )
        },
        lambda r: {"result": r.randint(-99, 9999)},
    ),
    "search": Function(
        "search,find,query,do,",
        "web,internet,search,pages,online",
        "Searches the web",
        {"query": P("query,q,search_query,terms,question,keywords", "Words to find", nonsense)},
        lambda r: {"title": nonsense(r), "pages": r.randint(1, 99)},
    ),
    "email": Function(
        "send,write,compose,post,",
        "email,mail,message,e_mail",
        "Sends an email",
        {
            "address": P("to,recipient,address,email,receiver", "Address", an_address),
            "subject": P("subject,title,topic", "Subject line", some_words(1, 2), optional=True),
            "text": P(TEXT, "Text of the mail", a_message),
        },
        done,
    ),
    "convert": Function(
        "convert,change,transform,",
        "units,unit,currency,measure,value",
        "Converts an amount between units",
        {
            "amount": P("value,amount,number,quantity", "How much", number(1, 500), "number"),
            "from": P("from_unit,from,source,unit_from", "Unit it has", one_of(UNITS)),
            "to": P("to_unit,to,target,unit_to", "Wanted unit", one_of(UNITS)),
        },
        lambda r: {"value": round(r.uniform(0.1, 900), 2)},
    ),
    "remind": Function(
        "set,create,add,make,new,",
        "reminder,alert,task,notification",
        "Reminds the user of something",
        {
            "task": P("task,text,what,title,reminder", "What to do", a_task),
            "clock": P(CLOCK, "Time of the day", a_clock, optional=True),
        },
        done,
    ),
    "timer": Function(
        "set,start,create,run,",
        "timer,countdown,alarm,stopwatch",
        "Starts a timer",
        {"minutes": P("minutes,duration,mins,length", "In minutes", number(1, 120), "integer")},
        done,
    ),
    "music": Function(
        "play,start,stream,",
        "music,song,track,title",
        "Plays a song",
        {
            "song": P("song,title,track,name,song_title", "Title", some_words(1, 3)),
            "artist": P("artist,band,by,singer", "Who sings it", any_name, optional=True),
        },
        lambda r: {"status": "playing", "volume": r.randint(1, 10)},
    ),
    "translate": Function(
        "translate,run,get,",
        "text,translation,words,language",
        "Translates a text",
        {
            "text": P(TEXT + ",phrase", "What to translate", some_words(1, 3)),
            "language": P("language,target,to,target_language", "Into which", one_of(LANGUAGES)),
        },
        lambda r: {"translation": nonsense(r)},
    ),
    "stock": Function(
        "get,fetch,check,lookup,",
        "stock_price,stock,quote,share_price,ticker",
        "Price of a share",
        {"symbol": P("symbol,ticker,stock,share,code", "Symbol of the share", symbol)},
        lambda r: {"price": round(r.uniform(1, 900), 2), "currency": r.choice(("USD", "EUR"))},
    ),
    "light": Function(
        "set,switch,control,turn,",
        "light,lights,lamp,room_light",
        "Switches a light",
        {
            "room": P("room,where,location,area", "Name of the room", one_of(ROOMS)),
            "state": P("state,mode,power,action", "", one_of("on,off"), choices=("on", "off")),
        },
        done,
    ),
    "table": Function(
        "book,reserve,request,",
        "table,restaurant,dinner,reservation",
        "Books a table",
        {
            "restaurant": P("restaurant,name,place,venue", "Name of the restaurant", any_name),
            "people": P("people,guests,party_size,seats", "Guests", number(2, 12), "integer"),
            "clock": P(CLOCK, "Time of the day", a_clock, optional=True),
        },
        lambda r: {"status": r.choice(("booked", "full", "confirmed")), "table": r.randint(1, 40)},
    ),
    "flight": Function(
        "find,search,book,list,",
        "flight,flights,plane,air_travel",
        "Finds flights",
        {
            "city": P("from,origin,start,from_city,departure", "Where it starts", a_city),
            "city2": P("to,destination,end,to_city,arrival", "Where it lands", a_city),
            "day": P("date,day,on,travel_date", "Day of travel", one_of(DAYS), optional=True),
        },
        lambda r: {"flight": symbol(r)[:2] + str(r.randint(10, 999)), "departure": a_clock(r)},
    ),
    "order": Function(
        "get,track,check,lookup,",
        "order,order_status,shipment,parcel",
        "Status of an order",
        {"id": P("order_id,id,number,order,reference", "Number of the order", an_id)},
        lambda r: {"status": r.choice(("shipped", "packed", "lost")), "days_left": r.randint(1, 9)},
    ),
    "shopping": Function(
        "add,put,append,insert,",
        "item,to_list,shopping_list,list_entry",
        "Puts something on the shopping list",
        {
            "item": P("item,product,thing,entry", "What to buy", some_words(1, 1)),
            "quantity": P("quantity,count,how_many,n", "How many", number(2, 24), "integer", True),
        },
        lambda r: {"items": r.randint(1, 30)},
    ),
}
