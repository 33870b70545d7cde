//! Vocabulary of the stories.

pub(crate) const GIRLS: &[&str] = &[
    "Lily", "Mia", "Anna", "Ruby", "Zoe", "Nora", "Ella", "Rose", "Lucy", "Amy", "Ivy", "Emma",
    "Sara", "Clara", "Maya",
];
pub(crate) const BOYS: &[&str] = &[
    "Tom", "Ben", "Max", "Sam", "Leo", "Jack", "Tim", "Finn", "Noah", "Luke", "Owen", "Eli",
    "Hugo", "Adam", "Oscar",
];
pub(crate) const TRAITS: &[&str] = &[
    "kind", "brave", "curious", "happy", "clever", "gentle", "cheerful", "shy", "quiet", "funny",
];
pub(crate) const WEATHER: &[&str] = &["sunny", "warm", "windy", "bright", "cloudy", "cool"];
pub(crate) const ANIMALS: &[&str] = &[
    "dog", "cat", "bird", "rabbit", "fox", "duck", "mouse", "frog", "turtle", "pony", "squirrel",
    "kitten", "puppy", "hedgehog",
];
pub(crate) const PETS: &[&str] = &["dog", "cat", "rabbit", "pony", "kitten", "puppy"];
pub(crate) const PET_NAMES: &[&str] = &[
    "Spot", "Fluffy", "Biscuit", "Pepper", "Sunny", "Button", "Coco", "Daisy",
];
pub(crate) const COLORS: &[&str] = &[
    "red", "blue", "green", "yellow", "purple", "white", "orange",
];
pub(crate) const TOYS: &[&str] = &[
    "ball", "kite", "boat", "car", "balloon", "bear", "hat", "train", "doll", "drum", "book",
    "scarf",
];
pub(crate) const FEELINGS: &[&str] = &["happy", "glad", "proud"];

/// A food with its article, without it, and its pronoun.
pub(crate) type Food = (&'static str, &'static str, &'static str);
pub(crate) const FOODS: &[Food] = &[
    ("an apple", "apple", "it"),
    ("a cookie", "cookie", "it"),
    ("some bread", "bread", "it"),
    ("a big cake", "cake", "it"),
    ("some berries", "berries", "them"),
    ("a sandwich", "sandwich", "it"),
    ("some grapes", "grapes", "them"),
    ("a sweet pear", "pear", "it"),
    ("some cheese", "cheese", "it"),
];

/// An outdoor place with three spots in it.
pub(crate) type OutdoorPlace = (&'static str, [&'static str; 3]);
pub(crate) const PLACES: &[OutdoorPlace] = &[
    ("park", ["the swings", "a tall tree", "the pond"]),
    ("garden", ["the flowers", "an old wall", "the apple tree"]),
    (
        "forest",
        ["the tall trees", "a hollow log", "the little stream"],
    ),
    ("beach", ["the waves", "a big rock", "the warm sand"]),
    ("farm", ["the red barn", "the hay", "the wooden fence"]),
    ("playground", ["the slide", "the sandbox", "the old bench"]),
    (
        "meadow",
        ["the tall grass", "a round stone", "the small hill"],
    ),
    ("lake", ["the water", "a wooden boat", "the long bridge"]),
];

/// Returns the article `a` or `an` for a word.
pub(crate) fn article(word: &str) -> &'static str {
    if word.starts_with(['a', 'e', 'i', 'o', 'u']) {
        "an"
    } else {
        "a"
    }
}

/// Capitalizes a word.
pub(crate) fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or(String::new(), |first| {
        first.to_uppercase().chain(letters).collect()
    })
}
