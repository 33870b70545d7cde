//! Independent reference: a second GBNF parser and Earley's algorithm over single characters. Slow,
//! and shares no code with the crate.

use samite_text::Rng;
use std::collections::{BTreeMap, BTreeSet};

/// A grammar as plain productions.
pub struct Judge {
    /// Productions of each rule.
    rules: Vec<Vec<Vec<Symbol>>>,
    /// Height of the shortest derivation tree.
    heights: Vec<usize>,
    nullable: Vec<bool>,
}

#[derive(Clone, Debug)]
enum Symbol {
    Set(Vec<(char, char)>, bool),
    Rule(usize),
}

fn matches(set: &[(char, char)], is_negated: bool, c: char) -> bool {
    set.iter()
        .any(|(first, last)| (*first..=*last).contains(&c))
        != is_negated
}

struct Reader {
    text: Vec<char>,
    at: usize,
    names: BTreeMap<String, usize>,
    rules: Vec<Vec<Vec<Symbol>>>,
}

impl Reader {
    fn peek(&self) -> char {
        self.text.get(self.at).copied().unwrap_or('\0')
    }

    fn space(&mut self, lines: bool) {
        loop {
            match self.peek() {
                ' ' | '\t' => self.at += 1,
                '\n' if lines => self.at += 1,
                '#' => {
                    while self.peek() != '\n' && self.at < self.text.len() {
                        self.at += 1;
                    }
                }
                _ => return,
            }
        }
    }

    fn name(&mut self) -> String {
        let start = self.at;
        while self.peek().is_ascii_alphanumeric() || self.peek() == '-' {
            self.at += 1;
        }
        self.text[start..self.at].iter().collect()
    }

    fn fresh(&mut self, derives: Vec<Vec<Symbol>>) -> usize {
        self.rules.push(derives);
        self.rules.len() - 1
    }

    fn rule_of(&mut self, name: String) -> usize {
        if let Some(number) = self.names.get(&name) {
            return *number;
        }
        let number = self.fresh(vec![]);
        self.names.insert(name, number);
        number
    }

    fn character(&mut self) -> char {
        let c = self.peek();
        self.at += 1;
        if c != '\\' {
            return c;
        }
        let c = self.peek();
        self.at += 1;
        let digits = match c {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            'n' => return '\n',
            't' => return '\t',
            'r' => return '\r',
            c => return c,
        };
        let hex: String = self.text[self.at..self.at + digits].iter().collect();
        self.at += digits;
        char::from_u32(u32::from_str_radix(&hex, 16).unwrap()).unwrap()
    }

    fn alternatives(&mut self, nested: bool) -> Vec<Vec<Symbol>> {
        let mut all = vec![self.sequence(nested)];
        while self.peek() == '|' {
            self.at += 1;
            self.space(true);
            all.push(self.sequence(nested));
        }
        all
    }

    fn sequence(&mut self, nested: bool) -> Vec<Symbol> {
        let mut items: Vec<Vec<Symbol>> = Vec::new();
        loop {
            match self.peek() {
                '"' => {
                    self.at += 1;
                    let mut literal = Vec::new();
                    while self.peek() != '"' {
                        let c = self.character();
                        literal.push(Symbol::Set(vec![(c, c)], false));
                    }
                    self.at += 1;
                    items.push(literal);
                }
                '[' => {
                    self.at += 1;
                    let is_negated = self.peek() == '^';
                    self.at += usize::from(is_negated);
                    let mut set = Vec::new();
                    while self.peek() != ']' {
                        let first = self.character();
                        let mut last = first;
                        if self.peek() == '-' && self.text[self.at + 1] != ']' {
                            self.at += 1;
                            last = self.character();
                        }
                        set.push((first, last));
                    }
                    self.at += 1;
                    items.push(vec![Symbol::Set(set, is_negated)]);
                }
                '.' => {
                    self.at += 1;
                    items.push(vec![Symbol::Set(vec![], true)]);
                }
                '(' => {
                    self.at += 1;
                    self.space(true);
                    let inner = self.alternatives(true);
                    assert_eq!(self.peek(), ')');
                    self.at += 1;
                    let rule = self.fresh(inner);
                    items.push(vec![Symbol::Rule(rule)]);
                }
                '*' | '+' | '?' | '{' => {
                    let item = items.pop().unwrap();
                    let (least, most) = self.repeats();
                    items.push(self.repeated(item, least, most));
                }
                c if c.is_ascii_alphanumeric() => {
                    let name = self.name();
                    let rule = self.rule_of(name);
                    items.push(vec![Symbol::Rule(rule)]);
                }
                _ => return items.concat(),
            }
            self.space(nested);
        }
    }

    fn repeats(&mut self) -> (usize, Option<usize>) {
        let c = self.peek();
        self.at += 1;
        match c {
            '*' => (0, None),
            '+' => (1, None),
            '?' => (0, Some(1)),
            _ => {
                let start = self.at;
                while self.peek() != '}' {
                    self.at += 1;
                }
                let inside: String = self.text[start..self.at].iter().collect();
                self.at += 1;
                match inside.split_once(',') {
                    None => (inside.parse().unwrap(), Some(inside.parse().unwrap())),
                    Some((least, most)) => (least.parse().unwrap(), most.parse().ok()),
                }
            }
        }
    }

