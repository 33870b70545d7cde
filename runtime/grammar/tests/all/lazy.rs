//! Grammars that start at a trigger.

use crate::common::{CALL, END, OTHER, has, tokenizer};
use samite_grammar::{Grammar, GrammarVocabulary, Lazy, Trigger};
use samite_text::Constraint;

fn lazy(grammar: &str, triggers: &[Trigger], words: &[&str]) -> (Lazy, GrammarVocabulary) {
    let vocabulary = GrammarVocabulary::new(&tokenizer(words)).unwrap();
    let inner = Grammar::gbnf(grammar)
        .unwrap()
        .constraint(&vocabulary)
        .unwrap();
    (Lazy::new(inner, triggers).unwrap(), vocabulary)
}

/// Accepts the `|`-separated words of a text, each as one token or as bytes. The error names the
/// rejected word.
fn say(lazy: &mut Lazy, vocabulary: &GrammarVocabulary, text: &str) -> Result<(), String> {
    for word in text.split('|') {
        let found = vocabulary.tokenizer().find(word.replace(' ', "▁"));
        let bytes = || word.bytes().map(|byte| 5 + u32::from(byte)).collect();
        let tokens: Vec<u32> = found.map_or_else(bytes, |token| vec![token]);
        for token in tokens {
            lazy.accept(token)
                .map_err(|error| format!("{word}: {error}"))?;
        }
    }
    Ok(())
}

#[test]
fn everything_is_allowed_before_the_trigger() {
    let (mut lazy, vocabulary) = lazy(
        "root ::= \"[x]\"",
        &[Trigger::Word("[x".into())],
        &["a[", "x]"],
    );
    assert!(lazy.is_complete() && !lazy.is_finished());
    assert!(
        lazy.allows(END).unwrap() && lazy.allows(CALL).unwrap() && !lazy.allows(10_000).unwrap()
    );
    let count = vocabulary.tokenizer().vocab_size();
    let set: u32 = lazy
        .mask()
        .unwrap()
        .iter()
        .map(|word| word.count_ones())
        .sum();
    assert_eq!(set as usize, count);
    say(&mut lazy, &vocabulary, "free|[y").unwrap();
    assert!(!lazy.is_triggered());
    // The word begins in the middle of one token and ends in the middle of another.
    say(&mut lazy, &vocabulary, "a[|x]").unwrap();
    assert!(lazy.is_triggered() && lazy.is_finished());
}

#[test]
fn text_after_the_trigger_must_match_the_grammar() {
    let triggers = [Trigger::Word("<t>".into())];
    let (beginning, vocabulary) = lazy(
        "root ::= \"<t>\" [0-9]+ \"</t>\"",
        &triggers,
        &["<t", ">1", "<t>x"],
    );
    let mut text = beginning.clone();
    say(&mut text, &vocabulary, "so: |<t|>1|2").unwrap();
    assert!(text.is_triggered() && !text.is_complete() && !text.allows(END).unwrap());
    assert!(say(&mut text, &vocabulary, "x").is_err());
    say(&mut text, &vocabulary, "</t>").unwrap();
    assert!(text.is_finished());
    // The rest of the same token must conform as well.
    let mut text = beginning.clone();
    assert!(say(&mut text, &vocabulary, "<t>x").is_err());
    text.reset().unwrap();
    assert!(!text.is_triggered());
    text.accept(END).unwrap();
    assert!(text.is_finished());
}

#[test]
fn tokens_can_be_triggers() {
    let grammar = "root ::= (<call> | \"<other>\") \"a\"";
    let (beginning, vocabulary) =
        lazy(grammar, &[Trigger::Token(CALL), Trigger::Token(OTHER)], &[]);
    for trigger in [CALL, OTHER] {
        let mut text = beginning.clone();
        say(&mut text, &vocabulary, "words").unwrap();
        text.accept(trigger).unwrap();
        assert!(text.is_triggered());
        assert!(say(&mut text, &vocabulary, "b").is_err());
        say(&mut text, &vocabulary, "a").unwrap();
        assert!(text.is_finished());
    }
}

