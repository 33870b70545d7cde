//! A generator of short children's stories, and a language model that writes them.
//!
//! [`story`] generates story number `index` of a seed from a grammar: a hero with a trait and
//! pronouns, a friend, and one of fifteen plots. Names and objects persist, causes have effects,
//! and people talk to each other. The choices give far more than fifty million different stories,
//! so a model that writes good ones has learnt the rules, not the texts. `train.toml` beside the
//! crate is a configuration of `samite train` for them.
//!
//! [`MODEL`] is small enough to embed in a program; `README.md` beside the crate describes what it
//! learnt, and how:
//!
//! ```
//! assert_eq!(&samite_stories::MODEL[..4], b"GGUF");
//! let story = samite_stories::story(1, 0);
//! assert_eq!(story, samite_stories::story(1, 0));
//! ```
#![forbid(unsafe_code)]

mod people;
mod plots;
mod random;
mod words;

use people::Child;
use random::{Random, pick};

/// Bytes of the model's GGUF file.
pub static MODEL: &[u8] = include_bytes!("../stories.gguf");

/// Generates story number `index` of `seed`, as one line of ASCII.
pub fn story(seed: u64, index: u64) -> String {
    let random = &mut Random::new(seed, index);
    let hero = Child::new(random, "");
    let friend = Child::new(random, hero.name);
    let plot = random.of(plots::PLOTS);
    let mut sentences = vec![opening(random, hero)];
    sentences.extend(plot(random, hero, friend));
    sentences.extend(ending(random, hero));
    sentences.join(" ")
}

fn opening(random: &mut Random, hero: Child) -> String {
    let Child {
        name,
        they,
        capital,
        kind,
        nature,
        ..
    } = hero;
    pick!(random;
        "Once upon a time, there was a {nature} little {kind} named {name}.",
        "Once upon a time, there lived a {kind} named {name}. {capital} was very {nature}.",
        "Once upon a time, there was a {kind} called {name}, and {they} was {nature}.",
        "There was once a little {kind} called {name}, who was {nature} and loved to play.",
        "{name} was a {nature} {kind}.",
        "A {nature} {kind} named {name} lived in a small house.",
    )
}

fn ending(random: &mut Random, hero: Child) -> Option<String> {
    let Child { name, they, .. } = hero;
    match random.below(5) {
        0 => Some("The end.".to_owned()),
        1 => Some(pick!(random;
            "That night, {name} slept very well.",
            "In bed, {name} thought about the day, and {they} smiled.",
            "And {name} could not wait for the next day.",
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn stories_are_different_and_well_formed() {
        let mut all = HashSet::new();
        for index in 0..20_000 {
            let story = story(1, index);
            assert!(
                story.is_ascii() && !story.contains(['{', '}', '\n']),
                "{story}"
            );
            assert!(!story.contains("  ") && !story.contains(" a a"), "{story}");
            assert!(story.ends_with(['.', '!', '"', '?']), "{story}");
            assert!(story.matches('"').count().is_multiple_of(2), "{story}");
            let words = story.split(' ').count();
            assert!((40..250).contains(&words), "{words} words: {story}");
            for pair in [
                ("a apple", "an apple"),
                ("a orange", "an orange"),
                ("an red", "a red"),
            ] {
                assert!(!story.contains(&format!(" {} ", pair.0)), "{story}");
            }
            all.insert(story);
        }
        assert!(all.len() > 19_990, "{} different ones", all.len());
        assert_ne!(story(1, 3), story(2, 3));
    }

    #[test]
    fn the_model_is_small() {
        assert!(MODEL.len() <= 2_000_000, "{} bytes", MODEL.len());
    }
}
