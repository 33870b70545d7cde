"""Writes short children's stories from a grammar of our own: deterministic for a seed, one story a line.

A story has a hero with a name and a pronoun, a friend, a place, a wish, a problem, a solution and a lesson; what happens
later depends on what was said before. `python3 stories.py 3` prints three.
"""

import random
import sys

GIRLS = "Lily Mia Anna Ruby Zoe Nora Ella Rose Lucy Amy Ivy Emma Sara Clara Maya".split()
BOYS = "Tom Ben Max Sam Leo Jack Tim Finn Noah Luke Owen Eli Hugo Adam Oscar".split()
ANIMALS = "dog cat bird rabbit fox bear mouse duck frog turtle pony squirrel".split()
PLACES = {
    "park": ("the swings", "a tall tree", "the pond"),
    "garden": ("the flowers", "an old wall", "the apple tree"),
    "forest": ("the tall trees", "a hollow log", "the little stream"),
    "beach": ("the waves", "a big rock", "the warm sand"),
    "farm": ("the red barn", "the hay", "the wooden fence"),
    "playground": ("the slide", "the sandbox", "the swings"),
}
TOYS = ["red ball", "blue kite", "little boat", "toy car", "yellow balloon", "teddy bear", "shiny coin", "green hat", "wooden train", "soft doll"]
FOODS = ["an apple", "a cookie", "some bread", "a cake", "some berries", "a sandwich"]
WEATHER = ["sunny", "warm", "windy", "bright", "quiet", "cold"]
TRAITS = ["kind", "brave", "curious", "happy", "clever", "gentle", "cheerful", "shy"]


def article(noun):
    return ("an " if noun[0] in "aeiou" else "a ") + noun


class Hero:
    def __init__(self, r, taken=()):
        girl = r.random() < 0.5
        self.name = r.choice([n for n in (GIRLS if girl else BOYS) if n not in taken])
        self.they, self.them, self.their = ("she", "her", "her") if girl else ("he", "him", "his")
        self.kind = "girl" if girl else "boy"


def cap(text):
    return text[0].upper() + text[1:]


def opening(r, h, trait):
    return r.choice([
        f"Once upon a time, there was a {trait} little {h.kind} named {h.name}.",
        f"Once upon a time, there lived a {h.kind} named {h.name}. {cap(h.they)} was very {trait}.",
        f"There was once a little {h.kind} called {h.name}, who was {trait} and loved to play.",
        f"{h.name} was a {trait} {h.kind}.",
    ])


def going(r, h, friend, place, weather):
    spot = r.choice(PLACES[place])
    who = r.choice([f"{h.their} friend {friend.name}", f"{h.their} mom", f"{h.their} dad"])
    company = who if "friend" in who else None
    first = r.choice([
        f"One {weather} day, {h.name} went to the {place} with {who}.",
        f"One {weather} morning, {h.name} and {who} walked to the {place}.",
        f"It was a {weather} day, and {h.name} went to the {place} with {who}.",
    ])
    return first + " " + r.choice([f"They played near {spot}.", f"They sat down near {spot}.", f"They looked at {spot} together."]), who, company, spot


def helper(r, h, who):
    return "Mom" if "mom" in who else "Dad" if "dad" in who else who.split()[-1]


def lost_toy(r, h, friend, place):
    toy = r.choice(TOYS)
    intro, who, _, spot = going(r, h, friend, place, r.choice(WEATHER))
    name = helper(r, h, who)
    where = r.choice([f"behind {spot}", f"under {spot}", f"next to {spot}"])
    animal = r.choice(ANIMALS)
    return " ".join([
        f"{cap(h.they)} had {article(toy)} and took it everywhere.",
        intro,
        r.choice([f"But then {h.name} could not find the {toy}.", f"Suddenly, the {toy} was gone."]),
        r.choice([f"{h.name} was sad and began to cry.", f"{h.name} felt very sad."]),
        r.choice([f"\"Don't worry,\" said {name}. \"We will find it.\"", f"\"Let us look for it together,\" {name} said."]),
        r.choice([f"They looked and looked. At last, {h.name} saw the {toy} {where}.",
                  f"A little {animal} came by and showed them the way. The {toy} was {where}!"]),
        r.choice([f"{h.name} was so happy that {h.they} hugged {name}.", f"{h.name} smiled and said, \"Thank you, {name}!\""]),
        r.choice([f"From that day on, {h.name} always took good care of the {toy}.", f"Then they all went home, and {h.name} held the {toy} tight."]),
    ])