#[test]
fn regular_expressions_can_be_triggers() {
    let pattern = |text: &str| [Trigger::Pattern(text.into())];
    // From the first non-empty group, or from the whole match.
    for (expression, text, rest) in [
        ("call: *(f[0-9])", "I call:  f7", "("),
        ("call: *(x)?(f[0-9])", "call: f7", "("),
        ("f[0-9]", "ä f7", "("),
        ("(?:^|\n)(f7)", "f6\nf7", "("),
    ] {
        let (mut lazy, vocabulary) =
            lazy("root ::= \"f7(\" [a-z]* \")\"", &pattern(expression), &[]);
        say(&mut lazy, &vocabulary, text).unwrap();
        assert!(lazy.is_triggered(), "{expression}");
        assert!(
            say(&mut lazy.clone(), &vocabulary, "x").is_err(),
            "{expression}"
        );
        say(&mut lazy, &vocabulary, rest).unwrap();
        say(&mut lazy, &vocabulary, "abc)").unwrap();
        assert!(lazy.is_finished(), "{expression}");
    }
    let full = [Trigger::FullPattern("\\s*(\\{)".into())];
    let (beginning, vocabulary) = lazy("root ::= \"{\" \"}\"", &full, &[" {}"]);
    let mut text = beginning.clone();
    say(&mut text, &vocabulary, "a {}").unwrap();
    assert!(!text.is_triggered());
    let mut text = beginning.clone();
    say(&mut text, &vocabulary, " |{").unwrap();
    assert!(text.is_triggered() && !text.is_finished());
    say(&mut text, &vocabulary, "}").unwrap();
    assert!(text.is_finished());
}

#[test]
fn a_sleeping_grammar_ignores_triggers() {
    let (mut lazy, vocabulary) = lazy("root ::= \"go\" \"!\"", &[Trigger::Word("go".into())], &[]);
    say(&mut lazy, &vocabulary, "g").unwrap();
    lazy.set_asleep(true);
    say(&mut lazy, &vocabulary, "ogo").unwrap();
    lazy.set_asleep(false);
    say(&mut lazy, &vocabulary, "o").unwrap();
    assert!(!lazy.is_triggered());
    say(&mut lazy, &vocabulary, "go").unwrap();
    assert!(lazy.is_triggered());
}

#[test]
fn a_lazy_grammar_sleeps_until_a_given_text() {
    let (lazy, vocabulary) = lazy(
        "root ::= \"go\" \"!\"",
        &[Trigger::Word("go".into()), Trigger::Token(CALL)],
        &["go", "d>g", "</en"],
    );
    let mut lazy = lazy.sleep_until("</end>");
    for _ in 0..2 {
        say(&mut lazy, &vocabulary, "go|</en").unwrap();
        lazy.accept(CALL).unwrap();
        say(&mut lazy, &vocabulary, "</en").unwrap();
        assert!(!lazy.is_triggered());
        // The trigger begins in the token that ends the sleep.
        say(&mut lazy, &vocabulary, "d>g").unwrap();
        assert!(!lazy.is_triggered());
        say(&mut lazy, &vocabulary, "o!").unwrap();
        assert!(lazy.is_triggered() && lazy.is_finished());
        // Repeat after a reset.
        lazy.reset().unwrap();
    }
}

#[test]
fn trigger_tokens_that_violate_the_grammar_are_not_allowed() {
    let (mut lazy, vocabulary) = lazy(
        "root ::= \"<t>\" [0-9]+",
        &[Trigger::Word("<t>".into())],
        &["<t>x", "<t>1", ">x", ">1"],
    );
    let find = |word: &str| vocabulary.tokenizer().find(word).unwrap();
    for (before, bad, good) in [("", "<t>x", "<t>1"), ("a <t", ">x", ">1")] {
        say(&mut lazy, &vocabulary, before).unwrap();
        let [bad, good] = [find(bad), find(good)];
        assert!(has(lazy.mask().unwrap(), bad));
        assert!(!lazy.allows(bad).unwrap() && lazy.allows(good).unwrap());
        let mask = lazy.mask().unwrap();
        assert!(!has(mask, bad) && has(mask, good) && has(mask, END));
    }
    // The text continues without a grammar.
    lazy.accept(find(">1")).unwrap();
    assert!(lazy.is_triggered() && lazy.is_complete());
}

#[test]
fn long_text_before_the_trigger_is_handled() {
    let (mut lazy, vocabulary) = lazy("root ::= \"go\" \"!\"", &[Trigger::Word("go".into())], &[]);
    for _ in 0..1000 {
        say(&mut lazy, &vocabulary, &"x".repeat(1000)).unwrap();
    }
    say(&mut lazy, &vocabulary, "go!").unwrap();
    assert!(lazy.is_finished());
}

#[test]
fn invalid_triggers_are_errors() {
    let vocabulary = GrammarVocabulary::new(&tokenizer(&[])).unwrap();
    let inner = Grammar::gbnf("root ::= \"a\"")
        .unwrap()
        .constraint(&vocabulary)
        .unwrap();
    for (triggers, part) in [
        (vec![], "there is none"),
        (vec![Trigger::Word(String::new())], "the word is empty"),
        (vec![Trigger::Pattern("(".into())], "trigger '(': "),
    ] {
        let message = Lazy::new(inner.clone(), &triggers).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}
