//! Incremental JSON: finds the end of a value, and reads an object that is a call.

/// Tracks one value through its text.
#[derive(Clone, Debug, Default)]
pub(super) struct Scanner {
    /// Closing brackets of the open ones.
    open: Vec<u8>,
    in_string: bool,
    after_backslash: bool,
}

/// Progress of a scanner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scanned {
    /// All of the text belongs to the value.
    All,
    /// End of the value.
    End(usize),
    /// Position of a closing bracket that does not match.
    Wrong(usize),
}

/// Maximum nesting of a value.
const DEEPEST: usize = 256;

impl Scanner {
    /// Continues a value, which is an object or a list.
    pub(super) fn scan(&mut self, text: &str) -> Scanned {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.after_backslash => self.after_backslash = false,
                    b'\\' => self.after_backslash = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => {
                    if self.open.len() == DEEPEST {
                        return Scanned::Wrong(at);
                    }
                    self.open.push(if byte == b'{' { b'}' } else { b']' });
                }
                b'}' | b']' => {
                    if self.open.pop() != Some(byte) {
                        return Scanned::Wrong(at);
                    }
                    if self.open.is_empty() {
                        return Scanned::End(at + 1);
                    }
                }
                _ => {}
            }
        }
        Scanned::All
    }
}

/// Names of the members of an object that is a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallKeys {
    /// Names of the function's name.
    pub name: &'static [&'static str],
    /// Names of the arguments.
    pub arguments: &'static [&'static str],
    /// Names of the ID.
    pub id: &'static [&'static str],
    /// True if the function's name is the key and the arguments are its value.
    pub name_is_key: bool,
    /// True if an ID may follow the arguments. Then an object is reported only once it is complete.
    pub id_is_last: bool,
}

/// State of an object that may be a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// Undecided: more text is needed.
    More,
    /// Not a call.
    Broken,
    /// Start of the arguments, and the number of brackets to close after them.
    Arguments {
        name: String,
        id: Option<String>,
        at: usize,
        depth: usize,
    },
    /// A complete call, and its end.
    Whole {
        name: String,
        id: Option<String>,
        arguments: String,
        end: usize,
    },
}

/// Reads the start of an object that may be a call.
pub(super) fn header(text: &str, keys: &CallKeys) -> Header {
    let mut reader = Reader { text, at: 0 };
    match object(&mut reader, keys, 1) {
        Ok(header) => header,
        Err(Stop::More) => Header::More,
        Err(Stop::Broken) => Header::Broken,
    }
}

fn object(reader: &mut Reader<'_>, keys: &CallKeys, depth: usize) -> Result<Header, Stop> {
    let (mut name, mut id, mut arguments): (Option<String>, Option<String>, Option<String>) =
        (None, None, None);
    let mut inner = None;
    reader.expect(b'{')?;
    let mut is_first = true;
    loop {
        let next = reader.peek()?;
        if next == b'}' {
            reader.at += 1;
            break;
        }
        if !std::mem::take(&mut is_first) {
            reader.expect(b',')?;
        }
        let key = reader.string()?;
        reader.expect(b':')?;
        let next = reader.peek()?;
        if keys.name_is_key {
            if next != b'{' || key.is_empty() {
                return Err(Stop::Broken);
            }
            return Ok(Header::Arguments {
                name: key,
                id: None,
                at: reader.at,
                depth,
            });
        }
        // Unknown or repeated members would be lost, so such an object is not a call.
        let is = |names: &[&str]| names.contains(&key.as_str());
        if next == b'{' && key == "function" && depth == 1 && inner.is_none() {
            match object(reader, keys, 2)? {
                Header::Whole {
                    name: inner_name,
                    id: inner_id,
                    arguments,
                    ..
                } => {
                    inner = Some((inner_name, arguments));
                    id = join(id, inner_id)?;
                }
                Header::Arguments {
                    name: inner_name,
                    id: inner_id,
                    at,
                    depth,
                } if name.is_none() => {
                    return Ok(Header::Arguments {
                        name: inner_name,
                        id: join(id, inner_id)?,
                        at,
                        depth,
                    });
                }
                _ => return Err(Stop::Broken),
            }
        } else if is(keys.name) && next == b'"' && name.is_none() {
            name = Some(reader.string()?);
        } else if is(keys.id) && next == b'"' && id.is_none() {
            id = Some(reader.string()?);
        } else if is(keys.id) && next.is_ascii_digit() && id.is_none() {
            id = Some(reader.skip()?.to_owned());
        } else if is(keys.arguments) && arguments.is_none() {
            match (&name, next) {
                (Some(name), b'{') if !keys.id_is_last => {
                    let name = name.clone();
                    return Ok(Header::Arguments {
                        name,
                        id,
                        at: reader.at,
                        depth,
                    });
                }
                // Arguments as a string that contains JSON.
                (_, b'"') => arguments = Some(reader.string()?),
                (_, b'n') => {
                    reader.skip()?;
                    arguments = Some("{}".to_owned());
                }
                _ => arguments = Some(reader.skip()?.to_owned()),
            }
        } else if key == "type" && next == b'"' {
            if reader.string()? != "function" {
                return Err(Stop::Broken);
            }
        } else {
            return Err(Stop::Broken);
        }
    }
    let (name, arguments) = match (name, inner) {
        (Some(name), None) if !name.is_empty() => {
            (name, arguments.unwrap_or_else(|| "{}".to_owned()))
        }
        (None, Some(inner)) if arguments.is_none() => inner,
        _ => return Err(Stop::Broken),
    };
    Ok(Header::Whole {
        name,
        id,
        arguments,
        end: reader.at,
    })
}