def sharing(r, h, friend, place):
    food = r.choice(FOODS)
    f = friend
    thing = food.split(" ", 1)[1]
    pron = "them" if thing == "berries" else "it"
    return " ".join([
        f"One day, {h.name} had {food}. {cap(h.they)} wanted to eat {pron} all alone.",
        f"Then {h.their} friend {f.name} came to the {place}. {f.name} was hungry and had nothing to eat.",
        r.choice([f"\"Can I have some, please?\" asked {f.name}.", f"{f.name} looked at the {thing} and said, \"That looks good!\""]),
        r.choice([f"{h.name} thought about it.", f"At first, {h.name} said no. But then {h.they} saw that {f.name} was sad."]),
        f"So {h.name} gave half of the {thing} to {f.name}.",
        r.choice([f"\"Thank you! You are a good friend,\" said {f.name}.", f"{f.name} smiled and said, \"You are so kind, {h.name}!\""]),
        f"They sat near {r.choice(PLACES[place])} and ate together.",
        r.choice([f"{h.name} learned that sharing makes everyone happy.", f"It tasted much better than eating alone, and {h.name} was glad."]),
    ])


def rescue(r, h, friend, place):
    animal = r.choice(ANIMALS)
    intro, who, _, spot = going(r, h, friend, place, r.choice(WEATHER))
    name = helper(r, h, who)
    trouble, fix = r.choice([
        (f"It was stuck in a small hole.", f"{h.name} pulled it out very gently."),
        (f"It had hurt its leg.", f"{h.name} put a soft cloth around the leg."),
        (f"It was lost and could not find its home.", f"{h.name} carried it home to its mother."),
        (f"It was cold and wet.", f"{h.name} kept it warm in {h.their} coat."),
    ])
    return " ".join([
        intro,
        r.choice([f"Near {spot}, {h.name} heard a small sound.", f"Then {h.name} saw something move near {spot}."]),
        f"It was {article('little ' + animal)}! {trouble}",
        r.choice([f"\"Oh no, poor {animal}!\" said {h.name}.", f"\"We have to help the {animal},\" said {h.name}."]),
        r.choice([f"{name} nodded and said, \"Be careful.\"", f"{name} said, \"That is a good idea.\""]),
        fix,
        r.choice([f"The {animal} was happy and jumped up and down.", f"The {animal} looked at {h.name} as if to say thank you."]),
        r.choice([f"After that day, {h.name} and the {animal} were best friends.", f"{h.name} waved goodbye and felt very proud."]),
    ])


def learning(r, h, friend, place):
    skill, need = r.choice([("ride a bike", "bike"), ("swim", "water"), ("climb a tree", "tree"), ("fly a kite", "kite"), ("paint a picture", "paint"), ("bake a cake", "kitchen")])
    f = friend
    return " ".join([
        f"{h.name} wanted to learn how to {skill}.",
        r.choice([f"{h.their.capitalize()} friend {f.name} could do it very well.", f"But it was hard, and {h.they} was a little afraid."]),
        r.choice([f"The first time, {h.name} fell down and it hurt.", f"{h.name} tried and tried, but it did not work."]),
        r.choice([f"\"I can't do it,\" said {h.name}.", f"{h.name} was sad and wanted to stop."]),
        f"{f.name} said, \"{r.choice(['Try again! I will help you.', 'You can do it, I know you can.', 'Do not give up!'])}\"",
        f"So {h.name} took a deep breath and tried again.",
        r.choice(["This time, it worked!", f"And then, {h.they} did it!"]),
        r.choice([f"{h.name} laughed and shouted, \"Look at me!\"", f"{f.name} clapped and {h.name} was very proud."]),
        r.choice([f"Now {h.name} knew that it is good to keep trying.", f"Every day after that, the two friends went to the {place} to practice."]),
    ])


def surprise(r, h, friend, place):
    f = friend
    toy = r.choice(TOYS)
    food = r.choice(FOODS)
    return " ".join([
        f"It was {f.name}'s birthday, and {h.name} wanted to make a surprise.",
        f"{cap(h.they)} went to the {place} to think. \"What would {f.name} like?\" {h.they} asked.",
        r.choice([f"Then {h.name} had an idea. {cap(h.they)} would give {f.name} {article(toy)}.", f"{h.name} remembered that {f.name} always wanted {article(toy)}."]),
        f"{h.their.capitalize()} mom helped {h.them} to make {food}, too.",
        f"When {f.name} opened the door, {h.name} said, \"Happy birthday!\"",
        r.choice([f"{f.name} saw the {toy} and jumped for joy.", f"\"A {toy}! Thank you so much!\" said {f.name}." if toy[0] not in "aeiou" else f"\"Thank you so much!\" said {f.name}."]),
        r.choice(["They played all day until the sun went down.", f"They ate and laughed, and it was the best day ever."]),
    ])


def story(r):
    h = Hero(r)
    friend = Hero(r, taken=(h.name,))
    place = r.choice(list(PLACES))
    body = r.choice([lost_toy, sharing, rescue, learning, surprise])(r, h, friend, place)
    end = r.choice(["", "", " The end.", f" That night, {h.name} slept very well."])
    return opening(r, h, r.choice(TRAITS)) + " " + body + end


def stories(count, seed=1):
    r = random.Random(seed)
    return [story(r) for _ in range(count)]


if __name__ == "__main__":
    print("\n\n".join(stories(int(sys.argv[1]) if len(sys.argv) > 1 else 3)))
