//! Parses expressions to trees.

use std::iter::Peekable;
use std::str::Chars;

use super::set::CharSet;

/// Maximum nesting of groups.
const DEEPEST: usize = 32;

/// Maximum count of a repetition.
const MOST: u32 = 1024;

#[derive(Debug)]
pub(super) enum Tree {
    Set(CharSet),
    /// Lookahead: the next character must be in the set, or the text must end if `or_end` allows
    /// that.
    Next {
        set: CharSet,
        or_end: bool,
    },
    All(Vec<Tree>),
    /// Alternatives; the first that leads to a match applies.
    Any(Vec<Tree>),
    /// Greedy repetition.
    Repeat {
        tree: Box<Tree>,
        least: u32,
        most: Option<u32>,
    },
}

/// Parses an expression. The error describes the problem.
pub(super) fn parse(expression: &str) -> Result<Tree, String> {
    let mut parser = Parser {
        rest: expression.chars().peekable(),
        ignore_case: false,
        depth: 0,
    };
    let tree = parser.alternatives()?;
    match parser.rest.next() {
        None => Ok(tree),
        Some(c) => Err(format!("'{c}' is not expected")),
    }
}

struct Parser<'a> {
    rest: Peekable<Chars<'a>>,
    ignore_case: bool,
    depth: usize,
}

