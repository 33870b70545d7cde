//! Invalid grammars and their error messages.

use crate::common::{checked, tokenizer};
use samite_grammar::{Grammar, GrammarVocabulary};
use samite_text::Constraint;

#[test]
fn grammar_errors_name_line_and_column() {
    let cases = [
        (
            "",
            "line 1, column 1: there is no rule 'root', with which a text begins",
        ),
        (
            "# nothing but a comment",
            "line 1, column 24: there is no rule 'root', with which a text begins",
        ),
        (
            "foo ::= \"a\"",
            "line 1, column 12: there is no rule 'root', with which a text begins",
        ),
        (
            "root",
            "line 1, column 5, in rule 'root': the grammar's end where '::=' was expected behind the name",
        ),
        (
            "root ::",
            "line 1, column 6, in rule 'root': ':' where '::=' was expected behind the name",
        ),
        (
            "root := \"a\"",
            "line 1, column 6, in rule 'root': ':' where '::=' was expected behind the name",
        ),
        (
            "root = \"a\"",
            "line 1, column 6, in rule 'root': '=' where '::=' was expected behind the name",
        ),
        (
            "::= \"a\"",
            "line 1, column 1: ':' where a rule's name was expected",
        ),
        (
            "_root ::= \"a\"",
            "line 1, column 1: '_' where a rule's name was expected",
        ),
        (
            "root ::= \"a",
            "line 1, column 10, in rule 'root': the text in quotes has no end",
        ),
        (
            "root ::= \"a\\\"",
            "line 1, column 10, in rule 'root': the text in quotes has no end",
        ),
        (
            "root ::= \"a\\",
            "line 1, column 12, in rule 'root': the grammar ends behind '\\'",
        ),
        (
            "root ::= \"\\q\"",
            "line 1, column 11, in rule 'root': '\\q' is no escape; there are \\n \\r \\t \\\\ \\\" \\[ \\] \\- \\xHH \\uHHHH \\UHHHHHHHH",
        ),
        (
            "root ::= \"\\x4\"",
            "line 1, column 11, in rule 'root': the escape needs 2 hexadecimal digits",
        ),
        (
            "root ::= \"\\u12g4\"",
            "line 1, column 11, in rule 'root': the escape needs 4 hexadecimal digits",
        ),
        (
            "root ::= \"\\uD800\"",
            "line 1, column 11, in rule 'root': U+D800 is no character",
        ),
        (
            "root ::= \"\\U00110000\"",
            "line 1, column 11, in rule 'root': U+110000 is no character",
        ),
        (
            "root ::= \"\\U0011\"",
            "line 1, column 11, in rule 'root': the escape needs 8 hexadecimal digits",
        ),
        (
            "root ::= [a",
            "line 1, column 10, in rule 'root': the characters in brackets have no end",
        ),
        (
            "root ::= [a-",
            "line 1, column 10, in rule 'root': the characters in brackets have no end",
        ),
        (
            "root ::= []",
            "line 1, column 10, in rule 'root': no character is in these brackets",
        ),
        (
            "root ::= [z-a]",
            "line 1, column 11, in rule 'root': the range from 'z' to 'a' is upside down",
        ),
        (
            "root ::= [\\]",
            "line 1, column 10, in rule 'root': the characters in brackets have no end",
        ),
        (
            "root ::= [^\\x00-\\U0010FFFF]",
            "line 1, column 10, in rule 'root': no character is in these brackets",
        ),
        (
            "root ::= [\\d]",
            "line 1, column 11, in rule 'root': '\\d' is no escape; there are \\n \\r \\t \\\\ \\\" \\[ \\] \\- \\xHH \\uHHHH \\UHHHHHHHH",
        ),
        (
            "root ::= (\"a\"",
            "line 1, column 14, in rule 'root': the grammar's end where ')' was expected, for the '(' at line 1, column 10",
        ),
        (
            "root ::= (\"a\" | \"b\"\nfoo ::= \"c\"",
            "line 2, column 5, in rule 'root': '::=' in the middle of a rule: a rule ends with its line, unless '|' or '(' is open",
        ),
        (
            "root ::= \"a\")",
            "line 1, column 13, in rule 'root': ')' without '('",
        ),
        (
            "root ::= ((\"a\")",
            "line 1, column 16, in rule 'root': the grammar's end where ')' was expected, for the '(' at line 1, column 10",
        ),
        (
            "root ::= *",
            "line 1, column 10, in rule 'root': '*' with nothing before it",
        ),
        (
            "root ::= \"a\" | +",
            "line 1, column 16, in rule 'root': '+' with nothing before it",
        ),
        (
            "root ::= ?\"a\"",
            "line 1, column 10, in rule 'root': '?' with nothing before it",
        ),
        (
            "root ::= {3}",
            "line 1, column 10, in rule 'root': '{' with nothing before it",
        ),
        (
            "root ::= \"a\"{",
            "line 1, column 14, in rule 'root': the grammar's end where a number of repeats was expected",
        ),
        (
            "root ::= \"a\"{x}",
            "line 1, column 14, in rule 'root': 'x' where a number of repeats was expected",
        ),
        (
            "root ::= \"a\"{1,2",
            "line 1, column 17, in rule 'root': the grammar's end where '}' was expected behind the number of repeats",
        ),
        (
            "root ::= \"a\"{1;2}",
            "line 1, column 15, in rule 'root': ';' where '}' was expected behind the number of repeats",
        ),
        (
            "root ::= \"a\"{,3}",
            "line 1, column 14, in rule 'root': ',' where a number of repeats was expected",
        ),
        (
            "root ::= \"a\"{3,2}",
            "line 1, column 13, in rule 'root': at least 3 repeats, but at most 2",
        ),
        (
            "root ::= \"a\"{2001}",
            "line 1, column 14, in rule 'root': 2001 repeats; at most 2000 are possible",
        ),
        (
            "root ::= \"a\"{0,99999999999999999999}",
            "line 1, column 16, in rule 'root': 99999999999999999999 repeats; at most 2000 are possible",
        ),
        (
            "root ::= \"a\"{5000,}",
            "line 1, column 14, in rule 'root': 5000 repeats; at most 2000 are possible",
        ),
        (
            "root ::= (\"a\"{2000}){2000}",
            "line 1, column 21, in rule 'root': with all repeats, there are more than 500000 symbols",
        ),
        (
            "root ::= a",
            "line 1, column 10, in rule 'root': there is no rule 'a'",
        ),
        (
            "root ::= \"x\" a\nb ::= c\nc ::= \"y\"",
            "line 1, column 14, in rule 'root': there is no rule 'a'",
        ),
        (
            "root ::= \"a\"\nroot ::= \"b\"",
            "line 2, column 1, in rule 'root': the rule is there already",
        ),
        (
            "root ::= root",
            "line 1, column 10, in rule 'root': left recursion: root begins with root; repeat with '*' or '+', or put something before",
        ),
        (
            "root ::= root \"a\" | \"b\"",
            "line 1, column 10, in rule 'root': left recursion: root begins with root; repeat with '*' or '+', or put something before",
        ),
        (
            "root ::= \"a\"? root",
            "line 1, column 15, in rule 'root': left recursion: root begins with root; repeat with '*' or '+', or put something before",
        ),
        (
            "root ::= a\na ::= b \"x\"\nb ::= (\"y\"* c)+\nc ::= a | \"z\"",
            "line 4, column 7, in rule 'c': left recursion: a begins with b begins with c begins with a; repeat with '*' or '+', or put something before",
        ),
        (
            "root ::= \"a\" root",
            "line 1, column 10, in rule 'root': no text can end here: each alternative needs the rule again",
        ),
        (
            "root ::= \"a\" b\nb ::= \"c\" b \"d\"",
            "line 2, column 7, in rule 'b': no text can end here: each alternative needs the rule again",
        ),
        (
            "root ::= \"a\" \"b\" foo ::= \"c\"",
            "line 1, column 22, in rule 'root': '::=' in the middle of a rule: a rule ends with its line, unless '|' or '(' is open",
        ),
        (
            "root ::= <12>x ::=",
            "line 1, column 16, in rule 'root': '::=' in the middle of a rule: a rule ends with its line, unless '|' or '(' is open",
        ),
        (
            "root ::= <[12>",
            "line 1, column 10, in rule 'root': '<[12>' is no token: write <[12]> for number 12",
        ),
        (
            "root ::= <[x]>",
            "line 1, column 10, in rule 'root': '<[x]>' is no token: write <[12]> for number 12",
        ),
        (
            "root ::= <[]>",
            "line 1, column 10, in rule 'root': '<[]>' is no token: write <[12]> for number 12",
        ),
        (
            "root ::= <>",
            "line 1, column 10, in rule 'root': the token has no name",
        ),
        (
            "root ::= <abc",
            "line 1, column 10, in rule 'root': the token has no '>' on its line",
        ),
        (
            "root ::= !\"a\"",
            "line 1, column 11, in rule 'root': '\"' where a token was expected behind '!', such \
             as <[12]>",
        ),
        (
            "root ::= !",
            "line 1, column 11, in rule 'root': the grammar's end where a token was expected behind '!', such as <[12]>",
        ),
        (
            "root ::= <[99999999999]>",
            "line 1, column 10, in rule 'root': '<[99999999999]>' is no token: write <[12]> for number 12",
        ),
        (
            "root ::= \"a\" $",
            "line 1, column 14, in rule 'root': '$' where the rule's end was expected",
        ),
        (
            "root ::= \"a\" ; comment",
            "line 1, column 14, in rule 'root': ';' where the rule's end was expected",
        ),
        (
            "root ::= 'a'",
            "line 1, column 10, in rule 'root': ''' where the rule's end was expected",
        ),
        (
            "root ::= \"a\" / \"b\"",
            "line 1, column 14, in rule 'root': '/' where the rule's end was expected",
        ),
        (
            "root ::= /a+/",
            "line 1, column 10, in rule 'root': '/' where the rule's end was expected",
        ),
        (
            "root ::= a_b\na ::= \"x\"",
            "line 1, column 11, in rule 'root': '_' where the rule's end was expected",
        ),
        (
            "root ::= \"a\"\n    | \"b\"",
            "line 2, column 5: '|' where a rule's name was expected",
        ),
        (
            "root ::= \"ä\" \"é\" ß",
            "line 1, column 18, in rule 'root': 'ß' where the rule's end was expected",
        ),
    ];
    for (text, expected) in cases {
        let message = checked(Grammar::gbnf(text)).unwrap_err().to_string();
        assert_eq!(message, expected, "{text}");
    }
}