    fn repeated(&mut self, item: Vec<Symbol>, least: usize, most: Option<usize>) -> Vec<Symbol> {
        let mut all = vec![item.clone(); least].concat();
        match most {
            None => {
                let rule = self.fresh(vec![]);
                let again = [item, vec![Symbol::Rule(rule)]].concat();
                self.rules[rule] = vec![vec![], again];
                all.push(Symbol::Rule(rule));
            }
            Some(most) => {
                let mut rest = vec![];
                for _ in least..most {
                    let rule = self.fresh(vec![vec![], [item.clone(), rest].concat()]);
                    rest = vec![Symbol::Rule(rule)];
                }
                all.extend(rest);
            }
        }
        all
    }
}

/// Earley item: rule, alternative, position in it, and origin.
type Item = (usize, usize, usize, usize);

impl Judge {
    pub fn new(text: &str) -> Self {
        let mut reader = Reader {
            text: text.chars().collect(),
            at: 0,
            names: BTreeMap::new(),
            rules: vec![],
        };
        reader.rule_of("root".to_owned());
        reader.space(true);
        while reader.at < reader.text.len() {
            let name = reader.name();
            let number = reader.rule_of(name);
            reader.space(false);
            assert_eq!(reader.text[reader.at..reader.at + 3], [':', ':', '=']);
            reader.at += 3;
            reader.space(true);
            reader.rules[number] = reader.alternatives(false);
            reader.space(true);
        }
        let rules = reader.rules;
        let mut heights = vec![usize::MAX; rules.len()];
        let mut nullable = vec![false; rules.len()];
        for _ in 0..rules.len() {
            for (number, rule) in rules.iter().enumerate() {
                for derived in rule {
                    let deepest = derived.iter().map(|symbol| match symbol {
                        Symbol::Set(..) => 0,
                        Symbol::Rule(rule) => heights[*rule],
                    });
                    let height = deepest.max().unwrap_or(0).saturating_add(1);
                    heights[number] = heights[number].min(height);
                    nullable[number] |= derived
                        .iter()
                        .all(|symbol| matches!(symbol, Symbol::Rule(rule) if nullable[*rule]));
                }
            }
        }
        Judge {
            rules,
            heights,
            nullable,
        }
    }

    /// Returns the chart before the first character.
    pub fn start(&self) -> Chart<'_> {
        let mut chart = Chart {
            judge: self,
            sets: vec![],
        };
        let first = (0..self.rules[0].len())
            .map(|option| (0, option, 0, 0))
            .collect();
        chart.complete(first);
        chart
    }

    /// Derives a random text of about `size` characters.
    pub fn derive(&self, size: usize, rng: &mut Rng) -> String {
        let mut text = String::new();
        let mut stack = vec![Symbol::Rule(0)];
        while let Some(symbol) = stack.pop() {
            match symbol {
                Symbol::Set(set, is_negated) => loop {
                    let c = match (is_negated, rng.below(8)) {
                        (false, _) => {
                            let (first, last) = set[rng.below(set.len())];
                            char::from_u32(
                                u32::from(first)
                                    + rng.below(1 + last as usize - first as usize) as u32,
                            )
                        }
                        (true, 0) => char::from_u32(rng.below(0x3000) as u32),
                        (true, _) => char::from_u32(0x20 + rng.below(0x60) as u32),
                    };
                    if let Some(c) = c
                        && matches(&set, is_negated, c)
                    {
                        text.push(c);
                        break;
                    }
                },
                Symbol::Rule(rule) => {
                    let height = |derived: &[Symbol]| {
                        let heights = derived.iter().map(|symbol| match symbol {
                            Symbol::Set(..) => 0,
                            Symbol::Rule(rule) => self.heights[*rule],
                        });
                        heights.max().unwrap_or(0)
                    };
                    let options = &self.rules[rule];
                    let derived = if text.chars().count() + stack.len() > size {
                        options
                            .iter()
                            .min_by_key(|derived| height(derived))
                            .unwrap()
                    } else {
                        &options[rng.below(options.len())]
                    };
                    stack.extend(derived.iter().rev().cloned());
                }
            }
        }
        text
    }
}

/// State of a partial text.
#[derive(Clone)]
pub struct Chart<'j> {
    judge: &'j Judge,
    sets: Vec<BTreeSet<Item>>,
}

