//! Eight languages, each compared with the independent reference on random texts.

use crate::common::{END, has, piece, tokens, vocabulary_of};
use crate::judge::{Chart, Judge};
use samite_grammar::{Grammar, GrammarVocabulary};
use samite_text::{Constraint, Rng};

/// Returns the number of texts per language; `SAMITE_GRAMMAR_TEXTS=10000` tries more.
fn texts() -> usize {
    let asked = std::env::var("SAMITE_GRAMMAR_TEXTS").ok();
    asked.and_then(|count| count.parse().ok()).unwrap_or(1000)
}

/// Returns a derived text, sometimes with random errors.
fn text(judge: &Judge, rng: &mut Rng) -> String {
    let size = rng.below(40);
    let mut text: Vec<char> = judge.derive(size, rng).chars().collect();
    let other: Vec<char> = judge.derive(20, rng).chars().collect();
    for _ in 0..rng.below(3) {
        let at = rng.below(text.len() + 1);
        match rng.below(3) {
            0 if at < text.len() => drop(text.remove(at)),
            1 if at < text.len() && !other.is_empty() => text[at] = other[rng.below(other.len())],
            _ if !other.is_empty() => text.insert(at, other[rng.below(other.len())]),
            _ => {}
        }
    }
    text.into_iter().collect()
}

/// The reference after a byte prefix, whose last character may be incomplete.
struct Behind<'j> {
    chart: Chart<'j>,
    pending: Vec<u8>,
}

impl Behind<'_> {
    fn allows(&mut self, bytes: &[u8]) -> bool {
        self.chart.allows(&[&self.pending, bytes].concat())
    }

    fn push(&mut self, bytes: &[u8]) {
        self.pending.extend(bytes);
        let end = match std::str::from_utf8(&self.pending) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        let rest = self.pending.split_off(end);
        let whole = std::mem::replace(&mut self.pending, rest);
        for c in std::str::from_utf8(&whole).unwrap().chars() {
            self.chart.push(c);
        }
    }

    fn is_complete(&self) -> bool {
        self.pending.is_empty() && self.chart.is_complete()
    }
}

fn check_mask(vocabulary: &GrammarVocabulary, mask: &[u32], behind: &mut Behind<'_>) {
    for token in 0..vocabulary.tokenizer().vocab_size() as u32 {
        let bytes = piece(vocabulary, token);
        let expected = match token {
            END => behind.is_complete(),
            _ => token >= 5 && behind.allows(&bytes),
        };
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(has(mask, token), expected, "token {token} {text:?}");
    }
}

/// Compares texts; returns how many were complete, and how many were rejected.
fn check(name: &str, source: &str) -> (usize, usize) {
    let judge = Judge::new(source);
    let mut rng = Rng::new(1);
    let derived: Vec<String> = (0..200).map(|_| judge.derive(40, &mut rng)).collect();
    let vocabulary = vocabulary_of(&derived, 6, &mut rng);
    let beginning = Grammar::gbnf(source)
        .unwrap()
        .constraint(&vocabulary)
        .unwrap();
    let (mut completed, mut refused) = (0, 0);
    for number in 0..texts() {
        let text = text(&judge, &mut rng);
        let mut constraint = beginning.clone();
        let mut behind = Behind {
            chart: judge.start(),
            pending: vec![],
        };
        let tokens = tokens(&vocabulary, text.as_bytes(), &mut rng);
        let looked_at = if number % 20 == 0 {
            rng.below(tokens.len() + 1)
        } else {
            usize::MAX
        };
        let mut is_refused = false;
        for (place, token) in tokens.iter().enumerate() {
            if place == looked_at {
                check_mask(&vocabulary, constraint.mask().unwrap(), &mut behind);
            }
            let bytes = piece(&vocabulary, *token);
            let expected = behind.allows(&bytes);
            let case = || format!("{name}: {:?} of {text:?}", String::from_utf8_lossy(&bytes));
            assert_eq!(constraint.allows(*token).unwrap(), expected, "{}", case());
            assert_eq!(constraint.is_complete(), behind.is_complete(), "{}", case());
            if !expected {
                assert!(constraint.accept(*token).is_err());
                is_refused = true;
                break;
            }
            constraint.accept(*token).unwrap();
            behind.push(&bytes);
        }
        if !is_refused {
            assert_eq!(
                constraint.is_complete(),
                behind.is_complete(),
                "{name}: {text:?}"
            );
            assert_eq!(
                constraint.accept(END).is_ok(),
                behind.is_complete(),
                "{name}: {text:?}"
            );
            completed += usize::from(behind.is_complete());
        }
        refused += usize::from(is_refused);
    }
    (completed, refused)
}

macro_rules! languages {
    ($($name:ident),*) => {$(
        #[test]
        fn $name() {
            let source = include_str!(concat!("../grammars/", stringify!($name), ".gbnf"));
            let (completed, refused) = check(stringify!($name), source);
            assert!(completed > texts() / 5 && refused > texts() / 50, "{completed}, {refused}");
        }
    )*};
}

languages!(
    arithmetic, chess, c, english, japanese, json, json_arr, list
);

/// Grammars for which a greedy lexer would read too far.
#[test]
fn greedy_lexing_does_not_overrun() {
    for source in [
        r#"root ::= [a-z]+ "end""#,
        r#"root ::= [a-z]+ "z" [a-z]*"#,
        r#"root ::= ("a" | "ab" | "abc") ("c" | "bc" | "d")"#,
        r#"root ::= x* "xy"
           x ::= "x" | "y""#,
        r#"root ::= "a"* "a"* "b"?"#,
        r#"root ::= ("ab" | "a") ("b" root)?"#,
        r#"root ::= [ab]{2,5} "a" [ab]{0,3}"#,
        r#"root ::= (word " ")* word "."
           word ::= [a-c]+ ("." [a-c]+)*"#,
        r#"root ::= "é"* [è-ê] "é""#,
        r#"root ::= "(" root ")" root | [a-b]* | "b" root "c""#,
        r#"root ::= "<" [^>]* ">" | "<" "a>b""#,
        r#"root ::= (("a"? "b"?)* "c")*"#,
        r#"root ::= "" | a a a
           a ::= "x"? "y"*"#,
    ] {
        assert!(check(source, source).0 > 0);
    }
}