#[test]
fn oversized_and_deeply_nested_grammars_are_refused() {
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(60), ")".repeat(60));
    let many: String = (0..3000).map(|n| format!("r{n} ::= \"a\"\n")).collect();
    for (text, part) in [
        (deep, "more than 50 groups in each other"),
        (many, "more than 2000 rules"),
        (" ".repeat(2 << 20), "1048576 are allowed"),
    ] {
        let message = checked(Grammar::gbnf(&text)).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    let chain = |length: usize| {
        let rules = (0..length).map(|n| format!("r{n} ::= r{} | \"{n}\"\n", n + 1));
        let rules: String = rules.collect();
        format!("root ::= r0\n{rules}r{length} ::= \"end\" root?")
    };
    let message = checked(Grammar::gbnf(&chain(1900)))
        .unwrap_err()
        .to_string();
    let expected = "rules and groups are more than 300 deep in each other";
    assert!(message.contains(expected), "{message}");
    assert!(checked(Grammar::gbnf(&chain(140))).is_ok());
    // Nested repeats take no longer than their text.
    let doubled = (0..40).map(|n| format!("r{n} ::= r{} r{}\n", n + 1, n + 1));
    let doubled: String = doubled.collect();
    let doubled = format!("root ::= r0\n{doubled}r40 ::= \"a\" | \"b\"");
    let nested = "root ::= ((([a-z]{0,20}){0,20}){0,20} [0-9]){0,20}".to_owned();
    for text in [doubled, nested] {
        let (sender, ended) = std::sync::mpsc::channel();
        let grammar = text.clone();
        std::thread::spawn(move || {
            drop(checked(Grammar::gbnf(&grammar)));
            sender.send(())
        });
        // Expanding every repetition separately would take centuries.
        let ended = ended.recv_timeout(samite_testing::HANG_GUARD);
        assert!(ended.is_ok(), "{text:.60}");
    }
}