impl Parser<'_> {
    fn take(&mut self, c: char) -> bool {
        self.rest.next_if_eq(&c).is_some()
    }

    fn expect(&mut self, c: char) -> Result<(), String> {
        if self.take(c) {
            Ok(())
        } else {
            Err(format!("'{c}' is missing"))
        }
    }

    fn alternatives(&mut self) -> Result<Tree, String> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err(format!("groups are nested deeper than {DEEPEST}"));
        }
        let mut all = vec![self.sequence()?];
        while self.take('|') {
            all.push(self.sequence()?);
        }
        self.depth -= 1;
        Ok(match all.pop() {
            Some(only) if all.is_empty() => only,
            last => Tree::Any(all.into_iter().chain(last).collect()),
        })
    }

    fn sequence(&mut self) -> Result<Tree, String> {
        let mut all = Vec::new();
        while let Some(&c) = self.rest.peek() {
            if matches!(c, '|' | ')') {
                break;
            }
            let tree = self.item()?;
            all.push(self.repeated(tree)?);
        }
        Ok(Tree::All(all))
    }

    fn repeated(&mut self, tree: Tree) -> Result<Tree, String> {
        let (least, most) = match self.rest.peek() {
            Some('?') => (0, Some(1)),
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('{') => {
                self.rest.next();
                let least = self.number()?;
                let most = if self.take(',') {
                    self.number()?
                } else {
                    least
                };
                if most < least || most > MOST || self.rest.peek() != Some(&'}') {
                    return Err(format!("a count must be {{n}} or {{n,m}}, at most {MOST}"));
                }
                (least, Some(most))
            }
            _ => return Ok(tree),
        };
        self.rest.next();
        if matches!(self.rest.peek(), Some('?' | '*' | '+' | '{')) {
            return Err("a repetition of a repetition".to_owned());
        }
        Ok(Tree::Repeat {
            tree: Box::new(tree),
            least,
            most,
        })
    }

    fn number(&mut self) -> Result<u32, String> {
        let mut digits = String::new();
        while let Some(digit) = self.rest.next_if(char::is_ascii_digit) {
            digits.push(digit);
        }
        digits.parse().map_err(|_| "a count is missing".to_owned())
    }

    fn item(&mut self) -> Result<Tree, String> {
        match self.rest.next() {
            Some('(') => self.group(),
            Some('[') => self.class().map(Tree::Set),
            Some('\\') => self.escape().map(Tree::Set),
            Some('$') => Ok(Tree::Next {
                set: CharSet::default(),
                or_end: true,
            }),
            Some(c @ ('?' | '*' | '+' | '{' | ')' | '.' | '^')) => {
                Err(format!("'{c}' is not expected"))
            }
            Some(c) => Ok(Tree::Set(self.letter(c))),
            None => Err("something is missing at the end".to_owned()),
        }
    }

    fn group(&mut self) -> Result<Tree, String> {
        let mut ignore_case = self.ignore_case;
        if self.take('?') {
            match self.rest.next() {
                Some(':') => {}
                Some('i') => {
                    self.expect(':')?;
                    ignore_case = true;
                }
                Some(c @ ('=' | '!')) => return self.look_ahead(c == '!'),
                _ => {
                    return Err(
                        "of groups with '?' only (?:, (?i:, (?= and (?! are known".to_owned()
                    );
                }
            }
        }
        let outside = std::mem::replace(&mut self.ignore_case, ignore_case);
        let tree = self.alternatives()?;
        self.ignore_case = outside;
        self.expect(')')?;
        Ok(tree)
    }

    fn look_ahead(&mut self, is_not: bool) -> Result<Tree, String> {
        let Tree::Set(set) = self.item()? else {
            return Err("a look-ahead must be one character or class".to_owned());
        };
        self.expect(')')?;
        Ok(Tree::Next {
            set: if is_not { set.complement() } else { set },
            or_end: is_not,
        })
    }

    fn letter(&self, c: char) -> CharSet {
        let set = CharSet::one(c);
        if !self.ignore_case {
            return set;
        }
        // Unicode's simple case folding: two letters have a third form.
        let third = match c {
            's' | 'S' => Some('\u{17F}'),
            'k' | 'K' => Some('\u{212A}'),
            _ => None,
        };
        let forms = [c.to_ascii_lowercase(), c.to_ascii_uppercase()]
            .into_iter()
            .chain(third);
        forms.fold(set, |set, form| set.union(CharSet::one(form)))
    }

    /// Parses the rest of an escape after its backslash.
    fn escape(&mut self) -> Result<CharSet, String> {
        Ok(match self.rest.next() {
            Some('r') => CharSet::one('\r'),
            Some('n') => CharSet::one('\n'),
            Some('t') => CharSet::one('\t'),
            Some('s') => CharSet::white_space(),
            Some('S') => CharSet::white_space().complement(),
            Some('d') => CharSet::property("Nd").unwrap_or_default(),
            Some('p') => {
                self.expect('{')?;
                let mut name = String::new();
                while let Some(c) = self.rest.next_if(|&c| c != '}') {
                    name.push(c);
                }
                self.expect('}')?;
                CharSet::property(&name).ok_or_else(|| format!("\\p{{{name}}} is not known"))?
            }
            Some(c) if c.is_ascii_punctuation() => CharSet::one(c),
            Some(c) => return Err(format!("\\{c} is not known")),
            None => return Err("a character is missing behind '\\'".to_owned()),
        })
    }

    /// Parses the rest of a class after its opening bracket, including the closing one.
    fn class(&mut self) -> Result<CharSet, String> {
        let is_not = self.take('^');
        let mut set = CharSet::default();
        loop {
            let first = match self.rest.next() {
                Some(']') => break,
                Some('&') if self.take('&') => {
                    self.expect('[')?;
                    let other = self.class()?;
                    self.expect(']')?;
                    set = set.intersection(&other);
                    break;
                }
                Some('\\') => match self.escape()? {
                    one if one.ranges().len() == 1 && one.ranges()[0].0 == one.ranges()[0].1 => {
                        char::from_u32(one.ranges()[0].0).unwrap_or_default()
                    }
                    many => {
                        set = set.union(many);
                        continue;
                    }
                },
                Some(c) if c != '[' => c,
                _ => return Err("']' is missing".to_owned()),
            };
            if self.take('-') {
                let last = match self.rest.next() {
                    Some('\\') => self.rest.next(),
                    last => last,
                };
                match last {
                    Some(last) if last >= first && last != ']' => {
                        let range = vec![(u32::from(first), u32::from(last))];
                        set = set.union(CharSet::from_ranges(range));
                    }
                    _ => return Err("a range must ascend".to_owned()),
                }
            } else {
                set = set.union(self.letter(first));
            }
        }
        if set.is_empty() {
            return Err("a class is empty".to_owned());
        }
        Ok(if is_not { set.complement() } else { set })
    }
}
