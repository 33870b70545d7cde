//! Constraints during generation: ends, tokens by name, clones, rollback.

use crate::common::{CALL, END, OTHER, has, over_bytes, takes, tokenizer};
use samite_grammar::{Grammar, GrammarConstraint, GrammarPart, GrammarVocabulary};
use samite_text::{Constraint, Rng, Sampler, SamplerParams};

fn byte(c: u8) -> u32 {
    5 + u32::from(c)
}

fn gbnf(text: &str, words: &[&str]) -> (GrammarConstraint, GrammarVocabulary) {
    let vocabulary = GrammarVocabulary::new(&tokenizer(words)).unwrap();
    let constraint = Grammar::gbnf(text)
        .unwrap()
        .constraint(&vocabulary)
        .unwrap();
    (constraint, vocabulary)
}

fn allowed(constraint: &mut GrammarConstraint) -> Vec<u32> {
    let mask = constraint.mask().unwrap().to_vec();
    (0..mask.len() as u32 * 32)
        .filter(|token| has(&mask, *token))
        .collect()
}

#[test]
fn json_white_space_is_limited_in_any_grammar() {
    let schema = serde_json::json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let whole = Grammar::json_schema(&schema.to_string()).unwrap();
    for grammar in [whole, Grammar::parts(GrammarPart::Json(schema))] {
        let constraint = over_bytes(&grammar);
        assert!(takes(&constraint, "{\n  \"a\": 1\n}"));
        for space in ["\t", "\n", " "] {
            let begun = format!("{{{}\"a\": 1}}", space.repeat(30));
            assert!(!takes(&constraint, &begun), "{space:?}");
        }
    }
}