#[test]
fn choices_of_many_words_are_enforced() {
    // More than are compared with each other, alone and with a suffix.
    let words: Vec<String> = (0..1500).map(|n| format!("\"word{n}\"")).collect();
    for end in ["", " \".\""] {
        let grammar = Grammar::gbnf(&format!("root ::= ({}){end}", words.join(" | "))).unwrap();
        let vocabulary = GrammarVocabulary::new(&tokenizer(&["word"])).unwrap();
        let mut constraint = grammar.constraint(&vocabulary).unwrap();
        assert!(!constraint.is_complete());
        let text = if end.is_empty() {
            "word1499"
        } else {
            "word1499."
        };
        for token in vocabulary.tokenizer().tokenize(text, false, false).unwrap() {
            constraint.accept(token).unwrap();
        }
        assert!(constraint.is_complete());
    }
}

#[test]
fn unknown_tokens_are_errors() {
    let vocabulary = GrammarVocabulary::new(&tokenizer(&["ab"])).unwrap();
    for (text, expected) in [
        (
            "root ::= \"a\" x\nx ::= <[400]>",
            "line 2, column 7, in rule 'x': there is no token 400: the vocabulary has 262",
        ),
        (
            "root ::= !<none>",
            "line 1, column 10, in rule 'root': '<none>' is 6 tokens of the vocabulary",
        ),
    ] {
        let error = Grammar::gbnf(text)
            .unwrap()
            .constraint(&vocabulary)
            .unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    assert!(
        Grammar::gbnf("root ::= <call> <[261]>")
            .unwrap()
            .constraint(&vocabulary)
            .is_ok()
    );
}

#[test]
fn invalid_regular_expressions_are_errors() {
    for text in ["(", "a{2,1}", "(?=a)b", "(a)\\1", "[z-a]", "\\"] {
        let message = checked(Grammar::regex(text)).unwrap_err().to_string();
        assert!(message.starts_with("the regular expression: "), "{message}");
    }
    let message = Grammar::regex(&"a".repeat(100_000))
        .unwrap_err()
        .to_string();
    assert!(message.contains("65536 are allowed"), "{message}");
}