/// Merges the ID of a call, which may be in one of two places.
fn join(a: Option<String>, b: Option<String>) -> Result<Option<String>, Stop> {
    if a.is_some() && b.is_some() {
        Err(Stop::Broken)
    } else {
        Ok(a.or(b))
    }
}

/// Reads the end of a call's object after its arguments. Returns the position of the end.
pub(super) fn tail(text: &str, depth: usize) -> Result<usize, Stop> {
    let mut reader = Reader { text, at: 0 };
    let mut depth = depth;
    while depth > 0 {
        match reader.peek()? {
            b'}' => {
                reader.at += 1;
                depth -= 1;
            }
            // `, "type": "function"`
            b',' => {
                reader.at += 1;
                let key = reader.string()?;
                reader.expect(b':')?;
                if key != "type" || reader.peek()? != b'"' || reader.string()? != "function" {
                    return Err(Stop::Broken);
                }
            }
            _ => return Err(Stop::Broken),
        }
    }
    Ok(reader.at)
}

/// The reason why a reader stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The text ends.
    More,
    /// The text is not JSON.
    Broken,
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    /// Returns the next byte that is not white space.
    fn peek(&mut self) -> Result<u8, Stop> {
        let rest = &self.text.as_bytes()[self.at..];
        let space = rest
            .iter()
            .take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r'))
            .count();
        self.at += space;
        rest.get(space).copied().ok_or(Stop::More)
    }

    fn expect(&mut self, byte: u8) -> Result<(), Stop> {
        if self.peek()? != byte {
            return Err(Stop::Broken);
        }
        self.at += 1;
        Ok(())
    }

    fn string(&mut self) -> Result<String, Stop> {
        self.peek()?;
        let text = self.raw_string()?;
        serde_json::from_str(text).map_err(|_| Stop::Broken)
    }

    fn raw_string(&mut self) -> Result<&'a str, Stop> {
        let start = self.at;
        self.expect(b'"')?;
        let bytes = self.text.as_bytes();
        while let Some(&byte) = bytes.get(self.at) {
            self.at += 1;
            match byte {
                b'\\' => self.at += 1,
                b'"' => return Ok(&self.text[start..self.at]),
                // A JSON string cannot contain a newline.
                b'\n' => return Err(Stop::Broken),
                _ => {}
            }
        }
        Err(Stop::More)
    }

    /// Skips any value.
    fn skip(&mut self) -> Result<&'a str, Stop> {
        let next = self.peek()?;
        let start = self.at;
        match next {
            b'"' => self.raw_string(),
            b'{' | b'[' => match Scanner::default().scan(&self.text[start..]) {
                Scanned::End(length) => {
                    self.at += length;
                    let value = &self.text[start..self.at];
                    serde_json::from_str::<serde::de::IgnoredAny>(value)
                        .map_err(|_| Stop::Broken)?;
                    Ok(value)
                }
                Scanned::All => Err(Stop::More),
                Scanned::Wrong(_) => Err(Stop::Broken),
            },
            _ => {
                let rest = &self.text[start..];
                let end = rest
                    .find([',', '}', ']', ' ', '\n', '\t', '\r'])
                    .ok_or(Stop::More)?;
                serde_json::from_str::<serde::de::IgnoredAny>(&rest[..end])
                    .map_err(|_| Stop::Broken)?;
                self.at += end;
                Ok(&rest[..end])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: CallKeys = CallKeys {
        name: &["name"],
        arguments: &["arguments"],
        id: &["id"],
        name_is_key: false,
        id_is_last: false,
    };

    #[test]
    fn call_fields_parse_in_any_order_and_nesting() {
        let text = r#"{"name": "f", "arguments": {"a": 1}}"#;
        let Header::Arguments {
            name, at, depth, ..
        } = header(text, &KEYS)
        else {
            panic!()
        };
        assert_eq!(
            (name.as_str(), &text[at..], depth),
            ("f", r#"{"a": 1}}"#, 1)
        );
        for (text, arguments) in [
            (
                r#"{"arguments": {"a": 1}, "id": "7", "name": "f"} "#,
                r#"{"a": 1}"#,
            ),
            (r#"{"id": 7, "name": "f"}"#, "{}"),
            (
                r#"{"type":"function","id":"7","function":{"arguments":"{\"a\": 1}","name":"f"}}"#,
                r#"{"a": 1}"#,
            ),
        ] {
            let Header::Whole {
                name,
                id,
                arguments: got,
                ..
            } = header(text, &KEYS)
            else {
                panic!("{text}")
            };
            assert_eq!(
                (name.as_str(), id.as_deref(), got.as_str()),
                ("f", Some("7"), arguments)
            );
            for end in 0..text.trim_end().len() {
                assert_eq!(
                    header(&text[..end], &KEYS),
                    Header::More,
                    "{}",
                    &text[..end]
                );
            }
        }
        for broken in [
            "x",
            "{x",
            "{}",
            r#"{"name" "f"}"#,
            r#"{"name": }"#,
            r#"{"a": "b"}"#,
            "{\"na\nme\": 1}",
            r#"{"name": ""}"#,
        ] {
            assert_eq!(header(broken, &KEYS), Header::Broken, "{broken}");
        }
    }

    #[test]
    fn closing_brackets_after_a_call_are_skipped() {
        assert_eq!(tail(r#" , "type": "function"}]"#, 1), Ok(22));
        assert_eq!(tail(r#", "other": 1}]"#, 1), Err(Stop::Broken));
        assert_eq!(tail("}}", 2), Ok(2));
        assert_eq!(tail("}", 2), Err(Stop::More));
        assert_eq!(tail("x", 1), Err(Stop::Broken));
    }
}