#[test]
fn json_number_length_is_limited_in_any_grammar() {
    for (kind, begin) in [
        (r#"{"type": "number"}"#, "-0."),
        (r#"{"type": "number", "minimum": 0, "maximum": 1}"#, "0."),
        (r#"{"type": "number"}"#, "1e"),
        (r#"{"type": "number"}"#, "1"),
        ("{}", "0."),
    ] {
        let schema = format!(r#"{{"type": "array", "items": {kind}}}"#);
        let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
        let whole = Grammar::json_schema(&schema.to_string()).unwrap();
        let part =
            GrammarPart::Sequence(vec![GrammarPart::text("call: "), GrammarPart::Json(schema)]);
        for (grammar, before) in [(whole, ""), (Grammar::parts(part), "call: ")] {
            let mut constraint = over_bytes(&grammar);
            for character in format!("{before}[{begin}").bytes() {
                constraint.accept(byte(character)).unwrap();
            }
            let mut digits = 0;
            while constraint.allows(byte(b'3')).unwrap() {
                assert!(has(constraint.mask().unwrap(), byte(b'3')));
                constraint.accept(byte(b'3')).unwrap();
                digits += 1;
                assert!(digits < 100, "{kind} {begin}");
            }
            assert!(digits > 30, "{kind} {begin}: {digits}");
            assert!(!has(constraint.mask().unwrap(), byte(b'3')));
            constraint.rollback(1).unwrap();
            assert!(constraint.allows(byte(b'3')).unwrap());
            for character in "3, 1]".bytes() {
                constraint.accept(byte(character)).unwrap();
            }
            assert!(constraint.is_complete());
            constraint.reset().unwrap();
        }
    }
    // Digits in strings are not numbers.
    let strings = Grammar::json_schema(r#"{"type": "string"}"#).unwrap();
    assert!(takes(
        &over_bytes(&strings),
        &format!("\"{}\"", "3".repeat(200))
    ));
    // Nor are digits in a tool's free text, whose quotes are not JSON's.
    let part = GrammarPart::Sequence(vec![
        GrammarPart::Through("</p>".to_owned()),
        GrammarPart::Json(serde_json::json!({"type": "number"})),
    ]);
    let text = format!("5\" pipe {}</p>0.5", "3".repeat(200));
    assert!(takes(&over_bytes(&Grammar::parts(part)), &text));
    let grammar = Grammar::gbnf("root ::= [0-9]+").unwrap();
    assert!(takes(&over_bytes(&grammar), &"3".repeat(200)));
}

#[test]
fn end_is_allowed_only_for_complete_text() {
    let (mut constraint, _) = gbnf("root ::= \"ab\" \"c\"?", &["abc"]);
    assert!(!constraint.allows(END).unwrap());
    let message = constraint.clone().accept(END).unwrap_err().to_string();
    assert_eq!(
        message,
        "the text ends where the grammar does not let it end"
    );
    constraint.accept(byte(b'a')).unwrap();
    let message = constraint.accept(byte(b'x')).unwrap_err().to_string();
    assert_eq!(
        message,
        format!("the grammar does not allow token {} here", byte(b'x'))
    );
    constraint.accept(byte(b'b')).unwrap();
    assert!(constraint.is_complete() && !constraint.is_finished());
    assert_eq!(allowed(&mut constraint), [END, byte(b'c')]);
    let mut ended = constraint.clone();
    ended.accept(END).unwrap();
    assert!(ended.is_finished() && !ended.allows(byte(b'c')).unwrap());
    constraint.accept(byte(b'c')).unwrap();
    assert!(constraint.is_finished());
    assert_eq!(allowed(&mut constraint), [END]);
    assert!(constraint.allows(END).unwrap() && !constraint.allows(byte(b'c')).unwrap());
}

#[test]
fn grammars_reference_tokens_by_id_and_name() {
    let (mut constraint, _) = gbnf("root ::= <call> \"x\" !<[3]> <[4]>?", &["xy"]);
    assert_eq!(allowed(&mut constraint), [CALL]);
    constraint.accept(CALL).unwrap();
    assert!(!constraint.allows(CALL).unwrap());
    constraint.accept(byte(b'x')).unwrap();
    // Any token but that one, including one that is not text.
    assert!(!constraint.allows(CALL).unwrap());
    for token in [OTHER, 1, byte(b'z'), 261] {
        assert!(constraint.allows(token).unwrap(), "{token}");
        let mut copy = constraint.clone();
        copy.accept(token).unwrap();
        assert!(copy.is_complete());
        assert_eq!(allowed(&mut copy), [END, OTHER]);
    }
}

#[test]
fn control_tokens_do_not_match_text() {
    let (mut constraint, _) = gbnf("root ::= .*", &["a<call>b"]);
    for token in [0, 1, CALL, OTHER] {
        assert!(!constraint.allows(token).unwrap(), "{token}");
    }
    let all = allowed(&mut constraint);
    // All of ASCII, the first bytes of characters in UTF-8, the word, and the end.
    assert_eq!(all.len(), 128 + 0xF5 - 0xC2 + 1 + 1);
    assert!(!constraint.allows(100_000).unwrap());
}

#[test]
fn tokens_with_equal_text_are_interchangeable() {
    let (mut constraint, vocabulary) = gbnf("root ::= \"ab\" <[261]>", &["a", "b"]);
    let (a, b) = (261, 262);
    assert_eq!(vocabulary.tokenizer().find("a"), Some(a));
    assert_eq!(allowed(&mut constraint), [byte(b'a'), a]);
    constraint.accept(a).unwrap();
    assert_eq!(allowed(&mut constraint), [byte(b'b'), b]);
    constraint.accept(byte(b'b')).unwrap();
    // Here the token is named, not its text.
    assert!(!constraint.allows(byte(b'a')).unwrap());
    constraint.accept(a).unwrap();
    assert!(constraint.is_finished());
}

#[test]
fn rollback_restores_earlier_masks() {
    let (beginning, _) = gbnf("root ::= (\"a\" | <[3]>)+ \"b\" \"c\"", &["aa", "ab"]);
    let mut rng = Rng::new(4);
    for _ in 0..200 {
        let mut constraint = beginning.clone();
        let mut masks = Vec::new();
        while !constraint.is_finished() {
            masks.push(allowed(&mut constraint));
            let choices = &masks[masks.len() - 1];
            constraint
                .accept(choices[rng.below(choices.len())])
                .unwrap();
        }
        let back = 1 + rng.below(masks.len());
        constraint.rollback(back).unwrap();
        assert_eq!(constraint.accepted(), masks.len() - back);
        assert_eq!(allowed(&mut constraint), masks[masks.len() - back]);
        constraint.reset().unwrap();
        assert_eq!(allowed(&mut constraint), masks[0]);
        assert!(constraint.rollback(1).is_err());
        // A rejected token leaves the state unchanged.
        assert!(constraint.accept(byte(b'c')).is_err());
        assert_eq!(allowed(&mut constraint), masks[0]);
    }
}

#[test]
fn clones_are_independent() {
    let (mut constraint, _) = gbnf("root ::= \"a\" \"b\" | \"a\" \"c\"", &[]);
    constraint.accept(byte(b'a')).unwrap();
    let mut copy = constraint.clone();
    copy.accept(byte(b'b')).unwrap();
    assert_eq!(allowed(&mut constraint), [byte(b'b'), byte(b'c')]);
    constraint.accept(byte(b'c')).unwrap();
    assert!(copy.is_finished() && constraint.is_finished());
}

#[test]
fn regular_expressions_match_the_whole_text() {
    for (expression, good, bad) in [
        (
            "[0-9]{3}-?[a-f]+",
            vec!["123-a", "000ff"],
            vec!["12-a", "123-", "123-ag"],
        ),
        ("^a|b$", vec!["a", "b"], vec!["ab", ""]),
        ("\\$|x\\$", vec!["$", "x$"], vec!["x"]),
        ("a\\\\$", vec!["a\\"], vec!["a", "a\\$"]),
        ("(?i)yes|no", vec!["YES", "nO"], vec!["y"]),
        ("[^a]*é", vec!["é", "bé"], vec!["aé"]),
        ("a/b", vec!["a/b"], vec!["a"]),
    ] {
        let constraint = over_bytes(&Grammar::regex(expression).unwrap());
        for text in good {
            assert!(takes(&constraint, text), "{expression} refuses {text}");
        }
        for text in bad {
            assert!(!takes(&constraint, text), "{expression} takes {text}");
        }
    }
}

#[test]
fn a_sampler_obeys_the_constraint() {
    let (constraint, vocabulary) = gbnf("root ::= [a-c]{5} | \"x\"+", &["ab", "bc"]);
    let count = vocabulary.tokenizer().vocab_size();
    for seed in 0..50 {
        let params = SamplerParams {
            seed,
            temperature: 1.5,
            ..SamplerParams::default()
        };
        let mut sampler = Sampler::new(params).unwrap();
        sampler.set_constraint(Some(Box::new(constraint.clone())));
        let mut rng = Rng::new(seed);
        let mut texts = Vec::new();
        for _ in 0..2 {
            let mut text = Vec::new();
            while !sampler.is_finished() && text.len() < 100 {
                let logits: Vec<f32> = (0..count).map(|_| rng.uniform() as f32 * 8.0).collect();
                let token = sampler.sample(&logits).unwrap();
                sampler.accept(token).unwrap();
                text.extend(vocabulary.tokenizer().token_to_piece(token, false).unwrap());
            }
            texts.push(String::from_utf8(text).unwrap());
            sampler.reset().unwrap();
        }
        for text in texts {
            let letters = text.len() == 5 && text.bytes().all(|c| (b'a'..=b'c').contains(&c));
            assert!(letters || text.bytes().all(|c| c == b'x'), "{text}");
        }
    }
    // If no allowed token has a logit, sampling fails.
    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    sampler.set_constraint(Some(Box::new(constraint)));
    let message = sampler.sample(&[1.0, 2.0, 3.0]).unwrap_err().to_string();
    assert!(message.contains("the grammar allows none"), "{message}");
}

#[test]
fn integers_are_limited_in_length_and_not_rounded() {
    let integer = |kind: &str| serde_json::from_str::<serde_json::Value>(kind).unwrap();
    for schema in [
        r#"{"type": "integer"}"#,
        r#"{"type": ["integer", "null"], "minimum": 0}"#,
    ] {
        let whole = Grammar::json_schema(schema).unwrap();
        for grammar in [whole, Grammar::parts(GrammarPart::Json(integer(schema)))] {
            let constraint = over_bytes(&grammar);
            assert!(takes(&constraint, "1180000000000000123"), "{schema}");
            assert!(!takes(&constraint, &"1".repeat(20)), "{schema}");
        }
    }
    for schema in [
        r#"{"const": 9007199254740993}"#,
        r#"{"enum": [1, -9007199254740993]}"#,
        r#"{"type": "number", "maximum": 18446744073709551615}"#,
    ] {
        let error = Grammar::json_schema(schema).unwrap_err().to_string();
        assert!(error.contains("would be rounded"), "{error}");
    }
    // Bounds beyond 64-bit integers are clamped, and annotations are ignored.
    for schema in [
        r#"{"type": "integer", "maximum": 9223372036854775807}"#,
        r#"{"type": "integer", "default": 9223372036854775807}"#,
        r#"{"properties": {"default": {"type": "integer"}}, "required": ["default"]}"#,
    ] {
        let grammar = Grammar::json_schema(schema).unwrap();
        let constraint = over_bytes(&grammar);
        let written = |digits: &str| {
            if schema.contains("properties") {
                format!("{{\"default\": {digits}}}")
            } else {
                digits.to_owned()
            }
        };
        assert!(
            takes(&constraint, &written("8999999999999999999")),
            "{schema}"
        );
        assert!(
            !takes(&constraint, &written("99999999999999999999")),
            "{schema}"
        );
    }
    let exact = r#"{"const": 9007199254740992}"#;
    assert!(takes(
        &over_bytes(&Grammar::json_schema(exact).unwrap()),
        "9007199254740992"
    ));
}