impl Chart<'_> {
    fn complete(&mut self, mut set: BTreeSet<Item>) {
        let here = self.sets.len();
        let mut todo: Vec<Item> = set.iter().copied().collect();
        while let Some((rule, option, place, began)) = todo.pop() {
            let add = |item: Item, todo: &mut Vec<Item>, set: &mut BTreeSet<Item>| {
                if set.insert(item) {
                    todo.push(item);
                }
            };
            match self.judge.rules[rule][option].get(place) {
                Some(Symbol::Set(..)) => {}
                Some(Symbol::Rule(next)) => {
                    for option in 0..self.judge.rules[*next].len() {
                        add((*next, option, 0, here), &mut todo, &mut set);
                    }
                    if self.judge.nullable[*next] {
                        add((rule, option, place + 1, began), &mut todo, &mut set);
                    }
                }
                None => {
                    let waiting = if began == here {
                        set.clone()
                    } else {
                        self.sets[began].clone()
                    };
                    for (outer, option, place, outer_began) in waiting {
                        let is_next = matches!(
                            self.judge.rules[outer][option].get(place),
                            Some(Symbol::Rule(next)) if *next == rule
                        );
                        if is_next {
                            add((outer, option, place + 1, outer_began), &mut todo, &mut set);
                        }
                    }
                }
            }
        }
        self.sets.push(set);
    }

    /// Advances by a character; returns whether any continuation exists.
    pub fn push(&mut self, c: char) -> bool {
        let last = self.sets.last().unwrap();
        let next: BTreeSet<Item> = last
            .iter()
            .filter_map(|&(rule, option, place, began)| {
                match self.judge.rules[rule][option].get(place) {
                    Some(Symbol::Set(set, is_negated)) if matches(set, *is_negated, c) => {
                        Some((rule, option, place + 1, began))
                    }
                    _ => None,
                }
            })
            .collect();
        let is_alive = !next.is_empty();
        self.complete(next);
        is_alive
    }

    /// Removes the last `count` characters.
    pub fn pop(&mut self, count: usize) {
        self.sets.truncate(self.sets.len() - count);
    }

    /// Returns whether the text may end.
    pub fn is_complete(&self) -> bool {
        let last = self.sets.last().unwrap();
        last.iter().any(|&(rule, option, place, began)| {
            rule == 0 && began == 0 && place == self.judge.rules[0][option].len()
        })
    }

    /// Returns whether these bytes can follow as a whole; the last character may be incomplete.
    pub fn allows(&mut self, bytes: &[u8]) -> bool {
        let mut pushed = 0;
        let mut is_alive = true;
        let (valid, rest) = match std::str::from_utf8(bytes) {
            Ok(text) => (text, &[][..]),
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                (std::str::from_utf8(valid).unwrap(), rest)
            }
        };
        for c in valid.chars() {
            pushed += 1;
            is_alive = self.push(c);
            if !is_alive {
                break;
            }
        }
        let allowed = is_alive && (rest.is_empty() || self.allows_begun(rest));
        self.pop(pushed);
        allowed
    }

    /// Returns whether a character that begins with these bytes can follow.
    fn allows_begun(&self, begun: &[u8]) -> bool {
        let (length, bits) = match begun[0] {
            0xC2..=0xDF => (2, 0x1F),
            0xE0..=0xEF => (3, 0x0F),
            0xF0..=0xF4 => (4, 0x07),
            _ => return false,
        };
        if begun.len() >= length || begun[1..].iter().any(|byte| byte & 0xC0 != 0x80) {
            return false;
        }
        let begins = |value: u32, byte: &u8| value << 6 | u32::from(byte & 0x3F);
        let value = begun[1..].iter().fold(u32::from(begun[0] & bits), begins);
        let missing = 6 * (length - begun.len());
        let least = [0x80, 0x800, 0x10000][length - 2];
        let range = (value << missing).max(least)..(value + 1) << missing;
        let last = self.sets.last().unwrap();
        let sets: Vec<_> = last
            .iter()
            .filter_map(|&(rule, option, place, _)| {
                match self.judge.rules[rule][option].get(place) {
                    Some(Symbol::Set(set, is_negated)) => Some((set, *is_negated)),
                    _ => None,
                }
            })
            .collect();
        let is_near = |set: &[(char, char)], is_negated: bool| {
            let meets = |(first, last): &(char, char)| {
                range.start <= u32::from(*last) && u32::from(*first) < range.end
            };
            is_negated || set.iter().any(meets)
        };
        sets.into_iter()
            .filter(|(set, is_negated)| is_near(set, *is_negated))
            .any(|(set, is_negated)| {
                let mut characters = range.clone().filter_map(char::from_u32);
                characters.any(|c| matches(set, is_negated, c))
            })
    }
}

#[test]
fn the_judge_is_correct_for_small_grammars() {
    let judge =
        Judge::new("root ::= \"a\" root \"b\" | x{1,2} # nested\nx ::= [0-9^-]+ | \"\\u0063\"");
    for (text, expected) in [
        ("a1b", true),
        ("aacbb", true),
        ("ab", false),
        ("a1", false),
        ("12-c", true),
        ("ccc", false),
    ] {
        let mut chart = judge.start();
        let alive = text.chars().all(|c| chart.push(c));
        assert_eq!(alive && chart.is_complete(), expected, "{text}");
    }
    let mut chart = judge.start();
    assert!(chart.allows(b"aa") && !chart.allows(b"b") && !chart.allows(&[0xC3]));
}
